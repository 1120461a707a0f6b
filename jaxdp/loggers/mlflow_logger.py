"""MLflow: one run per run directory, found again by a tag with its id. The step of a metric is the number of samples.

The last metrics of a request are `training/samples` and `evaluation/samples`, which show where to continue.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.loggers.tracker import NO_POSITION, Ending, Record, Tracker, reason_of

ID_TAG = "jaxdp.id"
EXPERIMENT = "jaxdp"  # unless MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID names a different one
LONGEST_PARAM, LONGEST_TAG, MOST_METRICS, MOST_PARAMS = 6000, 5000, 1000, 100  # characters; numbers in a request
# What MLflow refuses in a name, which it may use as a path: other characters, and parts that are empty or only dots.
LONGEST_NAME, REFUSED = 250, re.compile(r"[^/\w.\- :]|^/|(?<=/)/|/\Z|(?<![^/])\.{1,2}(?![^/])")
REFUSED_FOR_GOOD = 400  # HTTP: the request itself is wrong
STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowLogger(Tracker):
    """target: the tracking URI."""

    name = "mlflow"
    settings = {  # noqa: RUF012 # requests are repeated here
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    files_refused = metrics_refused = False

    def open(self) -> int:
        import mlflow

        self.client, identity = mlflow.MlflowClient(tracking_uri=self.target), self.state["id"]
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
        order = ["attributes.start_time ASC"]
        found = self.client.search_runs([experiment], f"tags.`{ID_TAG}` = '{identity}'", max_results=1, order_by=order)
        run = found[0] if found else self.client.create_run(experiment, tags={ID_TAG: identity}, run_name=self.run_name)
        if run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, status="RUNNING")
        self.run_id, self.start_ms = run.info.run_id, run.info.start_time
        self.place = f"{self.target.rstrip('/')}/#/experiments/{experiment}/runs/{self.run_id}"
        self._describe(run.data.params)
        last = [3 * int(run.data.metrics.get(f"{group}/samples", -1)) + n for n, group in enumerate(("training", "evaluation"))]
        return max(NO_POSITION, *last)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self.client.get_experiment_by_name(name)
        return found.experiment_id if found else self.client.create_experiment(name)

    def _describe(self, saved: dict[str, str]) -> None:
        """Send the configuration. Parameters cannot be changed: a tag holds what a resumed run has changed."""
        from mlflow.entities import Param

        config = {name: _text(value, LONGEST_PARAM) for name, value in self.config.items()}
        new = [Param(name, value) for name, value in config.items() if name not in saved]
        for first in range(0, len(new), MOST_PARAMS):
            self.client.log_batch(self.run_id, params=new[first : first + MOST_PARAMS])
        self._tag({f"config.{name}": value for name, value in config.items() if saved.get(name, value) != value} | self.about)
        if commit := self.about.get("commit"):
            self._tag({"mlflow.source.git.commit": commit.removesuffix("+changes")})

    def _tag(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(name, _text(value, LONGEST_TAG)) for name, value in tags.items()])

    def send(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        for record in records:
            # The same whenever the record is sent, so that the server recognizes a repetition.
            milliseconds = self.start_ms + round(1000 * (record.values.get("wall_seconds") or 0))
            numbers, samples = record.numbers, record.values["samples"]
            own = [Metric(metric_key(name), float(value), milliseconds, samples) for name, value in numbers.items()]
            metrics += sorted(own, key=lambda metric: metric.key.endswith("/samples"))
        for first in range(0, len(metrics), MOST_METRICS):
            self._send_metrics(metrics[first : first + MOST_METRICS])
        for record in records:
            if record.picture is not None:
                name = f"held_out/held_out-{record.values['samples']}.png"
                self._store(self.client.log_image, record.picture(), artifact_file=name)

    def _send_metrics(self, metrics: list[Any]) -> None:
        """Send metrics in one request. Those that the server refuses for good do not hold up the later ones."""
        from mlflow import MlflowException

        try:
            self.client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            if error.get_http_status_code() != REFUSED_FOR_GOOD:
                raise
            if not self.metrics_refused:
                self._show(f"numbers were refused ({reason_of(error)}); the run continues without them")
            self.metrics_refused = True

    def close(self, ending: Ending) -> None:
        from mlflow.entities import Metric

        self._tag(self.about)
        if ending.outcome == "finished":
            samples, end = ending.result["samples"], self.start_ms + round(1000 * ending.result["wall_seconds"])
            numbers = {name: value for name, value in ending.result.items() if type(value) in (int, float)}
            metrics = [Metric(f"result/{name}", float(value), end, samples) for name, value in numbers.items()]
            self.client.log_batch(self.run_id, metrics=metrics[:MOST_METRICS])
            self._store(self.client.log_dict, ending.result, "result.json")
            if ending.plot is not None:
                self._store(self.client.log_artifact, str(ending.plot))
            if ending.checkpoint is not None:
                self._store(self.client.log_artifacts, str(ending.checkpoint), f"checkpoint/{ending.checkpoint.name}")
        self.client.set_terminated(self.run_id, status=STATUS.get(ending.outcome, "FAILED"))

    def _store(self, upload: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Upload a file. A server may store metrics, but no files: then the run continues without them."""
        try:
            upload(self.run_id, *arguments, **options)
        except Exception as error:
            if not self.files_refused:
                self._show(f"a file was not stored ({reason_of(error)}); the run continues without files that fail")
            self.files_refused = True


def metric_key(name: str) -> str:
    """The name that MLflow stores: `_` replaces what it refuses."""
    return REFUSED.sub(lambda match: "_" * len(match[0]), name[:LONGEST_NAME])


def _text(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
