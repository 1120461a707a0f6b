"""Write the README's tables of measurements from benchmarks/results/; with --check, fail if they are not up to date.

python benchmarks/tables.py [--check]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def digits() -> str:
    measured = json.loads((RESULTS / "digits_seeds.json").read_text())
    made = measured["provenance"]
    rows = [
        f"| {r['seed']} | {100 * r['accuracy']:.2f} % | {r['wall_seconds']:.0f} s | {r['seconds_to_first_step']:.0f} s | "
        f"{r['images_per_second']:.0f} |"
        for r in measured["runs"]
    ]
    return "\n".join(
        [
            "| seed | held-out accuracy | whole command | to first step | images/s in training |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Measured by `benchmarks/digits_seeds.py` on {made['cores']} cores of an {made['processor']}, "
            f"Python {made['python']}, JAX {made['versions']['jax']}; compilation included, without a warm cache.",
        ]
    )


def filled(text: str) -> str:
    """The README with the part between each pair of markers replaced."""
    for name, table in {"digits": digits}.items():
        begin, end = f"<!-- {name}: made by benchmarks/tables.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table() + "\n" + end + rest.split(end, 1)[1]
    return text


def main():
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = filled(old)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "README.md differs from benchmarks/results: run python benchmarks/tables.py")
    readme.write_text(new)


if __name__ == "__main__":
    main()
