"""Runs whose configs differ in the seed alone: mean, standard deviation and number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp import metrics
from jaxdp.config import Config
from jaxdp.errors import plural
from jaxdp.metrics import METRICS, bare, title_of
from jaxdp.report.run_history import History, is_number
from jaxdp.report.summary import POSITION
from jaxdp.validation import RESUME_SAFE_FIELDS, changes


@dataclass(frozen=True)
class Seeds:
    """Two or more runs of one config with different seeds."""

    runs: list[History]

    @property
    def label(self) -> str:
        return f"{self.runs[0].label} and {plural(len(self.runs) - 1, 'more seed')}"

    @property
    def finished(self) -> list[History]:
        return [run for run in self.runs if run.status == "finished"]

    def curves(self) -> tuple[list[dict], list[dict]]:
        """(means, standard deviations with n - 1): a record for each position that all runs have logged, with their numbers.

        Of the finished runs, or of all while fewer than two have finished. A mean of values that are not all finite is None.
        """
        runs = self.finished if len(self.finished) > 1 else self.runs
        logs = [{(record["samples"], metrics.is_evaluation(record)): record for record in run.records} for run in runs]
        means, deviations = list[dict](), list[dict]()
        for key in logs[0]:
            records = [log[key] for log in logs if key in log]
            if len(records) == len(logs):
                fields = [name for name in records[0] if all(is_number(record.get(name, "")) for record in records)]
                values = np.array([[record[name] for name in fields] for record in records], np.float64)
                position = {name: records[0][name] for name in POSITION if name in records[0]} | {"seeds": len(records)}
                with np.errstate(invalid="ignore", over="ignore"):
                    for rows, found in ((means, values.mean(0)), (deviations, values.std(0, ddof=1))):
                        rows.append(dict(zip(fields, map(_finite, found), strict=True)) | position)
        return means, deviations

    def summary(self) -> dict[str, Any]:
        """{"workdirs", "seeds", "number", "mean", "standard_deviation"} of the results of the finished runs.

        number: of the finished runs. mean, standard_deviation (with n - 1): metric -> value, of the metrics that all of them
        have; {} with fewer than two.
        """
        runs = self.finished
        found = {bare(name): np.array([run.evaluation.get(name) for run in runs], np.float64) for name in metrics.names()}
        given = {name: values for name, values in found.items() if len(values) > 1 and np.isfinite(values).all()}
        return {
            "workdirs": [run.workdir for run in self.runs],
            "seeds": [run.config.seed for run in self.runs],
            "number": len(runs),
            "mean": {name: float(values.mean()) for name, values in given.items()},
            "standard_deviation": {name: float(values.std(ddof=1)) for name, values in given.items()},
        }

    def shown(self) -> dict[str, str]:
        """Title of a metric -> mean and standard deviation, for people."""
        _, _, _, *found = self.summary().values()
        names = [name for name in metrics.names() if bare(name) in found[0]]
        return {title_of(name): " ± ".join(METRICS[name].shown(part[bare(name)]) for part in found) for name in names}

    def __str__(self) -> str:
        values = ", ".join(f"{title} {value}" for title, value in self.shown().items()) or "no mean yet"
        return f"{self.label}: {values} (mean and standard deviation of {plural(len(self.finished), 'finished run')})"


def groups(runs: Sequence[History]) -> list[Seeds]:
    """The groups of two or more seeds among runs, whatever their names and machines; of runs with the same seed, the first."""
    found: list[tuple[Config, dict[int, History]]] = []
    for run in runs:
        ignored = (*RESUME_SAFE_FIELDS, "seed")
        seeds = next((seeds for other, seeds in found if not changes(other, run.config, ignored)), None)
        if seeds is None:
            found.append((run.config, seeds := {}))
        seeds.setdefault(run.config.seed, run)
    return [Seeds([*seeds.values()]) for _, seeds in found if len(seeds) > 1]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
