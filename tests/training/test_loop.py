"""Complete runs on four virtual devices: log, schedule, result and errors."""

import collections
import dataclasses
import itertools
import json
import math
import os
import signal
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.runs import Hidden, outcome, outcome_of_whole_run, read_records, train_shown
from helpers.step import with_parts

from jaxdp import Callback, Stopped, TrainingError, TrainResult, train
from jaxdp.callbacks import audit
from jaxdp.checkpoint import orbax_io, replicas
from jaxdp.config import Config, Phase, Schedule
from jaxdp.data import prefetch
from jaxdp.data.sampler import sample_ids
from jaxdp.data.sources import open_datasets
from jaxdp.distributed import process_group, status
from jaxdp.distributed.status import ProcessStatus
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen
from jaxdp.planning import make_plan
from jaxdp.training import loop, state, step_compiler
from jaxdp.training.clock import Clock
from jaxdp.validation import from_json


def test_train_writes_config_metrics_result_and_plot(tiny, plots, tmp_path):
    result = train(tiny, tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    logs = {"events.jsonl", "metrics.jsonl", "result.json", "training.png"}
    assert files == {".lock", "checkpoints", "classes.json", "config.json"} | logs
    assert from_json((tmp_path / "run/config.json").read_text()) == tiny
    saved = json.loads((tmp_path / "run/result.json").read_text())
    assert saved == json.loads(json.dumps(result.to_dict()))
    assert saved["eval_examples"] == 23
    assert saved["mesh"] == [2, 2]
    assert saved["seconds_to_first_step"] < saved["wall_seconds"]
    assert (tmp_path / "run/training.png").read_bytes().startswith(b"\x89PNG")


def test_log_across_a_batch_size_change_follows_the_plan(tiny, tmp_path):
    train(tiny, tmp_path)
    steps = [r for r in read_records(tmp_path) if "loss" in r]
    # 50 images an epoch: 10 steps of 8 reach 80 >= 75, the phase's end in mid-epoch; 5 steps of 16 reach 160 >= 150
    assert [r["global_batch"] for r in steps] == [8] * 10 + [16] * 5
    assert [r["step"] for r in steps] == list(range(1, 16))
    assert [r["samples"] for r in steps] == list(np.cumsum([8] * 10 + [16] * 5))
    for r in steps:
        before = (r["samples"] - r["global_batch"]) / 50
        expected = 2.0 * before if before < 1 else 1 + math.cos(math.pi * (before - 1) / 2)
        assert r["learning_rate"] == pytest.approx(expected, rel=1e-9)
        assert r["images_per_second"] > 0
    evaluations = [r["samples"] for r in read_records(tmp_path) if "eval_accuracy" in r]
    assert evaluations == [56, 112, 160]  # the first steps at or past 50, 100 and 150 images


def test_data_order_across_a_batch_size_change_is_that_of_the_sampler(tiny, tmp_path, monkeypatch):
    batches, to_global = [], prefetch.to_global
    monkeypatch.setattr(prefetch, "to_global", lambda batch, mesh: batches.append(batch) or to_global(batch, mesh))
    train(tiny, tmp_path)
    training = [batch for batch in batches if "weights" not in batch]
    positions = np.concatenate([batch["positions"] for batch in training])
    np.testing.assert_array_equal(positions, np.arange(160))
    images, labels = open_datasets(tiny).train.batch(sample_ids(tiny.seed, np.arange(160), 50))
    np.testing.assert_array_equal(np.concatenate([batch["images"] for batch in training]), images)
    np.testing.assert_array_equal(np.concatenate([batch["labels"] for batch in training]), labels)


@pytest.mark.slow
def test_train_on_synthetic_classes_reaches_90_percent(tiny, tmp_path):
    config = with_parts(tiny, data={"train_examples": 512, "eval_examples": 101}, schedule={"learning_rate": 8.0})
    result = train(dataclasses.replace(config, epochs=8.0, batch=(Phase(32, 6.0), Phase(64))), tmp_path)
    assert result.eval_examples == 101
    assert result.accuracy > 0.9


def test_next_phase_compiles_in_the_background_while_the_current_one_runs(tiny, tmp_path, monkeypatch):
    """Compilation of the second phase waits for a step of the first: a loop that waited for it would never end."""
    stepped, compile_train = threading.Event(), step_compiler.StepCompiler._compile_train
    threads = []

    def wait_and_compile(self, mesh, phase):
        threads.append(threading.current_thread().name)
        if phase.global_batch == 16:
            assert stepped.wait(60)
        return compile_train(self, mesh, phase)

    class Watch(Hidden):
        def step(self, record):
            if record["step"] == 3:
                stepped.set()

    monkeypatch.setattr(step_compiler.StepCompiler, "_compile_train", wait_and_compile)
    train_shown(tiny, tmp_path, screen=Watch())
    assert len(threads) == 2
    assert all(name.startswith("compile") for name in threads)


def test_metrics_of_a_step_are_fetched_after_the_next_dispatch(tiny, tmp_path, monkeypatch):
    events = []
    compile_train = step_compiler.StepCompiler._compile_train
    read = loop.to_host_scalars

    def compile_recording_dispatches(self, mesh, phase):
        step = compile_train(self, mesh, phase)

        def call(*arguments):
            events.append("dispatch")
            return step(*arguments)

        return call

    def recording_fetches(metrics):
        events.append("fetch")
        return read(metrics)

    monkeypatch.setattr(step_compiler.StepCompiler, "_compile_train", compile_recording_dispatches)
    monkeypatch.setattr(loop, "to_host_scalars", recording_fetches)
    config = dataclasses.replace(tiny, batch=(Phase(8),))
    train(with_parts(config, evaluation={"every_epochs": None}, checkpoint={"every_epochs": None}), tmp_path)
    assert events == ["dispatch", *["dispatch", "fetch"] * 18, "fetch"]


def test_train_with_a_finished_run_returns_its_result(tiny, tmp_path):
    first = train(tiny, tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = train(tiny, tmp_path / "run")
    assert isinstance(again, TrainResult)
    assert again == first
    assert repr(again).startswith(f"TrainResult(accuracy={again.accuracy:.4f}, ")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    fresh = train(tiny, tmp_path / "run", resume="never")
    assert fresh.workdir == str(tmp_path / "run-2")
    assert fresh.accuracy == first.accuracy


def test_log_with_the_same_seed_is_equal_and_with_another_differs(tiny, tmp_path):
    for seed in (0, 1):
        train(dataclasses.replace(tiny, seed=seed), tmp_path / str(seed))
        assert (outcome(tmp_path / str(seed))[0] == outcome_of_whole_run(tiny)[0]) == (seed == tiny.seed)


def test_train_in_the_directory_of_a_different_run_raises_and_changes_nothing(tiny, tmp_path):
    train(tiny, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"it holds a different run \(seed: 0 -> 5\)"):
        train(dataclasses.replace(tiny, seed=5), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_train_in_a_locked_directory_raises(tiny, tmp_path):
    refused = []

    class Intrude(Hidden):
        def step(self, record):
            if record["step"] == 2:
                with pytest.raises(ConfigError, match="another process is training in it") as error:
                    train(tiny, tmp_path)
                refused.append(error)

    train_shown(tiny, tmp_path, screen=Intrude())
    assert refused


def with_rate(config, rate, **schedule):
    """The config with plain SGD, whose updates grow with the learning rate."""
    return with_parts(config, optimizer={"name": "sgd"}, schedule={"learning_rate": rate, **schedule})


def test_non_finite_loss_raises_with_step_samples_and_learning_rate(tiny_resnet, tmp_path):
    reason = r"is (nan|inf) at step [23] \(samples (16|24), learning rate .*e\+14\): lower sched"
    with pytest.raises(TrainingError, match=reason):
        train(with_rate(tiny_resnet, 1e15), tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_non_finite_parameters_after_the_last_step_raise(tiny_resnet, tmp_path):
    """One step with a huge learning rate: its loss is finite, its updated parameters are not."""
    config = with_rate(dataclasses.replace(tiny_resnet, epochs=0.1, batch=(Phase(8),)), 1e15, warmup_epochs=0.0)
    with pytest.raises(TrainingError, match=r"held-out loss is (nan|inf) after the last step \(1, samples 8\)"):
        train(config, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_phase_without_steps_is_skipped(tiny, tmp_path):
    config = dataclasses.replace(tiny, batch=(Phase(40, 1.0), Phase(8, 1.2), Phase(32)))
    train(config, tmp_path)
    steps = [r for r in read_records(tmp_path) if "loss" in r]
    assert [(r["phase"], r["global_batch"]) for r in steps] == [(0, 40), (0, 40), (2, 32), (2, 32), (2, 32)]


def test_log_with_a_long_interval_includes_first_steps_of_phases_and_the_last_step(tiny, tmp_path):
    train(with_parts(tiny, logging={"every_steps": 4}), tmp_path)
    assert [r["step"] for r in read_records(tmp_path) if "loss" in r] == [1, 4, 8, 11, 12, 15]


def test_end_between_two_evaluations_is_evaluated(tiny, tmp_path):
    config = dataclasses.replace(tiny, batch=(Phase(10),), epochs=2.6)
    train(with_parts(config, evaluation={"every_epochs": 1.0}), tmp_path)
    assert [r["samples"] for r in read_records(tmp_path) if "eval_loss" in r] == [50, 100, 130]


def test_train_with_a_damaged_result_raises(tiny, tmp_path):
    train(tiny, tmp_path)
    for text in ("", "[]", '{"accuracy": 1}', "\xff"):
        (tmp_path / "result.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"its result\.json is damaged; delete that file to resume"):
            train(tiny, tmp_path)


def test_train_in_a_directory_without_config_raises_and_changes_nothing(tiny, tmp_path):
    for name in ("result.json", "metrics.jsonl", "tensorboard"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ConfigError, match=f"it holds {name} of a run, but no config.json"):
            train(tiny, folder)
        assert {path.name for path in folder.iterdir()} == {name, ".lock"}
    assert train(tiny, folder, resume="never").workdir == f"{folder}-2"


def test_out_of_memory_suggests_a_smaller_batch_which_the_directory_of_the_attempt_accepts(tiny, tmp_path, monkeypatch):
    def exhausted(self, mesh, phase):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore")

    config = dataclasses.replace(tiny, batch=(Phase(48),))
    with monkeypatch.context() as patch:
        patch.setattr(step_compiler.StepCompiler, "_compile_train", exhausted)
        with pytest.raises(ConfigError) as error:
            train(config, tmp_path)
    message = str(error.value)
    assert message.startswith("batch.0.per_worker_batch=12: out of memory (RESOURCE_EXHAUSTED")
    assert "try --batch.0.per-worker-batch 6, which keeps the global batch 48 by accumulating 2 micro-batches" in message
    assert "\n" not in message
    assert train(dataclasses.replace(config, batch=(Phase(48, per_worker_batch=6),)), tmp_path).steps == 4


def test_phases_on_different_numbers_of_devices_equal_one_device(tiny, tmp_path):
    """Three workers of four images use three of the four devices in the second phase; the losses are as on one device."""
    batch = (Phase(8, 1.0, per_worker_batch=4), Phase(12, None, per_worker_batch=4))
    single_device = dataclasses.replace(tiny.mesh, vertical=1, horizontal=1)
    plan = make_plan(dataclasses.replace(tiny, batch=batch), examples=50, devices=4)
    assert [phase.devices for phase in plan.phases] == [2, 3]
    train(dataclasses.replace(tiny, batch=batch), tmp_path / "many")
    alone = train(dataclasses.replace(tiny, batch=batch, mesh=single_device), tmp_path / "one")
    assert alone.strategy == "none"
    losses, expected = ([r["loss"] for r in read_records(tmp_path / n) if "loss" in r] for n in ("many", "one"))
    np.testing.assert_allclose(losses[:6], expected[:6], rtol=1e-3)


def test_train_with_invalid_arguments_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"must be a jaxdp.Config; use jaxdp.load_config\('digits'\)$"):
        train("digits", tmp_path)
    with pytest.raises(ConfigError, match="--resume='maybe': not found"):
        train(Config(), tmp_path, resume="maybe")
    assert not list(tmp_path.iterdir())


def test_phases_of_one_mesh_share_the_evaluation_program_with_the_rows_of_the_largest_batch(tiny):
    plan = make_plan(tiny, examples=50, devices=4)  # batches of 8 and 16
    programs = step_compiler.StepCompiler(plan, None, pixel_stats=(0.0, 1.0), evaluation_examples=23)
    assert [programs.evaluation_rows(phase) for phase in plan.phases] == [(12, 12)] * 2  # two batches, spread evenly
    programs.close()


def test_hyperparameters_of_each_phase_follow_the_plan(tiny, monkeypatch):
    """The noise-scale rule with momentum 0.5 at a batch of 8 gives 1 - 0.5 * 8 / 16 at a batch of 16."""
    monkeypatch.setattr("jaxdp.schedules.MOMENTUM_BATCH", 8)
    config = with_parts(tiny, optimizer={"momentum": 0.5, "momentum_rule": "noise_scale"})
    plan = make_plan(config, examples=50, devices=4)
    programs = step_compiler.StepCompiler(plan, None, pixel_stats=(0.0, 1.0), evaluation_examples=23)
    for phase, momentum in zip(plan.phases, (0.5, 0.75), strict=True):
        hyperparameters = programs.hyperparameters(phase, programs.plan.learning_rate(phase.first_sample))
        assert float(hyperparameters["momentum"]) == pytest.approx(momentum)
        assert float(hyperparameters["learning_rate"]) == pytest.approx(plan.learning_rate(phase.first_sample))
    programs.close()


def test_train_stopped_after_its_last_evaluation_raises_in_a_program_and_returns_the_result_when_repeated(tiny, tmp_path):
    class StopAtTheEnd(Hidden):
        def info(self, text):
            if text.startswith("accuracy"):
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=f"stopped by SIGTERM after the run in {tmp_path} had finished; the same command"):
        train_shown(tiny, tmp_path, screen=StopAtTheEnd())
    assert train_shown(tiny, tmp_path, screen=Screen(quiet=True)).steps == 15


def test_what_a_run_waits_for_is_announced_before_it_waits(tiny, tmp_path, monkeypatch):
    """Two phases of two steps each; the second ends with an evaluation. Others read it if the run stops moving."""
    events = []

    def record(owner, name, event):
        real = getattr(owner, name)

        def recording(self, *arguments, **options):
            events.append(event(*arguments, **options))
            return real(self, *arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    record(process_group.ProcessGroup, "barrier", lambda name: f"barrier: {name}")
    record(ProcessStatus, "set_activity", lambda *arguments, **options: (*arguments, *options.values()))
    record(ProcessStatus, "begin_iteration", lambda name: f"begin: {name}")
    config = dataclasses.replace(tiny, batch=(Phase(8, 0.3), Phase(16)), epochs=0.9, schedule=Schedule(warmup_epochs=0.0))
    train(with_parts(config, evaluation={"every_epochs": None}, checkpoint={"every_epochs": None}), tmp_path)

    def load(step):
        return [("load", step, "waiting for images"), ("step", step - 1, "waiting for the results of the previous step")]

    def phase(number, first):
        steps = [["begin: step", ("step", step, "starting the step"), *load(step + 1)] for step in (first, first + 1)]
        begin = [("compile",), f"barrier: phase {number}", *load(first), f"barrier: the first step of phase {number}"]
        return begin + steps[0] + steps[1]

    restoring = ("load", "restoring the newest checkpoint, if there is one")
    assert events[events.index(restoring) + 1 :] == [
        ("compile",),  # of the state
        *phase(0, 1),
        ("save", 2, "waiting for the previous save"),
        *phase(1, 3),
        ("compile", 4, "waiting for the evaluation program"),
        *[("evaluate",), "barrier: evaluation", *["begin: evaluate", ("evaluate", "a batch")] * 2],
        ("evaluate", "writing the log"),
        ("save", 4, "waiting for the previous save"),
        ("finish", 4, "waiting for the last save"),
        *[("finish", "writing the result"), ("finish",), ("outside",)],
    ]


def test_the_training_thread_says_what_it_waits_for(tiny, tmp_path, monkeypatch):
    """Otherwise, a hang of another rank would be its fault."""
    waits = collections.defaultdict(set)

    def record(owner, name):
        real = getattr(owner, name)

        def recording(*arguments, **options):
            if threading.current_thread() is threading.main_thread():
                waits[name].add(status.current().waits.get("", ""))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    class Predicts(Callback):
        def after_evaluation(self, run, evaluation):
            run.predict_held_out()
            run.predict(np.zeros((1, 16, 16, 3), np.uint8))

    layout, saving = state.StateLayout, [(replicas, "diverged_devices"), (orbax_io, "copy_to_host")]
    of_state = [(layout, name) for name in ("place", "gather_state", "eval_variables")]
    results = [(loop, "to_host_scalars"), (jax, "device_get"), (audit, "local_findings"), (Clock, "end_step")]
    waiting = {one: {status.DEVICES} for one in [(jax.stages.Compiled, "__call__"), *of_state, *saving, *results]}
    waiting |= {(Predicts, "after_evaluation"): {""}, (step_compiler.StepCompiler, "prepare_train"): {""}}
    waiting[Future, "result"] = {status.DEVICES, status.THREAD, status.SAVE}
    for owner, name in waiting:
        record(owner, name)
    monkeypatch.setattr(prefetch.Prefetcher.next, "__defaults__", None)  # every caller says how it waits
    train(with_parts(tiny, guard={"audit_every_steps": 2}), tmp_path, callbacks=[Predicts()])
    assert waits == {name: expected for (_, name), expected in waiting.items()}
    assert not status.current().waits.get("")  # of this thread; a compilation may still run in the background


def test_time_of_a_step_is_the_host_s_wait_for_it(tiny, tmp_path, monkeypatch):
    """The clock advances by one second at each reading: the start takes one second, and then the results."""
    seconds, times = itertools.count(), []

    class Times(Callback):
        def after_step(self, run, metrics):
            times.append(run.step_times)
            assert run.step_times[1] == run.progress.training_seconds

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    train(tiny, tmp_path, callbacks=[Times()])
    assert [waited for waited, _ in times] == [2.0] * 15
