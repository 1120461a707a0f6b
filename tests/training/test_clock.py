"""Time of steps, against the time line of simulated devices: nothing here depends on real time."""

import math
import threading
from fractions import Fraction

import jax
import pytest
from helpers.runs import read_records, train_shown, train_until
from helpers.step import with_parts

from jaxdp import Callback
from jaxdp.callbacks import audit
from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import read_manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.data.prefetch import DeviceIterator
from jaxdp.loggers.console import Screen
from jaxdp.training import clock, loop, step_compiler
from jaxdp.training.clock import Clock


class Metrics(dict):
    """Metrics that the simulated devices compute."""

    def __init__(self, values, images):
        super().__init__(values)
        self.images, self.ready = images, threading.Event()

    def block_until_ready(self):
        assert self.ready.wait(60)


class Devices:
    """Devices that take `step_seconds` for a step, one after the other, and a host whose time passes only in `advance_to`.

    completed: (time, images) of all steps. pauses: (start, end) of what is no training. loads: (start, end) of the loading of
    each step's images. restarts: starts of phases.
    """

    def __init__(self, monkeypatch, *, step_seconds=1.0, blocks=False):
        self.now, self.free, self.step_seconds, self.blocks, self.waited = 0.0, 0.0, step_seconds, blocks, 0.0
        self.running, self.completed, self.pauses, self.loads, self.restarts = [], [], [], [], []
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        start_step = Clock.start_step

        def remember(timer, wait):
            timed = start_step(timer, wait)
            self.running[-1].append(timed.completion)
            if self.blocks:  # as small programs on a CPU do
                self.advance_to(self.free)
            return timed

        monkeypatch.setattr(Clock, "start_step", remember)

    def start(self, values, images):
        metrics = Metrics(values, images)
        self.free = max(self.now, self.free) + self.step_seconds
        self.running.append([self.free, metrics])
        return metrics

    def advance_to(self, time):
        """Let time pass; steps complete meanwhile, each at its time."""
        while self.running and self.running[0][0] <= time:
            self.now, metrics, noted = self.running.pop(0)
            metrics.ready.set()
            noted.result(60)
            self.completed.append((self.now, metrics.images))
        self.now = max(self.now, time)

    def spend(self, seconds):
        self.advance_to(self.now + seconds)

    def pause(self, seconds):
        assert not self.running
        self.pauses.append((self.now, self.now + seconds))
        self.spend(seconds)

    def finish(self, metrics):
        for end in [end for end, running, _ in self.running if running is metrics]:
            self.advance_to(end)

    def steps(self):
        """(images, seconds, seconds of them without images, completion) of each step, from the time line alone."""
        found, before = [], 0.0
        for (end, images), (load, loaded) in zip(self.completed, self.loads, strict=False):
            start = max([before, *(restart for restart in self.restarts if restart <= load)])
            paused = sum(b - a for a, b in self.pauses if start <= a and b <= end)
            found.append((images, Fraction(end - start - paused), Fraction(max(0.0, loaded - max(load, start))), end))
            before = end
        return found


def attach(devices, monkeypatch, *, load_seconds, pause_seconds=64.0):
    """Let a run take its steps on simulated devices."""
    compile_train, read, next_batch, evaluate = (
        step_compiler.StepCompiler._compile_train,
        loop.to_host_scalars,
        DeviceIterator.next,
        loop.evaluate,
    )
    save, describe, restart = CheckpointManager.save, audit.describe, Clock.restart
    seconds = iter(load_seconds)

    def compile_simulated(self, mesh, phase):
        step = compile_train(self, mesh, phase)

        def call(*arguments):
            state, metrics = jax.block_until_ready(step(*arguments))
            return state, devices.start(metrics, phase.global_batch)

        return call

    def load(self, wait):
        batch, began = next_batch(self, wait), devices.now
        if batch is not None:
            devices.spend(next(seconds))
            devices.waited += devices.now - began
            devices.loads.append((began, devices.now))
        return batch

    def read_completed(metrics):
        devices.finish(metrics)
        return read(metrics)

    def pausing(function):
        def call(*arguments, **options):
            devices.pause(pause_seconds)
            return function(*arguments, **options)

        return call

    def remember_restart(timer):
        restart(timer)
        devices.restarts.append(devices.now)

    monkeypatch.setattr(step_compiler.StepCompiler, "_compile_train", compile_simulated)
    monkeypatch.setattr(DeviceIterator, "next", load)
    monkeypatch.setattr(DeviceIterator, "wait_seconds", property(lambda self: devices.waited))
    monkeypatch.setattr(loop, "to_host_scalars", read_completed)
    monkeypatch.setattr(loop, "evaluate", pausing(evaluate))
    monkeypatch.setattr(CheckpointManager, "save", pausing(save))
    monkeypatch.setattr(audit, "describe", pausing(describe))
    monkeypatch.setattr(Clock, "restart", remember_restart)


class Work(Callback):
    """Takes time of the host, and asks for a save."""

    def __init__(self, devices):
        self.devices = devices

    def before_step(self, run, batch):
        self.devices.spend(0.125)
        if run.progress.steps == 5:
            run.save()

    def after_step(self, run, metrics):
        self.devices.spend(0.25)


CASES = [  # every_steps, seconds to load each batch, whether the start of a step blocks
    (1, [0.0], False),
    (1, [5.0], True),
    (1, [0.0, 8.0, 0.5, 0.0, 1.5], False),
    (10, [0.75, 5.0], False),
]


@pytest.mark.parametrize(("every_steps", "loading", "blocks"), CASES)
def test_rates_of_records_are_images_by_seconds_on_the_devices(tiny, tmp_path, *, every_steps, loading, blocks):
    """With evaluations, saves, audits and a change of the batch size, and in a session that resumes."""
    config = with_parts(tiny, logging={"every_steps": every_steps}, evaluation={"every_epochs": 0.5})
    config = with_parts(config, guard={"audit_every_steps": 4}, checkpoint={"every_epochs": 0.7})
    kept = {"wall_seconds": 0.0, "training_seconds": 0.0, "input_seconds": 0.0}  # of the session before
    for is_cut in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            devices = Devices(patch, blocks=blocks)
            attach(devices, patch, load_seconds=loading * 40)
            if is_cut:
                train_until(config, tmp_path, step=8, callbacks=[Work(devices)], started=0.0)
            else:
                result = train_shown(config, tmp_path, screen=Screen(quiet=True), callbacks=[Work(devices)], started=0.0)
            devices.advance_to(math.inf)
        steps, records = devices.steps(), [record for record in read_records(tmp_path) if "loss" in record]
        first = 0 if is_cut else 15 - len(steps)
        done = 0
        for record in [record for record in records if record["step"] > first]:
            images, seconds, waited, ends = zip(*steps[done : record["step"] - first], strict=True)
            assert record["images_per_second"] == float(sum(images) / sum(seconds))
            assert record["input_seconds"] == sum(waited)
            assert record["wall_seconds"] == kept["wall_seconds"] + ends[-1]
            done = record["step"] - first
        if is_cut:
            kept = read_manifest(checkpoint_paths(tmp_path / "checkpoints")[0]).metadata["progress"]
    assert 0 < first < 8
    assert done == len(steps)
    assert result.training_seconds == kept["training_seconds"] + sum(seconds for _, seconds, _, _ in steps)
    assert result.input_seconds == kept["input_seconds"] + sum(waited for _, _, waited, _ in steps)


def completed_step(timer, images):
    step = timer.start_step(lambda: None)
    step.completion.result(60)
    return timer.end_step(step, images)


@pytest.fixture
def now(monkeypatch):
    """The seconds of the clock, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    return now


def raise_after(seconds, now):
    now[0] += seconds
    raise KeyError


def test_paused_when_the_block_raises_counts_its_time_and_excludes_it_from_the_step(now):
    timer = Clock(Progress(), command_start=0.0)
    with pytest.raises(KeyError), timer.paused("evaluation"):
        raise_after(5.0, now)
    now[0] += 1.0
    completed_step(timer, images=8)
    assert (timer.progress.training_seconds, timer.progress.evaluation_seconds) == (1.0, 5.0)


def test_throughput_is_that_since_it_was_restarted_without_excluded_time(now):
    timer = Clock(Progress(), command_start=0.0)
    for seconds, input_seconds in ((1.0, 0.5), (3.0, 0.25)):
        now[0] += seconds
        timer.add_input_wait(input_seconds)
        found = completed_step(timer, images=8)
    assert found == {"images_per_second": 4.0, "input_seconds": 0.75, "wall_seconds": 4.0}
    timer.restart_throughput()
    now[0] += 2.0
    with timer.excluded():
        now[0] += 5.0
    assert completed_step(timer, images=8) == {"images_per_second": 4.0, "input_seconds": 0.0, "wall_seconds": 11.0}
    assert (timer.progress.training_seconds, timer.progress.input_seconds) == (6.0, 0.75)


def test_step_that_runs_during_a_pause_has_its_time_on_the_devices(now):
    """A callback compiled a program for 60 seconds while a step took 2: it counted as a step of none."""
    timer, ready = Clock(Progress(), command_start=0.0), threading.Event()
    step = timer.start_step(lambda: ready.wait(60))
    with timer.excluded():
        now[0] += 2.0
        ready.set()
        step.completion.result(60)
        now[0] += 58.0
    assert timer.end_step(step, images=8)["images_per_second"] == 4.0
    now[0] += 1.0
    assert completed_step(timer, images=8)["images_per_second"] == pytest.approx(16 / 3, rel=1e-12)


def test_first_step_and_wall_seconds_count_from_the_start_of_the_command(now):
    """Its first step alone sets the seconds to the first step; earlier sessions add to wall time."""
    now[0] = 100.0
    timer = Clock(Progress(wall_seconds=7.0, first_step_seconds=3.0), command_start=90.0)
    assert timer.wall_seconds == 17.0
    for step, wall in ((1, 19.0), (2, 21.0)):
        now[0] += 2.0
        assert completed_step(timer, images=8)["wall_seconds"] == wall
        assert (timer.progress.first_step_seconds, timer.progress.training_seconds) == (12.0, 2.0 * step)


def test_step_that_fails_raises_its_error_and_is_no_longer_on_the_devices(now):
    timer = Clock(Progress(), command_start=0.0)
    step = timer.start_step(lambda: raise_after(1.0, now))
    with pytest.raises(KeyError):
        timer.end_step(step, images=8)
    timer.restart()
    with timer.excluded():  # which counts only while no step is on the devices
        now[0] += 5.0
    now[0] += 2.0
    assert completed_step(timer, images=8)["images_per_second"] == 4.0


def test_input_wait_counts_once_for_the_next_step_while_no_step_runs(now):
    timer, ready = Clock(Progress(), command_start=0.0), threading.Event()
    step = timer.start_step(lambda: ready.wait(60))
    now[0] += 4.0
    timer.add_input_wait(4.0)  # a step is running
    ready.set()
    step.completion.result(60)
    now[0] += 2.0
    timer.add_input_wait(3.0)  # for two of them the devices were idle
    timer.add_input_wait(0.5)
    assert timer.end_step(step, images=8)["input_seconds"] == 0.0
    assert [completed_step(timer, images=8)["input_seconds"] for _ in range(2)] == [2.5, 2.5]
    timer.close()
    with pytest.raises(RuntimeError):
        timer.start_step(lambda: None)
