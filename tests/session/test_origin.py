"""What a continued run keeps of its past."""

from dataclasses import replace

import pytest

from jaxdp.config import Config, Phase
from jaxdp.errors import ConfigError
from jaxdp.session.origin import Continued, kept_ends, with_ended_phases, with_new_schedule
from jaxdp.validation import to_json, with_fields

THREE_PHASES = Config(batch=(Phase(8, until_epoch=10.0), Phase(16, until_epoch=20.0), Phase(32)))


def ends(config: Config) -> list[float | None]:
    return [phase.until_epoch for phase in config.batch]


@pytest.mark.parametrize(
    ("ended", "kept"),
    [
        ([], [10.0, 20.0, None]),
        ([(8, 5.0)], [5.0, 20.0, None]),
        ([(8, 5.0), (16, 12.5)], [5.0, 12.5, None]),
        ([(8, 5.0), (16, 12.5), (32, 80.0)], [5.0, 12.5, None]),  # the last phase ends with the run
        ([(8, 5.0), (4, 6.0), (16, 12.5)], [5.0, 20.0, None]),  # another run from its second phase on
        ([(4, 6.0), (16, 12.5)], [10.0, 20.0, None]),
        ([(8, 19.99)], [19.99, 20.0, None]),
        ([(8, 10.0), (16, 89.99)], [10.0, 89.99, None]),
    ],
)
def test_phases_that_have_ended_keep_their_ends(ended, kept):
    config = with_ended_phases(THREE_PHASES, ended)
    assert ends(config) == kept
    assert replace(config, batch=THREE_PHASES.batch) == THREE_PHASES
    changed = [index for index, end in enumerate(kept) if end != ends(THREE_PHASES)[index]]
    lines = kept_ends(THREE_PHASES, config)
    assert [line.split(" ")[0] for line in lines] == [f"batch.{index}" for index in changed]
    assert all(line.endswith(f"epoch {kept[index]:.4g}") for line, index in zip(lines, changed, strict=True))


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ([(8, 20.0)], "batch.0 has ended at epoch 20, and batch.1 would end at epoch 20"),
        ([(8, 5.0), (16, 90.0)], "batch.1 has ended at epoch 90, and batch.2 would end at epoch 90"),
    ],
)
def test_phase_that_would_end_with_or_before_an_ended_one_is_refused(ended, reason):
    with pytest.raises(ConfigError, match=f"^epochs=90.0: {reason}; give more epochs, or --batch"):
        with_ended_phases(THREE_PHASES, ended)


def from_epoch(epoch: float, **fields) -> Config:
    return with_fields(Config(), {"schedule.from_epoch": epoch} | fields)


@pytest.mark.parametrize(
    ("saved", "begins"),
    [
        (None, 10.0),
        (Config(), 10.0),
        (from_epoch(4.0), 4.0),  # the same command again, after an interruption
        (from_epoch(10.0), 10.0),
        (from_epoch(10.01), 10.0),  # its checkpoints are gone
        (from_epoch(4.0, **{"schedule.learning_rate": 2.0}), 10.0),  # another schedule
        (replace(from_epoch(4.0), name="other"), 4.0),
    ],
)
def test_new_schedule_begins_at_the_checkpoint_unless_the_same_one_has_begun(saved, begins):
    run = Continued(samples=1000, saved=saved and to_json(saved), ended=[], classes=None)
    assert with_new_schedule(Config(), 100, run=run) == from_epoch(begins)


def test_new_schedule_needs_a_checkpoint_and_room():
    with pytest.raises(ConfigError, match=r"^--schedule-from-now=True: there is no checkpoint to continue from"):
        with_new_schedule(Config(), 100, run=Continued(None, to_json(Config()), [], None))
    assert with_new_schedule(Config(), 100, run=Continued(0, None, [], None)) == Config()
    with pytest.raises(ConfigError, match=r"^schedule.warmup_epochs=5.0: must be less than the 5 epochs"):
        with_new_schedule(Config(), 100, run=Continued(8500, None, [], None))
