"""Traces of chosen steps, and the names of the parts of a step in them."""

import dataclasses
import gzip
import json
import os
import re
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest
from helpers.runs import Recorder, train_shown
from helpers.step import with_parts

from jaxdp import ConfigError, models, train
from jaxdp.config import Phase
from jaxdp.loggers.profile import Profile, time_shares
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.step_compiler import trace_train_step
from jaxdp.validation import validate

PARTS = ("augmentation", "forward", "backward", "all-reduce", "optimizer")
STEP_HLO = """HloModule step

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


def profiling(config, steps: str | None):
    return with_parts(config, logging={"profile": steps})


def lowered(config):
    plan = make_plan(config, examples=50, devices=4)
    model = models.create(config.model, "cpu")
    return trace_train_step(config, model, plan.phases[0], mesh=make_mesh(2, 2)).lower()


def test_train_step_named_scopes_appear_in_hlo_and_change_no_instruction(tiny, monkeypatch):
    named = lowered(tiny)
    text = named.as_text(debug_info=True)
    for part in PARTS:
        assert re.search(f'[/"]{part}/', text), part
    monkeypatch.setattr(jax, "named_scope", lambda _: nullcontext())
    plain = lowered(tiny)
    assert not re.search('[/"]optimizer/', plain.as_text(debug_info=True))
    assert plain.as_text() == named.as_text()


def test_train_with_profile_traces_the_steps_with_numbers_and_parts(tiny, tmp_path):
    """No other test has images of this size: a cached program would keep the names with which it was compiled."""
    config = dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),), data=dataclasses.replace(tiny.data, image_size=23))
    screen = Recorder()
    earlier = tmp_path / "profile/plugins/profile/2999_01_01_00_00_00"  # written before the clock was set back
    earlier.mkdir(parents=True)
    for name in ("host.trace.json.gz", "host.xplane.pb"):
        (earlier / name).write_bytes(b"")
        os.utime(earlier / name, (32e9, 32e9))
    train_shown(profiling(config, "3,2"), tmp_path, screen=screen)
    (file,) = set((tmp_path / "profile").rglob("*.trace.json.gz")) - {earlier / "host.trace.json.gz"}
    (line,) = [line for line in screen.lines if "traced" in line]
    assert line.startswith(f"steps 3 to 4 are traced in {tmp_path / 'profile'}; open {file} at https://ui.perfetto.dev")
    assert "tensorboard --logdir" in line
    (line,) = [line for line in screen.lines if "device time of these steps" in line]
    assert {name for name, _ in re.findall(r"([\w-]+) ([\d.]+) %", line)} >= {*PARTS}
    assert sum(float(share) for _, share in re.findall(r"([\w-]+) ([\d.]+) %", line)) == pytest.approx(100, abs=0.5)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {str(event["args"]["step_num"]) for event in events if "step_num" in event.get("args", {})}
    assert steps == {"3", "4"}
    xplane = next(file.parent.glob("*.xplane.pb"))
    assert all(f"/{part}/".encode() in xplane.read_bytes() for part in PARTS)


def test_time_shares_sum_the_instructions_of_each_part():
    """A loop counts by its body; instructions outside of the step are ignored."""
    seconds = {"mul.1": 2.0, "mul.2": 4.0, "while.1": 6.0, "add.1": 1.0, "copy.1": 0.5, "add.2": 2.5, "another": 9.0}
    expected = {"forward": 0.2, "backward": 0.4, "all-reduce": 0.1, "optimizer": 0.25, "rest": 0.05}
    assert time_shares(STEP_HLO, seconds) == pytest.approx(expected)
    assert time_shares(STEP_HLO, {}) == {}


def test_steps_of_an_earlier_session_are_not_traced():
    lines, run = [], SimpleNamespace(progress=SimpleNamespace(steps=4))
    run.info = lines.append
    Profile(range(3, 5)).on_start(run)
    Profile(range(3, 6)).on_start(run)
    assert len(lines) == 1


@pytest.mark.parametrize(("steps", "traced"), [("7,2", (7, 8)), ("14,2", (14, 15))])
def test_trace_ends_with_an_evaluation_or_the_run_after_its_last_step(tiny, tmp_path, steps, traced):
    """Step 8 is followed by a step of another phase, step 15 by the end of the run."""
    screen = Recorder()
    train_shown(profiling(tiny, steps), tmp_path, screen=screen)
    assert sum(f"steps {traced[0]} to {traced[1]} are traced" in line for line in screen.lines) == 1


def test_train_profile_that_is_malformed_or_beyond_the_last_step_raises_config_error(tiny, tmp_path):
    for steps in ("", "5", "0,3", "3,0", "3,-1", "3, 2", "a,b", "1,2,3", "1.5,2"):
        with pytest.raises(ConfigError, match=r"^logging.profile='.*': must be FIRST,COUNT: [^\n]*10,5$"):
            validate(profiling(tiny, steps))
    with pytest.raises(ConfigError, match=r"^logging.profile='14,3': steps 14 to 16 are not all among the 15 steps"):
        train(profiling(tiny, "14,3"), tmp_path)
    assert not (tmp_path / "config.json").exists()
