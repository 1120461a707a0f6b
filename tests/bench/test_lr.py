"""The learning-rate range test."""

import json
import math

import numpy as np
import pytest
from helpers.runs import read_records, train_shown

from jaxdp import schedules
from jaxdp.bench import lr
from jaxdp.cli import main
from jaxdp.config import Config, Phase, Schedule
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen
from jaxdp.schedules import SCHEDULES
from jaxdp.validation import to_json


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"steps": 19}, "--steps"),
        ({"lowest": 0.0}, "--lowest"),
        ({"lowest": 1.0, "highest": 1.0}, "--highest"),
        ({"highest": math.inf}, "--highest"),
    ],
)
def test_impossible_ranges_raise(tiny, options, field):
    with pytest.raises(ConfigError) as error:
        lr.run(tiny, **options)
    assert error.value.field == field


def quadratic_losses(rates, curvature=2.0):
    """The losses of gradient descent on curvature / 2 * x^2, which diverges at rates above 2 / curvature."""
    x, losses = 1.0, []
    for rate in rates:
        losses.append(curvature / 2 * x * x + 0.1)
        x -= rate * curvature * x
    return losses


def test_suggestion_is_below_the_rate_at_which_gradient_descent_diverges():
    rates = 10 ** np.linspace(-4, 2, 200)
    losses = quadratic_losses(rates)
    end = next(step for step in range(1, 201) if lr.has_diverged(losses[:step]))
    assert rates[end - 1] > 1.0  # 2 / curvature
    found = lr.suggest(rates[:end], losses[:end])
    assert found["suggested"] == pytest.approx(found["smallest_loss"] / lr.MARGIN)
    assert 0.01 < found["suggested"] < 1.0


def test_no_suggestion_without_a_falling_loss():
    rates = 10 ** np.linspace(-4, 0, 50)
    assert lr.suggest(rates, [2.3] * 50) == {"smallest_loss": None, "suggested": None}
    assert lr.suggest(rates[:5], [5.0, 4.0, 3.0, 2.0, math.nan])["suggested"] is None
    assert lr.has_diverged([1.0, math.inf])


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_field_gives_the_schedule_the_suggested_peak(name):
    schedule = Schedule(name=name, learning_rate=3.0, warmup_epochs=5.0, boundaries=(30.0,))
    config = Config(epochs=1e9, schedule=schedule, batch=(Phase(global_batch=1024),))
    field = lr.field_for(config, 0.7)
    changed = Schedule(name=name, learning_rate=field, warmup_epochs=5.0, boundaries=(30.0,))
    assert schedules.learning_rate(changed, 5.0, epochs=1e9, global_batch=1024) == pytest.approx(0.7, rel=1e-6)


def test_first_loss_is_that_of_training(tiny, tmp_path):
    record = lr.run(tiny, steps=20)
    train_shown(tiny, tmp_path / "run", screen=Screen(quiet=True))
    first = next(r for r in read_records(tmp_path / "run") if "loss" in r)
    assert record["losses"][0] == pytest.approx(first["loss"], rel=1e-6)
    assert len(record["rates"]) == len(record["losses"]) <= 20
    np.testing.assert_allclose(np.diff(np.log10(record["rates"])), 5 / 19)  # from a thousandth to a hundred times the peak
    assert record["global_batch"] == tiny.batch[0].global_batch


def test_command_writes_record_and_plot_and_prints_a_flag(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(to_json(tiny))
    main.main(["bench", "lr", "--config", "c.json", "--steps", "40"])
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "bench/lr/lr.json").read_text())
    if record["suggested_field"] is None:
        assert "no suggestion" in out
    else:
        assert f"--schedule.learning-rate {record['suggested_field']:.2g}" in out
    assert (tmp_path / "bench/lr/lr.png").stat().st_size > 1000
