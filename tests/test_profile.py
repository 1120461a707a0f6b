"""A trace of chosen steps, and the names of their parts in it."""

import dataclasses
import gzip
import json
import re
from contextlib import nullcontext

import jax
import pytest

from jaxdp import ConfigError, cli, models, train
from jaxdp.config import Phase
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.console import Quiet
from jaxdp.training.profile import NoProfile, profile_of, shares_of
from jaxdp.training.programs import trace_train_step
from jaxdp.validation import validate

PARTS = ("augmentation", "forward", "backward", "all-reduce", "optimizer")
A_STEP = """HloModule step

%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %mul.1 = f32[4]{0} multiply(%x, %x), metadata={op_name="jit(step)/shard_map/while/body/closed_call/forward/jvp(ResNet)/mul"}
  ROOT %mul.2 = f32[4]{0} multiply(%mul.1, %x), metadata={op_name="jit(step)/backward/transpose(forward)/mul"}
}

ENTRY %main (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %while.1 = f32[4]{0} while(%y), body=%body, metadata={op_name="jit(step)/shard_map/while"}
  %add.1 = f32[4]{0} add(%while.1, %y), metadata={op_name="jit(step)/shard_map/backward/all-reduce/add"}
  %copy.1 = f32[4]{0} copy(%add.1)
  ROOT %add.2 = f32[4]{0} add(%copy.1, %y), metadata={op_name="jit(step)/shard_map/optimizer/add"}
}
"""


class Listen(Quiet):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def profiling(config, steps: str | None):
    return dataclasses.replace(config, logging=dataclasses.replace(config.logging, profile=steps))


def lowered(config):
    plan = make_plan(config, 50, 4)
    model = models.create(config.model, "cpu")
    return trace_train_step(config, model, (0.0, 1.0), plan.phases[0], make_mesh(2, 2)).lower()


def test_the_parts_of_a_step_are_named_and_the_names_change_nothing(tiny, monkeypatch):
    named = lowered(tiny)
    text = named.as_text(debug_info=True)
    for part in PARTS:
        assert re.search(f'[/"]{part}/', text), part
    monkeypatch.setattr(jax, "named_scope", lambda _: nullcontext())
    plain = lowered(tiny)
    assert not re.search('[/"]optimizer/', plain.as_text(debug_info=True))
    assert plain.as_text() == named.as_text()


def test_the_steps_asked_for_are_traced_under_their_numbers_and_parts(tiny, tmp_path):
    """Width 3 is no other test's: a program from the cache would have the names with which it was compiled."""
    config = dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),), model=dataclasses.replace(tiny.model, width=3))
    screen = Listen()
    train(profiling(config, "3,2"), tmp_path, screen=screen)
    (file,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    (line,) = [line for line in screen.said if "traced" in line]
    assert line.startswith(f"steps 3 to 4 are traced in {tmp_path / 'profile'}; open {file} at https://ui.perfetto.dev")
    assert "tensorboard --logdir" in line
    (line,) = [line for line in screen.said if "of the devices' time" in line]
    assert {name for name, _ in re.findall(r"([\w-]+) ([\d.]+) %", line)} >= {*PARTS}
    assert sum(float(share) for _, share in re.findall(r"([\w-]+) ([\d.]+) %", line)) == pytest.approx(100, abs=0.5)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {str(event["args"]["step_num"]) for event in events if "step_num" in event.get("args", {})}
    assert steps == {"3", "4"}
    (xplane,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert all(f"/{part}/".encode() in xplane.read_bytes() for part in PARTS)


def test_the_shares_of_the_parts_are_those_of_their_instructions():
    """The loop's own time is that of its body; what is not in the step is left out."""
    seconds = {"mul.1": 2.0, "mul.2": 4.0, "while.1": 6.0, "add.1": 1.0, "copy.1": 0.5, "add.2": 2.5, "another": 9.0}
    expected = {"forward": 0.2, "backward": 0.4, "all-reduce": 0.1, "optimizer": 0.25, "rest": 0.05}
    assert shares_of(A_STEP, seconds) == pytest.approx(expected)
    assert shares_of(A_STEP, {}) == {}


def test_nothing_is_traced_unless_asked(tiny, tmp_path):
    assert isinstance(profile_of(tiny, tmp_path, 0, print), NoProfile)


def test_steps_that_an_earlier_session_took_are_told_and_those_left_are_traced(tiny, tmp_path):
    screen = Listen()
    asked = profiling(tiny, "3,2")
    assert isinstance(profile_of(asked, tmp_path, 4, screen.say), NoProfile)
    assert screen.said == ["logging.profile: steps 3 to 4 were taken in an earlier session; none is traced"]
    assert list(profile_of(asked, tmp_path, 3, screen.say).steps) == [3, 4]


@pytest.mark.parametrize("steps", ["", "5", "0,3", "3,0", "3,-1", "3, 2", "a,b", "1,2,3", "1.5,2"])
def test_a_malformed_range_is_one_line(tiny, steps):
    with pytest.raises(ConfigError, match=r"^logging.profile: '.*' is not allowed; it must be FIRST,COUNT: [^\n]*10,5$"):
        validate(profiling(tiny, steps))


def test_steps_beyond_the_end_are_one_line(tiny, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(profiling(tiny, "14,3"), tmp_path)
    assert str(caught.value) == (
        "logging.profile: '14,3' is not allowed; these are the steps 14 to 16, and the run has 15; give FIRST,COUNT within them"
    )
    assert not (tmp_path / "config.json").exists()


def test_the_short_flag_is_the_long_one(monkeypatch, capsys):
    from jaxdp.training import session

    given = []
    monkeypatch.setattr(session, "train", lambda config, *_, **__: given.append(config.logging.profile))
    for words in (["--profile", "3,2"], ["--logging.profile", "3,2"], ["--profile=3,2", "--logging.profile=3,2"], []):
        cli.main(["train", *words])
    assert given == ["3,2", "3,2", "3,2", None]
    with pytest.raises(SystemExit):
        cli.main(["train", "--profile", "3,2", "--logging.profile", "4,2"])
    assert "--profile: '3,2' is not allowed with --logging.profile '4,2'" in capsys.readouterr().err
