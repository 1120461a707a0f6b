"""Every field of a configuration at its extremes: refused in one line that names it, or planned with finite numbers."""

import dataclasses
import math
from copy import deepcopy

import numpy as np
import pytest

from jaxdp.choices import SOURCES
from jaxdp.config import Config, Data, Logging, Model, Optimizer
from jaxdp.distributed.verdict import Limits
from jaxdp.distributed.watchdog import watch
from jaxdp.errors import ConfigError
from jaxdp.loggers.plan_table import as_dict, summary_table
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.validation import TABLES, changes, flatten, from_dict, validate, with_choices

EXTREMES = (0, -1, 1, 0.5, 5e-324, 1e-308, 1e308, -1e308, math.nan, math.inf, -math.inf, 2**31, 2**32, 2**63, 2**64 + 1, 10**30)
EXTREMES += ("", "x" * 5000, "\x1b[2J\n", True, None, ())
SUMMARY = dict.fromkeys(("parameters", "macs", "gradient_bytes", "statistics_bytes", "statistics"), 4)
SUMMARY |= {name: {"tensors": 1, "parameters": 4} for name in ("decayed", "not_decayed")}
SUMMARY["state_bytes"] = {"parameters": 4}
FIELDS = sorted(flatten(dataclasses.asdict(load_config("digits"))))
EXAMPLES = 1437


def set_field(fields: dict, name: str, value):
    """Set the field NAME.PART..., in place; of a list by its index."""
    *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
    for part in path:
        fields = fields[part]
    fields[last] = value


def with_field_in_use(name: str) -> dict:
    """A valid config that uses the field."""
    readers = {table.field: table.readers[name] for table in TABLES if name in table.readers}
    chosen = {field: "cifar10" if "cifar10" in names else names[0] for field, names in readers.items()}  # needs no directory
    if chosen.get(SOURCES.field) == "file":
        chosen["data.directory"] = "/data"
    fields = dataclasses.asdict(with_choices(load_config("digits"), chosen))
    fields["batch"] = [dict(phase) for phase in fields["batch"]]
    if name.startswith("augment.") or name == "data.stored_size":
        fields["data"]["stored_size"] = None
    return fields


def numbers(tree):
    if isinstance(tree, dict):
        tree = tree.values()
    if isinstance(tree, (int, float)):
        yield tree
    elif not isinstance(tree, (str, type(None))):
        for one in tree:
            yield from numbers(one)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_at_extreme_values_is_rejected_by_name_or_planned_with_finite_numbers(name):
    fields = with_field_in_use(name)
    from_dict(fields)  # valid before the change
    for value in EXTREMES:
        fields_after = deepcopy(fields)
        set_field(fields_after, name, value)
        try:
            config = from_dict(fields_after)
            plan = make_plan(config, examples=EXAMPLES, devices=4)
        except ConfigError as error:
            message = str(error)
            assert "\n" not in message
            assert "\x1b" not in message
            assert name.split(".")[-1] in message.replace("-", "_"), (value, message)
            continue
        summary_table(plan, "4 devices", SUMMARY)
        for number in numbers(as_dict(plan, SUMMARY)):
            assert math.isfinite(number)
            if isinstance(number, float):
                assert np.isfinite(np.float32(number))
            else:
                assert number < 2**63
        assert plan.total_steps > 0


def test_watchdog_with_the_largest_timeout_starts_and_stops():
    with watch(Limits(86_400.0, 60 * 1e6)) as watchdog:
        pass
    watchdog.thread.join(10)
    assert not watchdog.thread.is_alive()


def test_threshold_is_checked_again_when_the_data_state_the_classes():
    optimizer = Optimizer(loss="binary", target_threshold=0.05, label_smoothing=0.2)
    config = validate(Config(optimizer=optimizer, data=Data(source="synthetic")))
    with pytest.raises(ConfigError, match=r"^optimizer.target_threshold=0.05: all targets are 1"):
        make_plan(dataclasses.replace(config, model=Model(classes=3)), examples=1000, devices=1)


@pytest.mark.parametrize(
    ("old", "new", "expected"), [("auto", "separate", []), ("folded", "auto", ["model.batch_norm: 'folded' -> 'separate'"])]
)
def test_automatic_form_of_batch_norm_equals_the_form_that_it_selects(old, new, expected):
    config = load_config("digits")
    old, new = (dataclasses.replace(config, model=dataclasses.replace(config.model, batch_norm=form)) for form in (old, new))
    assert changes(old, new) == expected


def test_password_in_the_uri_of_mlflow_is_an_error_that_does_not_show_it():
    with pytest.raises(ConfigError, match=r"must not hold a password .*; set MLFLOW_TRACKING_USERNAME and") as error:
        validate(Config(logging=Logging(mlflow="https://me:secret@host/mlflow")))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "refused", "accepted"),
    [
        ("wandb", ["", "a/b", "x" * 129, "50%", "a\nb"], ["My project-1.ü"]),
        (
            "mlflow",
            ["", "runs", "./mlruns", "file:///tmp/x", "http://", "http://a b", "localhost:5000"],
            ["http://localhost:5000", "https://host/mlflow", "databricks", "databricks://x", "sqlite:///a.db"],
        ),
    ],
)
def test_names_of_trackers_are_those_that_they_accept(field, refused, accepted):
    for value in accepted:
        validate(Config(logging=Logging(**{field: value})))
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^logging\.{field}=.*: must be "):
            validate(Config(logging=Logging(**{field: value})))
