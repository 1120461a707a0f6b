"""What a run has reached, and for ImageNet its epochs to 75.9 % beside MLPerf's reference."""

import json
from pathlib import Path

from jaxdp.config import Config, ConfigError
from jaxdp.validation import from_json

TARGET = 0.759
# MLPerf training v4.0, ResNet-50 with LARS: global batch -> mean epochs to 75.9 % in the reference convergence points
REFERENCE_EPOCHS = {
    1632: 35.0,
    3264: 35.15,
    4096: 39.88,
    8192: 41.88,
    13056: 45.5,
    32768: 56.0,
    49152: 68.0,
    58880: 80.0,
    65536: 84.5,
}


def read_config(workdir: Path) -> Config:
    """The config.json of a run; a ConfigError names the file."""
    path = workdir / "config.json"
    try:
        return from_json(path.read_text())
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; restore the file") from None


def read_records(workdir: Path) -> list[dict]:
    """The lines of metrics.jsonl; a last line that is cut off, as after a kill, is left out."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("epoch"), (int, float)):
            records.append(record)
        elif number + 1 < len(lines):
            raise ConfigError(f"{path}: line {number + 1} is damaged; restore or delete it")
    return records


def read_run(workdir) -> tuple[Config, list[dict]]:
    """(config, lines of the log) of a run. Raises ConfigError for a directory without one."""
    workdir = Path(workdir)
    if not (workdir / "config.json").is_file() or not (workdir / "metrics.jsonl").is_file():
        raise ConfigError(f"{str(workdir)!r} holds no run: there is no config.json with metrics.jsonl; give a run's directory")
    return read_config(workdir), read_records(workdir)


def report(workdir) -> dict:
    """What the run in a directory has reached, see `reached_by`. Raises ConfigError for a directory without a run."""
    return reached_by(*read_run(workdir))


def reached_by(config: Config, records: list[dict]) -> dict:
    """What a run has reached: {"name", "source", "epochs", "accuracy", "best_accuracy", "best_epoch", "epochs_to_target",
    "reference_epochs", "ratio"}.

    The last three are None where they do not apply: another data set than ImageNet, a target not reached, a batch size that
    the reference does not have, or several batch sizes; those of accuracy before the first evaluation.
    """
    evaluations = [record for record in records if record.get("eval_accuracy") is not None]
    last = evaluations[-1] if evaluations else {"epoch": records[-1]["epoch"] if records else 0.0, "eval_accuracy": None}
    best = max(evaluations, key=lambda record: record["eval_accuracy"], default={"eval_accuracy": None, "epoch": None})
    reached = reference = ratio = None
    if config.data.source == "imagenet2012":
        reached = next((r["epoch"] for r in evaluations if r["eval_accuracy"] >= TARGET), None)
        batches = {phase.global_batch for phase in config.batch}
        reference = REFERENCE_EPOCHS.get(batches.pop()) if len(batches) == 1 else None
        ratio = reached / reference if reached and reference else None
    return {
        "name": config.name,
        "source": config.data.source,
        "epochs": last["epoch"],
        "accuracy": last["eval_accuracy"],
        "best_accuracy": best["eval_accuracy"],
        "best_epoch": best["epoch"],
        "epochs_to_target": reached,
        "reference_epochs": reference,
        "ratio": ratio,
    }


def as_text(told: dict) -> str:
    """The report for people."""
    if told["accuracy"] is None:
        return f"{told['name']}: no evaluation yet after {told['epochs']:.2f} epochs"
    lines = [
        f"{told['name']}: accuracy {100 * told['accuracy']:.2f} % after {told['epochs']:.2f} epochs, "
        f"best {100 * told['best_accuracy']:.2f} % at {told['best_epoch']:.2f}"
    ]
    if told["source"] == "imagenet2012":
        to_target, reference = told["epochs_to_target"], told["reference_epochs"]
        reached = "not reached" if to_target is None else f"after {to_target:.2f} epochs"
        mean = "no reference for this batch" if reference is None else f"MLPerf's reference {reference:g} in the mean"
        ratio = "" if told["ratio"] is None else f", ratio {told['ratio']:.3f}"
        lines.append(f"{100 * TARGET:.1f} % {reached}; {mean}{ratio}")
    return "\n".join(lines)
