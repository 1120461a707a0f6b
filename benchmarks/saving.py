"""Cost of checkpoints for a run of ResNet-50: how long a save blocks the loop, and how much it slows the steps.

    python benchmarks/saving.py [--pairs 12]

The step of the default recipe on four virtual devices. A window of steps with one save alternates with a window without, in one
process; each comes first in half of the pairs. The cost of a save is the difference; "slowdown" is that cost once a minute.
Writes benchmarks/results/saving.json and prints a table.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax

from jaxdp import load_config
from jaxdp.bench.environment import provenance
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint
from jaxdp.data import prefetch
from jaxdp.setup.prepare import make_compiler, prepare
from jaxdp.training import request_flags
from jaxdp.training.state import create_state

ROOT = Path(__file__).parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    arguments = parser.parse_args()
    plan, devices, datasets = prepare(load_config("digits"))
    programs, phase = make_compiler(plan, devices, datasets), plan.phases[0]
    mesh = programs.mesh(phase)
    state, step = create_state(plan.config, programs.model, mesh), programs.prepare_train(phase).result()
    batch = prefetch.to_global(
        prefetch.train_batch(datasets.train, seed=0, first_sample=0, global_batch=phase.global_batch), mesh
    )
    batch |= request_flags.none(mesh)
    rates = programs.hyperparameters(phase, plan.learning_rate(0))

    def window(checkpoints, number):
        nonlocal state
        began, steps, blocked = time.perf_counter(), 0, None
        while time.perf_counter() - began < arguments.seconds:
            if checkpoints is not None and steps == 1:
                jax.block_until_ready(state)  # otherwise the save would include the time of the step
                start = time.perf_counter()
                checkpoints.save(state, number, {})
                blocked = time.perf_counter() - start
            state, metrics = step(state, batch, rates)
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
    record = {
        "provenance": provenance(("jax", "orbax-checkpoint", "numpy")),
        "bytes": size,
        "window_seconds": arguments.seconds,
        "rows": rows,
        "medians": medians,
    }
    (ROOT / "benchmarks/results/saving.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict) -> str:
    """Markdown table: bytes, seconds that a save blocks the loop, and its cost."""
    medians, costs = record["medians"], sorted(row["save_costs_seconds"] for row in record["rows"])
    low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
    return (
        "| checkpoint | loop blocked | step | cost of a save | slowdown with one save a minute |\n|---|---|---|---|---|\n"
        f"| {record['bytes'] / 1e6:.0f} MB | {1e3 * medians['blocked_seconds']:.0f} ms "
        f"| {1e3 * medians['step_seconds_without']:.0f} ms | {medians['save_costs_seconds']:.2f} s ({low:.2f} to {high:.2f}) "
        f"| {100 * medians['slower']:.1f} % |\n\nMedians of {len(record['rows'])} pairs of windows of "
        f"{record['window_seconds']:g} s, alternating; in parentheses the middle half. ResNet-50, four virtual devices."
    )


if __name__ == "__main__":
    main()
