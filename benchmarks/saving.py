"""Cost of checkpoints for a run of ResNet-50: how long a save blocks the loop, and how much it slows the steps.

    python benchmarks/saving.py [--pairs 12] [--seconds 20]

The step of the default recipe on four virtual devices. A window of steps with one save alternates with a window without, in one
process; each comes first in half of the pairs. The cost of a save is the difference; "slowdown" is that cost once a minute.
Writes benchmarks/results/saving.json and prints a table.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax
from common import default_step, made_on, markdown, options, read, write

from jaxdp.bench.environment import provenance
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint


def main():
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    arguments = parser.parse_args()
    state, step, _ = default_step([])

    def window(checkpoints, number):
        nonlocal state
        began, steps, blocked = time.perf_counter(), 0, None
        while time.perf_counter() - began < arguments.seconds:
            if checkpoints is not None and steps == 1:
                jax.block_until_ready(state)  # otherwise the save would include the time of the step
                start = time.perf_counter()
                checkpoints.save(state, number, {})
                blocked = time.perf_counter() - start
            state, metrics = step(state, 0)
            jax.block_until_ready(metrics)
            steps += 1
        seconds = time.perf_counter() - began
        if checkpoints is not None:
            checkpoints.wait()
            checkpoints.check()
        return seconds / steps, blocked

    with tempfile.TemporaryDirectory() as made:
        checkpoints = CheckpointManager(Path(made), Checkpoint(), print)
        checkpoints.save(state, 1, {})
        checkpoints.wait()
        rows = []
        for number in range(arguments.pairs):
            saved = (checkpoints, 2 + number)
            first, second = (window(None, 0), window(*saved)) if number % 2 else (window(*saved), window(None, 0))
            (without, _), (beside, blocked) = (first, second) if number % 2 else (second, first)
            cost = (beside / without - 1) * arguments.seconds
            row = {"step_seconds_without": without, "step_seconds_with_a_save": beside, "blocked_seconds": blocked}
            rows.append(row | {"save_costs_seconds": cost, "slower": cost / 60})
            print(rows[-1], flush=True)
        newest = max((path for path in Path(made).iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())  # the first velocity is all zeros
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    record = {"provenance": provenance(("jax", "orbax-checkpoint", "numpy")), "bytes": size}
    write("saving", record | {"window_seconds": arguments.seconds, "rows": rows, "medians": medians})
    print(table(read("saving")))


def table(record: dict) -> str:
    """Bytes, seconds that a save blocks the loop, and its cost."""
    medians, costs = record["medians"], sorted(row["save_costs_seconds"] for row in record["rows"])
    low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
    blocked, step = (f"{1e3 * medians[name]:.0f} ms" for name in ("blocked_seconds", "step_seconds_without"))
    cost, slower = f"{medians['save_costs_seconds']:.2f} s ({low:.2f} to {high:.2f})", f"{100 * medians['slower']:.1f} %"
    return markdown(
        ("checkpoint", "loop blocked", "step", "cost of a save", "slowdown with one save a minute"),
        [(f"{record['bytes'] / 1e6:.0f} MB", blocked, step, cost, slower)],
        f"Medians of {len(record['rows'])} pairs of windows of {record['window_seconds']:g} s, alternating; in parentheses the "
        "middle half. ResNet-50, four virtual devices.",
        f"By `benchmarks/saving.py` on {made_on(record)}.",
    )


if __name__ == "__main__":
    main()
