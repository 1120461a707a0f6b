"""The table of strategies: every entry is documented, and has all that the other modules read from it."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from jaxdp.analysis.network_model import cost_terms
from jaxdp.config import Reduce
from jaxdp.parallel import allreduce
from jaxdp.parallel.buckets import WIRE_BYTES
from jaxdp.parallel.redundant_sum import REFERENCE_REDUCTIONS, reference_reduction
from jaxdp.strategies import STRATEGIES, Strategy, unsupported_reason

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


def test_unsupported_reason_names_the_device_limit():
    assert unsupported_reason("parameter_server", 64) is None
    assert unsupported_reason("parameter_server", 65) == "parameter_server supports at most 64 devices"


def test_wire_dtypes_of_the_config_have_a_width():
    assert set(get_args(get_type_hints(Reduce)["wire_dtype"])) == set(WIRE_BYTES)
    assert allreduce.wire_dtype_of(Reduce()) is None
    assert allreduce.wire_dtype_of(Reduce(wire_dtype="bfloat16")).itemsize == WIRE_BYTES["bfloat16"]


@pytest.mark.parametrize(("vertical", "horizontal"), [(1, 1), (1, 8), (2, 4), (4, 2), (3, 5)])
def test_costs_and_additions_of_a_strategy_are_those_of_its_exchanges(vertical, horizontal):
    """A ring of n sends n-1 parts of 1/n twice; a tree is as deep as the logarithm; a torus has a row's part in each column."""
    devices, rows, columns = vertical * horizontal, horizontal - 1, vertical - 1
    ring = [("devices", 2 * (devices - 1), 2 * (devices - 1) / devices)]
    along_rows = ("row", rows, rows / horizontal)
    expected = {
        "psum": [ring, [("devices", 2 * (devices - 1).bit_length(), 2.0)]],
        "ring": [ring],
        "hierarchical": [[("row", 2 * rows, 2 * rows / horizontal), ("column", 2 * columns, 2 * columns / vertical)]],
        "torus": [[along_rows, ("column", 2 * columns, 2 * columns / vertical / horizontal), along_rows]],
        "parameter_server": [[("server", 2 * (devices - 1), 2 * (devices - 1))]],
    }
    for name in expected:
        strategy = STRATEGIES[name]
        cost = [[tuple(exchange) for exchange in algorithm] for algorithm in strategy.cost(vertical, horizontal)]
        assert [[among for among, *_ in algorithm] for algorithm in cost] == [
            [one[0] for one in each] for each in expected[name]
        ]
        for algorithm, reference in zip(cost, expected[name], strict=True):
            for (_, *numbers), (_, *known) in zip(algorithm, reference, strict=True):
                assert numbers == pytest.approx(known)
        additions = rows + columns if strategy.sums_along_axes else devices - 1
        assert strategy.max_additions(vertical, horizontal) == additions


def test_properties_of_the_strategies_are_those_of_their_stages():
    assert STRATEGIES["torus"].scatters
    for name, strategy in STRATEGIES.items():
        assert not strategy.scatters or len(allreduce.stages_of(name)) > 1, name
    defaults = Strategy("mine")
    assert (defaults.check_vma, defaults.scatters, defaults.sums_along_axes) == (False,) * 3
    assert unsupported_reason("psum", 10**6) is unsupported_reason("unknown", 2) is unsupported_reason(["psum"], 2) is None
