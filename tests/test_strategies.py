"""The table of strategies: every entry is documented, and has all that the other modules read from it."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import jaxdp
from jaxdp.analysis.cost_model import cost_terms
from jaxdp.config import Config, Reduce
from jaxdp.parallel import allreduce
from jaxdp.parallel.buckets import WIRE_BYTES
from jaxdp.parallel.redundant_sum import REFERENCE_REDUCTIONS, reference_reduction
from jaxdp.parallel.timing import auto_candidates
from jaxdp.strategies import AUTO, STRATEGIES, unsupported_reason
from jaxdp.validation import validate

ROOT = Path(__file__).parent.parent


def missing(name: str) -> list[str]:
    """What a strategy of jaxdp lacks."""
    strategy = STRATEGIES[name]
    checks = {
        "a row in docs/aggregation.md": f"\n| `{name}`" in (ROOT / "docs/aggregation.md").read_text(),
        "a help text": strategy.help,
        "stages in jaxdp/parallel/allreduce.py": all(callable(stage) for stage in allreduce.stages_of(name)),
        "a cost": strategy.cost and all(cost.rounds >= 0 and cost.volume >= 0 for cost in cost_terms(name, 2, 4)),
        "a reference reduction for audits": reference_reduction(name, 2, 4) in REFERENCE_REDUCTIONS,
    }
    return [what for what, found in checks.items() if not found]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_strategy_of_the_table_lacks_nothing(name):
    assert missing(name) == []


def test_register_strategy_adds_an_entry_without_cost_that_auto_does_not_measure():
    jaxdp.register_strategy("mine", allreduce.psum)
    assert STRATEGIES.registered == ["mine"]
    assert STRATEGIES["mine"].cost is None
    assert "mine" not in auto_candidates(8)
    assert validate(Config(reduce=Reduce(strategy="mine"))).reduce.strategy == "mine"


def test_unsupported_reason_names_the_device_limit():
    assert unsupported_reason("parameter_server", 64) is None
    assert unsupported_reason("parameter_server", 65) == "parameter_server supports at most 64 devices"
    assert unsupported_reason(AUTO, 10**6) is None


def test_wire_dtypes_of_the_config_have_a_width():
    assert set(get_args(get_type_hints(Reduce)["wire_dtype"])) == set(WIRE_BYTES)
    assert allreduce.wire_dtype_of(Reduce()) is None
    assert allreduce.wire_dtype_of(Reduce(wire_dtype="bfloat16")).itemsize == WIRE_BYTES["bfloat16"]
