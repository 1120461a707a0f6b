import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers import tiny_run
from helpers.processes import (
    CACHE_EVERYTHING,
    LONG,
    ONE_PHASE,
    ROOT,
    TIMEOUT,
    TINY,
    launch,
    outcome,
    pids_of,
    place,
    popen,
    wait_for_exit,
    wait_for_lines,
    wait_until,
)

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.inference.export import export
from jaxdp.inference.load_run import load_run
from jaxdp.run_records import read_log

pytestmark = pytest.mark.slow


def parameters(workdir):
    """The parameters of the last checkpoint, in one vector."""
    tiny_run.config()  # registers its network
    state, _, _ = load_run(workdir)
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(state.params)])


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("single") / "run"
    wait_for_exit(launch(1, workdir, recipe=TINY))
    return workdir


class Pair(NamedTuple):
    """An undisturbed run, and what it printed."""

    workdir: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes and two batch sizes. Every sixth step is audited."""
    workdir = tmp_path_factory.mktemp("pair") / "run"
    environment = {"JAX_LOG_COMPILES": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = launch(2, workdir, "--guard.audit-every-steps", "6", "--json", recipe=TINY, environment=environment)
    return Pair(workdir, *wait_for_exit(process))


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory):
    """Two processes, and many steps."""
    workdir = tmp_path_factory.mktemp("long_pair") / "run"
    wait_for_exit(launch(2, workdir, *LONG))
    return workdir


def assert_equals_single(workdir, single):
    """Log, accuracy and parameters up to rounding."""
    (expected_log, expected_accuracy, *_), (log, accuracy, *_) = outcome(single), outcome(workdir)
    assert len(log) == len(expected_log)
    for expected, record in zip(expected_log, log, strict=True):
        assert record.keys() - {"audit_share"} == expected.keys()
        for name in expected.keys() - {"accuracy"}:
            assert record[name] == pytest.approx(expected[name], rel=1e-4), name
    assert accuracy == expected_accuracy
    first, second = parameters(single), parameters(workdir)
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)


def test_train_on_two_processes_equals_a_single_process(single, pair):
    assert_equals_single(pair.workdir, single)
    result = json.loads((pair.workdir / "result.json").read_text())
    assert (result["processes"], result["hosts"], result["devices"]) == (2, 1, 8)
    assert 0 <= result["waiting_share"] <= 1


INTERLEAVED = """
import runpy, numpy as np
from jaxdp.training import step_compiler
by_process = step_compiler.devices_of_every_process
step_compiler.devices_of_every_process = lambda *given: np.reshape(by_process(*given), (2, -1)).T.ravel().tolist()
runpy.run_path("train.py", run_name="__main__")
"""


def test_processes_whose_devices_alternate_in_the_mesh_equal_a_single_process(single, tmp_path):
    """As on a TPU slice, whose rows do not end at hosts. Data, evaluation, audits and sharded checkpoints follow the mesh."""
    (script := tmp_path / "interleaved.py").write_text(INTERLEAVED)
    flags = ["--mesh.cpu-devices", "4", "--reduce.update", "sharded", "--guard.audit-every-steps", "6"]
    command = [str(script), "--workdir", str(tmp_path / "run"), *TINY, *flags]
    wait_for_exit(launch(2, tmp_path / "run", command=command))
    assert_equals_single(tmp_path / "run", single)


def test_audits_on_two_processes_pass(pair):
    audited = {line["step"]: line["audit_share"] for line in outcome(pair.workdir)[0] if "audit_share" in line}
    assert list(audited) == [6, 12, 18, 24]
    assert all(0 < share <= 1 for share in audited.values())
    assert json.loads((pair.workdir / "result.json").read_text())["audits"] == 4


def test_checkpoints_are_written_by_all_processes_without_compiling_a_program(pair):
    assert "Finished XLA compilation of jit(step)" in pair.err
    assert "Finished XLA compilation of jit(slice)" not in pair.err
    state = latest_valid(pair.workdir / "checkpoints").path / "state"
    sizes = [sum(file.stat().st_size for file in (state / f"part-{rank}").rglob("*")) for rank in range(2)]
    assert min(sizes) > 10_000


def test_json_output_is_one_document_on_stdout_although_gloo_prints_there(pair):
    lines = [line.partition("] ")[2] for line in pair.out.splitlines() if line.startswith("[0] ")]
    assert json.loads("\n".join(lines))["processes"] == 2


def test_schedule_from_now_on_two_processes_keeps_the_log(pair, tmp_path):
    """Four epochs, then two of a new schedule: polynomial of power 2 after a warm-up of half an epoch."""
    run = shutil.copytree(pair.workdir, tmp_path / "run")
    before, events = ((run / name).read_text() for name in ("metrics.jsonl", "events.jsonl"))
    assert "eval_loss" in before.splitlines()[-1]
    flags = ["--epochs", "6", "--schedule.warmup-epochs", "0.5", "--accept-changes", "--schedule-from-now"]
    wait_for_exit(launch(2, run, *flags, recipe=TINY))
    rates = [line["learning_rate"] for line in read_log(run / "metrics.jsonl") if "loss" in line and line["samples"] > 4 * 64]
    epochs = [samples / 64 for samples in range(0, 2 * 64, 16)]  # of the new schedule
    assert rates == pytest.approx([0.002 * (epoch / 0.5 if epoch < 0.5 else ((2 - epoch) / 1.5) ** 2) for epoch in epochs])
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert (run / "events.jsonl").read_text().startswith(events)


def test_audit_of_a_wrong_sum_ends_all_processes_and_names_the_missing_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import jax.numpy as jnp
        from jax import lax
        import jaxdp
        from jaxdp.cli.main import run
        from jaxdp.parallel.allreduce import stages_of
        from jaxdp.parallel.mesh import AXES

        def losing(vector):  # of gradients, not of the integers that check a strategy at the start
            return jnp.where((lax.axis_index(AXES) == 5) & jnp.any(vector != jnp.round(vector)), 0 * vector, vector)

        jaxdp.register_strategy("losing", losing, *stages_of("torus"))
        run("train", sys.argv[1:], "train.py")
        """)
    )
    more = ["--mesh.cpu-devices", "4", "--reduce.strategy", "losing", "--guard.audit-every-steps", "10"]
    command = [str(script), "--workdir", str(tmp_path / "run"), *ONE_PHASE, *more]
    _, err = wait_for_exit(launch(2, tmp_path / "run", command=command), 1)
    pattern = r"the audit of step 10 failed: bucket \d+ of \d+ \(.*reduced by losing on a 2x4 mesh.* on all 8 devices"
    assert re.search(pattern, err)
    assert re.search(r"the contribution of the device in row 1, column 1 of the mesh \(rank 1 on \S+\) is missing", err)
    ends = r"jaxdp: .*the checkpoints after that are now \S+/checkpoints/128.suspect.* starts over"
    assert {rank for rank in "01" if re.search(rf"\[{rank}\] {ends}", err)} == {"0", "1"}
    assert latest_valid(tmp_path / "run/checkpoints") is None


def test_sigterm_to_one_rank_saves_on_all_at_the_same_step_and_resumes_bitwise(long_pair, tmp_path):
    process = launch(2, tmp_path / "cut", *LONG)
    pids = pids_of(process, 2)
    wait_for_lines(tmp_path / "cut", 9, process)
    os.kill(pids[1], signal.SIGTERM)  # not rank 0, which writes
    _, err = wait_for_exit(process, 75)
    assert re.search(
        r"stopped by SIGTERM \(rank 1 on \S+\) after step \d+ .* the last valid checkpoint is .*/checkpoints/\d+", err
    )
    wait_for_exit(launch(2, tmp_path / "cut", *LONG))
    assert outcome(tmp_path / "cut") == outcome(long_pair)


def test_resume_of_a_sharded_update_with_more_or_fewer_processes_equals_a_replicated_single_process(tmp_path):
    """On four processes, a row of the mesh spans two of them; on two, one of them."""
    single, run, sharded = tmp_path / "single", tmp_path / "run", ["--reduce.update", "sharded"]
    long = {"recipe": [*TINY, "--epochs", "12", "--batch.0.until-epoch", "6"]}  # 72 steps, the batch changes in the middle
    wait_for_exit(launch(1, single, **long))
    process = launch(2, run, *sharded, **long)
    wait_for_lines(run, 6, process)
    process.send_signal(signal.SIGTERM)  # to all of them
    wait_for_exit(process, 75)
    process = launch(4, run, *sharded, "--mesh.vertical", "2", **long)
    wait_for_lines(run, 14, process)
    process.send_signal(signal.SIGINT)
    wait_for_exit(process, 75)
    wait_for_exit(launch(1, run, *sharded, **long))
    expected, log = outcome(single)[0], outcome(run)[0]
    exact = ("step", "samples", "epoch", "phase", "global_batch", "learning_rate", "momentum")
    assert [[line.get(name) for name in exact] for line in log] == [[line.get(name) for name in exact] for line in expected]
    for one, other in zip(expected, log, strict=True):
        for name in one.keys() & {"loss", "gradient_norm", "eval_loss"}:
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    first, second = parameters(single), parameters(run)
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)


def test_a_killed_rank_0_is_named_and_a_restart_resumes_bitwise(long_pair, tmp_path):
    """Rank 0 coordinates the other ranks and writes the log. JAX aborts rank 1, often before it has printed who failed.

    That rank 1 names rank 0: tests/distributed/test_supervisor.py. A killed rank 1: test_own_parts.py.
    """
    process = launch(2, tmp_path / "cut", *LONG, restarts=1)
    pids = pids_of(process, 2)
    wait_for_lines(tmp_path / "cut", 40, process)  # several saves have begun, so all ranks know of the first
    os.kill(pids[0], signal.SIGKILL)
    _, err = wait_for_exit(process)
    assert "rank 0 failed first, by SIGKILL" in err
    assert "restarting; 0 more restarts after this one" in err
    assert outcome(tmp_path / "cut") == outcome(long_pair)


def test_a_suspended_process_is_named_by_the_others_and_killed_by_the_launcher(tmp_path):
    victim = 0  # rank 1: tests/distributed/test_processes.py
    process = launch(2, tmp_path / "run", *LONG, "--guard.silence-seconds", "4")
    pids = pids_of(process, 2)
    wait_for_lines(tmp_path / "run", 5, process)
    os.kill(pids[victim], signal.SIGSTOP)
    _, err = wait_for_exit(process, 1)
    assert re.search(rf"\[{1 - victim}\] jaxdp: rank {victim} on \S+ failed.*sent no sign of life for", err)
    assert f"rank {victim} is still running or suspended; killing it" in err


def test_a_different_command_on_one_process_ends_all_and_is_shown_field_by_field(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        other = ["--optimizer.momentum", "0.8", "--resume", "never"]
        sys.argv += other if os.environ["JAX_PROCESS_ID"] == "1" else []
        sys.path.insert(0, {str(ROOT)!r})
        from jaxdp.cli.main import run
        run("train", sys.argv[1:], "train.py")
        """)
    )
    command = [str(script), "--workdir", str(tmp_path / "run"), *TINY, "--mesh.cpu-devices", "4"]
    _, err = wait_for_exit(launch(2, tmp_path / "run", command=command), 2)
    assert re.search(r"rank 1 on \S+ differs from rank 0 on ", err)
    assert "optimizer.momentum: 0.9 on rank 0, 0.8 on rank 1" in err
    assert re.search(r"--resume: \w+ on rank 0, never on rank 1", err)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["processes"]


SLOW = """
import dataclasses, os, sys, time
import numpy as np
sys.path.insert(0, {root!r})
sys.path.insert(0, {root!r} + "/tests/helpers")
import jaxdp, tiny_run
from jaxdp.config import Config, Data, Logging, Mesh, Optimizer, Phase, Schedule

class Images:
    classes = 10
    def __init__(self, seconds=0):
        self.seconds = seconds
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.seconds if os.environ["JAX_PROCESS_ID"] == "1" else 0)
        return np.full((80, 80, 3), index, np.uint8), index % 10

config = Config(
    name="slow", epochs=3.0, data=Data(source="given", image_size=80, threads=1, augmentation="none"),
    model=tiny_run.config().model, batch=(Phase(8),), optimizer=Optimizer(name="sgd"),
    schedule=Schedule(learning_rate=0.1, warmup_epochs=1.0), mesh=Mesh(cpu_devices=2),
    logging=Logging(every_steps=4, tensorboard=False),
)
jaxdp.train(config, {workdir!r}, datasets=(Images({seconds}), Images(0)))
"""


def test_a_straggler_is_named_in_the_result_and_the_log(tmp_path):
    script = tmp_path / "slow.py"
    text = SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0.4)
    script.write_text(text.replace("epochs=3.0", "epochs=1.5"))  # 12 steps, late by 1.6 s each
    wait_for_exit(launch(2, None, command=[str(script)]))
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["slowest"][0]["rank"] == 1
    assert result["slowest"][0]["late_seconds"] > 0
    assert 0 < result["waiting_share"] < 1
    lines = read_log(tmp_path / "run/metrics.jsonl")
    assert 1 in [line["slowest_rank"] for line in lines if "slowest_rank" in line]


def test_resume_without_the_weights_file_of_a_rank_continues_on_all(pair, tmp_path):
    recipe, run, files = tmp_path / "own_paths.py", tmp_path / "run", [tmp_path / f"{rank}.safetensors" for rank in (0, 1)]
    recipe.write_text(
        "import dataclasses, os, sys\n"
        f"sys.path.insert(0, {str(Path(tiny_run.__file__).parent)!r})\n"
        "import one_phase_run\n"
        "from jaxdp.config import Finetune\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['JAX_PROCESS_ID'] + '.safetensors'\n"
        "def config():\n    return dataclasses.replace(one_phase_run.config(), finetune=Finetune(weights=path))\n"
    )
    command = ["train.py", "--workdir", str(run), "--config", str(recipe), "--mesh.cpu-devices", "4"]
    tiny_run.config()  # registers its network
    for file in files:
        export(pair.workdir, file)
    wait_for_exit(launch(2, None, command=command))
    whole = outcome(run)
    files[0].unlink()
    (run / "result.json").unlink()
    shutil.rmtree(latest_valid(run / "checkpoints").path)
    out, _ = wait_for_exit(launch(2, None, command=command))
    assert outcome(run) == whole
    assert "no longer exists; the run does not need it to resume" in re.sub(r"\s+(\[0\] )?", " ", out)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
def test_mpirun_trains_like_a_single_process(single, tmp_path):
    flags = ["--allow-run-as-root", "--oversubscribe"]
    command = [sys.executable, "train.py", "--workdir", str(tmp_path / "run"), *TINY, "--mesh.cpu-devices", "4"]
    environment = os.environ | CACHE_EVERYTHING
    completed = subprocess.run(
        ["mpirun", *flags, "-np", "2", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert completed.returncode == 0, completed.stderr
    assert "\x1b" not in completed.stdout  # no progress bar, although mpirun gives each process a terminal
    if os.cpu_count() > 1:
        assert f"mpirun binds this process to 1 of {os.cpu_count()} cores" in completed.stdout
    assert json.loads((tmp_path / "run/result.json").read_text())["processes"] == 2
    first, second = parameters(single), parameters(tmp_path / "run")
    assert np.linalg.norm(first - second) < 1e-4 * np.linalg.norm(first)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
def test_the_documented_open_mpi_script_saves_and_stops_on_sigterm(tmp_path):
    """The script turns the scheduler's SIGTERM into SIGUSR1, the only one of them that mpirun forwards."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\nmpirun.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    run = tmp_path / "run"
    tiny = shlex.join([*ONE_PHASE, "--epochs", "400", "--mesh.cpu-devices", "2"])
    script = script.replace("mpirun", "mpirun --allow-run-as-root --oversubscribe").replace("runs/goyal", str(run))
    script = script.replace("python train.py --config imagenet_goyal_256", f"{sys.executable} train.py {tiny}")
    (tmp_path / "job.sh").write_text(script)
    job = popen(["bash", tmp_path / "job.sh"])
    wait_for_lines(run, 6, job)
    job.terminate()
    out, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 75, (out, err)
    assert "jaxdp: stopped by SIGUSR1 " in err
    assert "second signal" not in err
    assert not list((run / "checkpoints").glob("saving-*"))
    stopped_at = int(re.search(r"after step (\d+)", err)[1])
    assert latest_valid(run / "checkpoints").metadata["progress"]["steps"] == stopped_at


def script_of(tmp_path, body):
    """A script of two processes: `config` is the tiny run of `SLOW`, `rank` this process's."""
    text = SLOW.format(root=str(ROOT), workdir=str(tmp_path / "run"), seconds=0).rpartition("jaxdp.train")[0]
    script = tmp_path / "script.py"
    script.write_text(f"{text}\nrank = int(os.environ['JAX_PROCESS_ID'])\n{textwrap.dedent(body)}")
    return [str(script)]


def test_a_save_that_fails_in_one_process_ends_all_and_names_the_last_checkpoint(tmp_path):
    body = f"""
        import errno
        import orbax.checkpoint as ocp
        save, saves = ocp.Checkpointer.save, []
        def failing(*arguments, **more):
            saves.append(None)
            if rank == 1 and len(saves) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return save(*arguments, **more)
        ocp.Checkpointer.save = failing
        jaxdp.train(config, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
    """
    _, err = wait_for_exit(launch(2, None, command=script_of(tmp_path, body)), 1)
    assert re.search(
        r"\[0\] jaxdp: rank 1 on \S+ failed (?:in step|[a-z ]+, step) \d+, saving the checkpoint of 128 samples.*: the ", err
    )
    assert re.search(
        r"could not be saved \(.*No space left on device\); the same command continues from \S+/checkpoints/64", err
    )


def test_a_data_source_that_sleeps_during_the_start_is_reported_and_ends_the_run(tmp_path):
    """Small images are decoded before the first step."""
    body = f"""
        from jaxdp.config import Guard
        from jaxdp.distributed import watchdog
        class Small(Images):
            def __getitem__(self, index):
                time.sleep(10_000 if rank == 1 and index == 40 else 0)
                return np.full((16, 16, 3), index, np.uint8), index % 10
        watchdog.LATE_SECONDS = 4.0
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, image_size=16), guard=Guard(step_minutes=0.3)
        )
        jaxdp.train(config, {str(tmp_path / "run")!r}, datasets=(Small(), Small()))
    """
    _, err = wait_for_exit(launch(2, None, command=script_of(tmp_path, body)), 1)
    reason = r"stuck: no progress for \d+ s; .*script.py:\d+ in __getitem__"
    for rank in range(2):
        assert re.search(rf"\[{rank}\] jaxdp: no progress for \d+ s: .*while loading", err), err
        assert re.search(rf"\[{rank}\] jaxdp: rank 1 on \S+ failed while loading, [^:]*: {reason}", err), err


def test_sigterm_while_one_process_opens_its_data_stops_all(tmp_path):
    body = f"""
        from jaxdp.setup import prepare
        opened = prepare.open_datasets
        def slow(*arguments, **options):
            print("opening", flush=True)
            time.sleep(3600 * rank)
            return opened(*arguments, **options)
        prepare.open_datasets = slow
        from jaxdp.cli.main import main
        main(["train", "--workdir", {str(tmp_path / "run")!r}, *{TINY!r}, "--mesh.cpu-devices", "2"])
    """
    process = launch(2, None, command=script_of(tmp_path, body))
    seen = ""
    while seen.count("opening") < 2:
        seen += (line := process.stdout.readline())
        assert line, process.communicate()
    os.kill(pids_of(process, 2)[1], signal.SIGTERM)
    wait_for_exit(process, 75)


def test_an_error_between_two_runs_of_a_program_ends_all_processes(tmp_path):
    body = f"""
        for name in ("first", "second"):
            jaxdp.train(config, {str(tmp_path)!r} + "/" + name, datasets=(Images(), Images()))
            if rank == 1:
                raise ValueError("raised by the program")
    """
    _, err = wait_for_exit(launch(2, None, command=script_of(tmp_path, body)), 1)
    assert re.search(r"\[0\] jaxdp: rank 1 on \S+ failed .*: ValueError: raised by the program", err)


def test_sigterm_after_the_last_step_stops_a_program_that_would_train_again_on_all_processes(tmp_path):
    body = f"""
        import signal
        class AtTheEnd(jaxdp.Callback):
            def on_end(self, run, result):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        for name in ("first", "second"):
            jaxdp.train(config, {str(tmp_path)!r} + "/" + name, datasets=(Images(), Images()), callbacks=[AtTheEnd()])
    """
    _, err = wait_for_exit(launch(2, None, command=script_of(tmp_path, body)), 75)
    assert re.search(r"\[0\] .*stopped by SIGTERM \(rank 1 on \S+\) after the run in \S+/first had finished", err)
    assert not (tmp_path / "second/metrics.jsonl").exists()


def test_sigterm_while_waiting_for_rank_0_exits_with_75_and_mentions_a_checkpoint(tmp_path, free_port):
    command = [sys.executable, "train.py", "--workdir", str(tmp_path / "run"), *TINY]
    process = popen(command, place(1, 2, free_port))
    wait_until((tmp_path / "run/processes/1.json").exists, process)  # it waits for rank 0
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75
    resume = "the same command continues from the last checkpoint, if there is one"
    assert err == f"jaxdp: stopped by SIGTERM before the first step of this session; {resume}\n"


def test_train_after_a_failure_of_the_group_raises_and_a_configuration_that_differs_is_not_restarted(tmp_path):
    body = f"""
        import dataclasses
        other = dataclasses.replace(config, seed=rank)
        try:
            jaxdp.train(other, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
        except jaxdp.ConfigError as error:
            print("first:", error, flush=True)
        jaxdp.train(config, {str(tmp_path / "run")!r}, datasets=(Images(), Images()))
    """
    out, err = wait_for_exit(launch(2, None, command=script_of(tmp_path, body), restarts=1), 2)
    assert "seed: 0 on rank 0, 1 on rank 1" in out
    assert "the processes of this run have failed before" in err
    assert "restarting" not in err


def test_a_process_with_a_full_output_pipe_exits_after_a_failure(tmp_path, free_port):
    """Its pipe is full, so that printing blocks."""
    (script,) = script_of(tmp_path, f"jaxdp.train(config, {str(tmp_path / 'run')!r}, datasets=(Images(), Images()))")
    Path(script).write_text(Path(script).read_text().replace("epochs=3.0", "epochs=400.0"))
    read, write = os.pipe()
    os.set_blocking(write, False)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ | place(rank, 2, free_port),
            cwd=ROOT,
            **({"stdout": write, "stderr": write} if rank == 0 else quiet),
        )
        for rank in range(2)
    ]
    wait_for_lines(tmp_path / "run", 3, running[0])
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    running[1].kill()
    assert running[0].wait(TIMEOUT) != 0
    running[1].wait()
    os.close(read), os.close(write)
