"""What trackers hold of a run: W&B's transaction logs, read by `wandb leet inspect`, and MLflow's REST interface."""

import json
import math
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from jaxdp.run_records import TIMING, read_log

START_SECONDS = 240  # for the tables of a new database, on a slow machine


def log_points(workdir) -> list[tuple]:
    """(samples, name, value) of every number of the log, timing included, as trackers name them; NaN is None."""
    points = []
    for record in read_log(workdir / "metrics.jsonl"):
        group = "evaluation" if "eval_accuracy" in record else "training"
        points += [(record["samples"], f"{group}/{name.removeprefix('eval_')}", value) for name, value in record.items()]
    return sorted(points, key=str)


def wandb_records(workdir) -> list[dict]:
    """The records of all transaction logs of the run, in order."""
    identity = json.loads((workdir / "trackers/wandb.json").read_text())["id"]
    records = []
    for path in sorted((workdir / "wandb").glob(f"offline-run-*-{identity}/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        records += map(json.loads, printed.stdout.splitlines())
    return records


def wandb_rows(workdir) -> list[dict]:
    """The history rows of the run: numbers of records, without the row of the result."""
    rows = [record["history"]["item"] for record in wandb_records(workdir) if record["type"] == "history"]
    return [row for row in rows if "step" in row]


def wandb_points(workdir) -> list[tuple]:
    """As `log_points`."""
    points = []
    for row in wandb_rows(workdir):
        group = "evaluation" if "evaluation/accuracy" in row else "training"
        for name, value in row.items():
            axis = name if "/" in name else f"{group}/{name}"
            if not name.startswith("_") and not name.startswith("examples/"):
                points.append((row["samples"], axis, None if value == "NaN" else value))
    return sorted(points, key=str)


class MlflowServer:
    """A server of MLflow with a database in a folder, and a client of its REST interface that does not use the package."""

    def __init__(self, folder, port):
        self.folder, self.port, self.uri = folder, port, f"http://127.0.0.1:{port}"
        self.process = None

    def start(self):
        """Start the server and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/db", "--artifacts-destination", f"{self.folder}/files"]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.2)

    def _is_healthy(self):
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        except OSError:
            return False

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def get(self, path, /, **query):
        with urllib.request.urlopen(f"{self.uri}/api/2.0/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path, /, **body):
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.uri}/api/2.0/{path}", data, kind), timeout=30) as answer:
            return json.load(answer)

    def runs(self, workdir) -> list[dict]:
        """All runs that have the id of the directory's run."""
        identity = json.loads((workdir / "trackers/mlflow.json").read_text())["id"]
        query = f"tags.`jaxdp.id` = '{identity}'"
        experiments = self.post("mlflow/experiments/search", max_results=100)["experiments"]
        ids = [experiment["experiment_id"] for experiment in experiments]
        return self.post("mlflow/runs/search", experiment_ids=ids, filter=query).get("runs", [])

    def points(self, workdir) -> list[tuple]:
        """As `log_points`, of the only run."""
        (run,) = self.runs(workdir)
        points = []
        for name in {metric["key"] for metric in run["data"]["metrics"]}:
            token = ""
            while token is not None and not name.startswith("result/"):
                query = {"run_id": run["info"]["run_id"], "metric_key": name, "max_results": 1000}
                answer = self.get("mlflow/metrics/get-history", **query, **({"page_token": token} if token else {}))
                for metric in answer.get("metrics", []):
                    value = float(metric["value"])
                    points.append((int(metric["step"]), name, None if math.isnan(value) else value))
                token = answer.get("next_page_token")
        return sorted(points, key=str)


def untimed(points) -> list[tuple]:
    """Points as floats; those that measure time without their values, which differ when a step is trained again."""

    def plain(name, value):
        return None if value is None or name.partition("/")[2] in TIMING else float(value)

    return sorted(((samples, name, plain(name, value)) for samples, name, value in points), key=str)
