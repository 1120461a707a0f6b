"""MLflow: one run per run directory, found again by a tag with its id. The step of a metric is the number of samples.

A record is sent in one request, which the server stores whole or not at all; a record that is too large takes several. The last
request has the metrics `training/samples` and `evaluation/samples`, which show where to continue.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdp.errors import first_line, printable
from jaxdp.files import CONFIG, RESULT
from jaxdp.trackers.run_files import (
    NO_POINT,
    Rejected,
    RunFacts,
    TrackerState,
    Unavailable,
    is_evaluation,
    picture_path,
    values,
)

ID_TAG = "jaxdp.id"
EXPERIMENT = "jaxdp"  # unless MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names a different one
LONGEST_PARAM, LONGEST_TAG, MOST_METRICS, MOST_PARAMS = 6000, 5000, 1000, 100  # characters; numbers in a request
# What MLflow refuses in a name, which it may use as a path: other characters, and parts that are empty or only dots.
LONGEST_NAME, REFUSED = 250, re.compile(r"[^/\w.\- :]|^/|(?<=/)/|/\Z|(?<![^/])\.{1,2}(?![^/])")
TEMPORARY = (408, 429)  # HTTP status codes of requests to repeat
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}
SETTINGS = {  # environment of the client, unless the user sets it: this process repeats requests itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
REASONS = (
    "not in a valid JSON format|Connection refused|Connection reset|Name or service not known|name resolution|timed out|"
    "certificate verify failed"
)


class MlflowClient:
    """A `jaxdp.trackers.sender.TrackerClient`. state: its target is the tracking URI."""

    def __init__(self, workdir: Path, state: TrackerState, warn: Callable[[str], None]) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self.workdir, self.state, self.uri, self.warn = workdir, state, state.target, warn
        self.place = ""
        self._run_id, self._start_ms = "", 0
        self._params: dict[str, str] = {}
        self._files_refused = False

    def connect(self, name: str) -> int:
        with self._requests():
            import mlflow

            self.client = mlflow.MlflowClient(tracking_uri=self.uri)
            identity, experiment = self.state.identify(), self._experiment()
            found = self.client.search_runs(
                [experiment], f"tags.`{ID_TAG}` = '{identity}'", max_results=1, order_by=["attributes.start_time ASC"]
            )
            run = found[0] if found else self.client.create_run(experiment, tags={ID_TAG: identity}, run_name=name)
            if run.info.status != "RUNNING":
                self.client.update_run(run.info.run_id, status="RUNNING")
        self._run_id, self._start_ms, self._params = run.info.run_id, run.info.start_time, run.data.params
        self.place = f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run_id}"
        metrics, last = run.data.metrics, NO_POINT
        if "training/samples" in metrics:
            last = 3 * int(metrics["training/samples"])
        if "evaluation/samples" in metrics:
            last = max(last, 3 * int(metrics["evaluation/samples"]) + 1)
        return last

    def _experiment(self) -> str:
        if identity := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return self.client.get_experiment(identity).experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            import mlflow

            try:
                return self.client.create_experiment(name)
            except mlflow.exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self.client.get_experiment_by_name(name)  # another run has just created it
        if experiment is None or experiment.lifecycle_stage != "active":
            raise Rejected(f"the experiment {name} is deleted", "restore it, or set MLFLOW_EXPERIMENT_NAME")
        return experiment.experiment_id

    def describe(self, facts: RunFacts) -> None:
        from mlflow.entities import Param, RunTag

        config = {name: _text(value, LONGEST_PARAM) for name, value in facts.config.items()}
        new = [Param(name, value) for name, value in config.items() if name not in self._params]
        # Parameters cannot be changed: a tag holds what a resumed run has changed.
        tags = {f"config.{name}": value for name, value in config.items() if self._params.get(name, value) != value}
        tags |= facts.about
        if commit := facts.about.get("commit"):
            tags["mlflow.source.git.commit"] = commit.removesuffix("+changes")
        with self._requests():
            for first in range(0, len(new), MOST_PARAMS):
                self.client.log_batch(self._run_id, params=new[first : first + MOST_PARAMS])
            self.client.log_batch(self._run_id, tags=[RunTag(name, _text(value, LONGEST_TAG)) for name, value in tags.items()])
        self._params = config | self._params
        self._upload(self.workdir / CONFIG)

    def send(self, records: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        for record in filter(is_evaluation, records):  # before the records, because a sent record is not read again
            picture = picture_path(self.workdir, record["samples"])
            if picture.exists():
                self._upload(picture, "held_out")
        batch: list[Metric] = []
        with self._requests():
            for record in records:
                # The same whenever the record is sent, so that the server recognizes a repetition.
                milliseconds = self._start_ms + round(1000 * (record.get("wall_seconds") or 0))
                numbers = values(record)
                keys = metric_keys(numbers)
                metrics = [Metric(keys[name], float(v), milliseconds, record["samples"]) for name, v in numbers.items()]
                metrics.sort(key=lambda metric: metric.key.endswith("/samples"))
                if len(batch) + len(metrics) > MOST_METRICS:
                    self.client.log_batch(self._run_id, metrics=batch)
                    batch = []
                batch += metrics
                while len(batch) > MOST_METRICS:
                    self.client.log_batch(self._run_id, metrics=batch[:MOST_METRICS])
                    batch = batch[MOST_METRICS:]
            self.client.log_batch(self._run_id, metrics=batch)

    def finish(self, outcome: str, facts: RunFacts) -> None:
        from mlflow.entities import Metric

        self.describe(facts)
        if outcome == "finished":
            samples, end = facts.result["samples"], self._start_ms + round(1000 * facts.result["wall_seconds"])
            numbers = {name: v for name, v in facts.result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
            metrics = [Metric(f"result/{name}", float(value), end, samples) for name, value in numbers.items()]
            with self._requests():
                self.client.log_batch(self._run_id, metrics=metrics[:MOST_METRICS])
            for path in (facts.plot, self.workdir / RESULT):
                if path is not None:
                    self._upload(path)
            if facts.best is not None:
                self._upload(facts.best, f"checkpoint/{facts.best.name}")
        with self._requests():
            self.client.set_terminated(self._run_id, status=STATUS.get(outcome, "FAILED"))

    def _upload(self, path: Path, folder: str | None = None) -> None:
        """Upload a file or a directory. A server may store metrics, but no files: then the run continues without them."""
        if not self._files_refused:
            try:
                if path.is_dir():
                    self.client.log_artifacts(self._run_id, str(path), folder)
                else:
                    self.client.log_artifact(self._run_id, str(path), folder)
            except Exception as error:
                if _is_outage(error):
                    raise Unavailable(_reason(error)) from error
                self._files_refused = True
                self.warn(f"its server does not store files ({_reason(error)}); the run's files are not sent")

    @contextmanager
    def _requests(self) -> Iterator[None]:
        """Turn errors of requests into `Unavailable` or `Rejected`."""
        try:
            yield
        except (Rejected, Unavailable):
            raise
        except ImportError as error:
            raise Rejected(f"this URI needs the package {error.name}", "pip install mlflow, or use a server") from None
        except Exception as error:
            if _is_outage(error):
                raise Unavailable(_reason(error)) from error
            raise Rejected(_reason(error), "check the URI, and MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN") from error


def metric_keys(names: Iterable[str]) -> dict[str, str]:
    """Name -> the name that MLflow stores: `_` replaces what MLflow refuses, and a number distinguishes equal names."""
    keys: dict[str, str] = {}
    allowed = {name: REFUSED.sub(lambda match: "_" * len(match[0]), name[:LONGEST_NAME]) for name in names}
    for name, key in sorted(allowed.items(), key=lambda pair: (pair[0] != pair[1], pair)):  # first the unchanged names
        candidates = (f"{key[: LONGEST_NAME - 10]}_{number}" for number in itertools.count(2))
        taken = {*keys.values()}
        keys[name] = key if key not in taken else next(each for each in candidates if each not in taken)
    return keys


def _is_outage(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if (status := getattr(error, "get_http_status_code", None)) and "not in a valid JSON format" not in str(error):
        return status() >= 500 or status() in TEMPORARY
    return isinstance(error, OSError)


def _reason(error: Exception) -> str:
    """One line; for a failed connection only the cause, without the addresses and retries of the HTTP library."""
    text = first_line(error)
    cause = re.search(REASONS, text)
    if cause and cause[0].startswith("not in"):
        return "it is not an MLflow server"
    return cause[0].lower() if cause else printable(text)


def _text(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
