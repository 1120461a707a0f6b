"""Training runs for tests: screens that record and interrupt, and what a finished run leaves."""

import functools
import json
import tempfile
import time
from pathlib import Path

import pytest

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.loggers.console import Screen
from jaxdp.run_records import RECORD_FIELDS, TIMING, read_log
from jaxdp.session.job import Job
from jaxdp.session.train import train_job


class Interrupted(Exception):
    """Ends a run without a save of its last step."""


class Hidden(Screen):
    """Shows nothing: the base of screens that act on what a run shows."""

    def __init__(self):
        super().__init__(quiet=True)


class Recorder(Hidden):
    """Records the lines that a run shows, in `lines`. Raises Interrupted after a step or an evaluation at some samples."""

    def __init__(self, step=None, evaluated=None):
        super().__init__()
        self.last_step, self.last_samples, self.lines = step, evaluated, []

    def info(self, text):
        self.lines.append(text)

    def step(self, record):
        if record["step"] == self.last_step:
            raise Interrupted

    def evaluated(self, record):
        if record["samples"] == self.last_samples:
            raise Interrupted


class Acting(Recorder):
    """Calls functions after steps: number of the step -> function."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions

    def step(self, record):
        if record["step"] in self.actions:
            self.actions[record["step"]]()


def train_shown(config, workdir, *, screen=None, signals=None, started=None, **options):
    """`jaxdp.train` with the screen, the signals and the start of a command."""
    started = time.monotonic() if started is None else started
    return train_job(Job(config, workdir, screen=screen, started=started, signals=signals, **options))


def train_until(config, workdir, step=None, evaluated=None, **options):
    """Train and interrupt the run after a step or an evaluation. Returns the `Recorder`."""
    recorder = Recorder(step, evaluated)
    with pytest.raises(Interrupted):
        train_shown(config, workdir, screen=recorder, **options)
    return recorder


def damage(path):
    """Flip a bit of the largest file of a folder, such as a checkpoint."""
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def read_records(workdir):
    """The records of metrics.jsonl, whose fields are all described."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert {field for record in records for field in record} <= set(RECORD_FIELDS)
    return records


def tensorboard_scalars(folder):
    """{tag: {samples: value}} of the event files in a folder, as TensorBoard shows them: a session's start hides events of its
    step and later ones of earlier sessions."""
    from tensorboardX.proto import event_pb2

    scalars = {}
    for file in sorted(folder.iterdir()):
        # a record of the format is: length (8 bytes), its checksum (4), the event, its checksum (4)
        data, offset = file.read_bytes(), 0
        while offset < len(data):
            length = int.from_bytes(data[offset : offset + 8], "little")
            event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += 16 + length
            if event.session_log.status == event.session_log.START:
                for values in scalars.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def without_timing(record):
    return {name: value for name, value in record.items() if name not in TIMING}


def outcome(workdir):
    """What a finished run leaves that does not depend on time: log, result, samples and array digests of its last state."""
    result = json.loads((workdir / "result.json").read_text())
    last = latest_valid(workdir / "checkpoints")
    log = [without_timing(record) for record in read_log(workdir / "metrics.jsonl")]
    return log, without_timing(result) | {"workdir": None}, last.samples, last.arrays


@functools.cache
def outcome_of_whole_run(config):
    """The `outcome` of an uninterrupted run, which is trained once for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        train_shown(config, Path(folder) / "run", screen=Screen(quiet=True))
        return outcome(Path(folder) / "run")
