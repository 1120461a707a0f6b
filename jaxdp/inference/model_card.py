"""A model card in Markdown: what is known of a checkpoint, with the metadata block of Hugging Face's model cards.

https://huggingface.co/docs/hub/model-cards describes the block.
"""

import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax

from jaxdp import metrics
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.choices import LOSSES, SOURCES, TASKS, kind_of_task
from jaxdp.config import Config, Phase
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import plural, printable
from jaxdp.files import CONFIG, expand_user, is_url, write_output
from jaxdp.inference.checkpoints import open_checkpoint
from jaxdp.inference.load_run import load_checkpoint
from jaxdp.loggers.console import format_duration
from jaxdp.metrics import METRICS
from jaxdp.models import preprocessing, weights
from jaxdp.setup.run_dir import CLASSES, RESULT, class_names, read_result, read_result_text
from jaxdp.training.result import TrainResult
from jaxdp.validation import flatten
from jaxdp.xla.jax_options import jaxdp_jax_config

# The name is above the table; paths and addresses of a machine are not for a card, but finetune.digest is.
OMITTED = ("name", "data.directory", "finetune.weights", "storage.directory", "logging.mlflow")
# What has a meaning within a line of CommonMark or GitHub's Markdown; a backslash takes it away.
SPECIAL = re.compile(r"([\\`*_{\[\]<>&|~$#]|:(?=/)|(?<=www)\.)")
LONGEST = 1000  # characters of a text


class _Facts(NamedTuple):
    """What a card is made of. result: of the run, None before its end; exported: name of a written file of weights."""

    manifest: Manifest
    config: Config
    classes: list[str]
    result: TrainResult | None
    digest: str
    exported: str | None
    is_best: bool

    @property
    def outputs(self) -> str:
        """Their number, such as "10 classes"."""
        noun = {"classes": "class", "labels": "label", "": "value"}[kind_of_task(self.config.task)]
        return plural(len(self.classes), noun)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the checkpoint's evaluation but the loss, by name."""
        found = self.manifest.evaluation
        return {name: found[name] for name in metrics.names() if name != metrics.LOSS and found.get(name) is not None}


def write_card(
    workdir: str | Path,
    card: str | Path,
    checkpoint: str = "result",
    *,
    exported: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Markdown file about a checkpoint of the run in `workdir`; returns its path. It depends on the run only.

    checkpoint: result (the newest, or with early stopping the best), newest, best, or its number of samples. exported: what
    `jaxdp.inference.export.export` returned for it, whose file the card then describes; None: the card has a digest of the
    checkpoint's weights. Raises ConfigError if the run or the checkpoint cannot be used, or the file exists.
    """
    path, workdir = check_card_path(card, overwrite), expand_user(workdir, "--workdir")
    if exported:
        chosen = exported["checkpoint"].rpartition("/")[2].partition(".")[0]
    with open_checkpoint(workdir, chosen if exported else checkpoint) as manifest:
        folder = manifest.path.parents[1]
        if is_url(workdir):
            from jaxdp.cloud.remote_run import download_run_files

            download_run_files(workdir, folder, names=(CONFIG, CLASSES, RESULT), field="--workdir")
        config, best = manifest.config, manifest.metadata["progress"].get("best")
        facts = _Facts(
            manifest,
            config,
            class_names(folder, config.model.class_count),
            read_result(folder, read_result_text(folder)) if (folder / RESULT).exists() else None,
            digest=hashlib.sha256(Path(exported["output"]).read_bytes()).hexdigest() if exported else _weights_digest(manifest),
            exported=Path(exported["output"]).name if exported else None,
            is_best=checkpoint == "best" or (best is not None and best["samples"] == manifest.samples),
        )
    write_output(path, "\n\n".join([_metadata(facts), *_sections(facts)]).encode() + b"\n")
    return path


def check_card_path(card: str | Path, overwrite: bool) -> Path:
    """The path of a card to write. Raises ConfigError if it does not end in .md or cannot be written."""
    return weights.check_output_path(card, overwrite, suffix=".md", field="--card")


def _escape(text: object) -> str:
    """Text that a Markdown document shows verbatim, in one line, also in a table."""
    return SPECIAL.sub(r"\\\1", printable(text, LONGEST))


def _yaml_string(text: object) -> str:
    """Text as a double-quoted scalar of YAML, in one line: a JSON string of printable characters is one."""
    return json.dumps(printable(text, LONGEST), ensure_ascii=False)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@jaxdp_jax_config()
def _weights_digest(manifest: Manifest) -> str:
    """The digest of the weights that evaluation uses, as commands that read their file print it."""
    state = load_checkpoint(manifest, manifest.config).state
    return weights.digest_of(weights.named_tensors(*jax.device_get(state.eval_variables)))


def _metadata(facts: _Facts) -> str:
    """The block of metadata in YAML, with an index of the results."""
    config = facts.config
    tags = ["image-classification", "jax", "flax", config.model.name]
    lines = ["---", "library_name: jaxdp", "pipeline_tag: image-classification", "tags:"]
    lines += [f"- {_yaml_string(tag)}" for tag in tags]
    if facts.metrics:
        hub = {"eval_accuracy": "accuracy", "eval_top5": "top_5_accuracy"}  # names of Hugging Face
        found = {hub.get(name, metrics.bare(name)): value for name, value in facts.metrics.items()}
        split = [f"      split: {_yaml_string(config.data.eval_split)}"] * (config.data.eval_split is not None)
        lines += [
            "metrics:",
            f"- {next(iter(found))}",
            "model-index:",
            f"- name: {_yaml_string(config.name)}",
            "  results:",
            "  - task:",
        ]
        lines += ["      type: image-classification", "      name: Image Classification", "    dataset:"]
        lines += [f"      {key}: {_yaml_string(config.data.source)}" for key in ("type", "name")]
        lines += [*split, "    metrics:"]
        for kind, value in found.items():
            lines += [f"    - type: {kind}", f"      name: {kind.replace('_', ' ')}", f"      value: {value!r}"]
    return "\n".join([*lines, "---"])


def _sections(facts: _Facts) -> Iterable[str]:
    manifest, config, model = facts.manifest, facts.config, facts.config.model
    count = sum(math.prod(shape) for name, (_, shape, _) in manifest.arrays.items() if name.startswith(".params"))
    yield f"# {_escape(config.name)}"
    purposes = {
        "classes": "classifies images into",
        "labels": "finds which labels an image has, of",
        "": "predicts for an image",
    }
    purpose = purposes[kind_of_task(config.task)]
    yield (
        f"{_escape(model.title)} with {count:,} parameters, which {purpose} {facts.outputs}. "
        "It was trained with jaxdp, synchronous data-parallel training in JAX and Flax; these are the weights after epoch "
        f"{manifest.epoch:.2f} (checkpoint {manifest.samples})."
    )
    yield "## Metrics"
    yield from _metrics(facts)
    yield "## Use and limits"
    yield _use(facts)
    yield "## Data"
    yield _table(["fact", "value"], _data_rows(facts))
    yield "A fingerprint is a digest of labels, file names and a few images."
    yield "## Training"
    yield from _recipe(config)
    yield "## Devices and time"
    yield _table(["fact", "value"], _compute_rows(facts))
    yield "## Versions"
    yield _table(["package", "version"], manifest.metadata.get("versions", {}).items())
    yield "## Digest"
    yield from _digest(facts)
    if kind_of_task(config.task):
        yield "## Classes"
        yield _table(["number", "name"], enumerate(facts.classes))


def _metrics(facts: _Facts) -> Iterable[str]:
    evaluation = facts.manifest.evaluation
    if not evaluation:
        yield "These weights have not been evaluated: the checkpoint was not saved right after an evaluation."
        return
    from scipy.stats import binomtest  # takes half a second

    images, rows = evaluation[metrics.COUNT], []
    for name, value in facts.metrics.items():
        entry, interval, correct = METRICS[name], "", ""
        if entry.is_share:
            count = round(images * value)
            low, high = binomtest(count, images).proportion_ci(0.95, method="wilson")
            interval, correct = f"{entry.shown(low)} to {entry.shown(high)}", f"{count:,}"
        rows.append([metrics.title_of(name), entry.shown(value), interval, correct])
    columns = 4 if any(row[2] for row in rows) else 2
    header = ["", "value", "95 % confidence interval", f"of {images:,} held-out images"]
    yield _table(header[:columns], [row[:columns] for row in rows])
    loss, name = METRICS[metrics.LOSS].shown(evaluation[metrics.LOSS]), facts.config.optimizer.loss
    title = (LOSSES[name].title or "cross entropy") if name in LOSSES.builtin else _escape(name)
    if facts.config.task not in TASKS.builtin:
        title = f"of the task {_escape(facts.config.task)}"
    yield f"Held-out loss (mean {title}): {loss}. All are of {images:,} held-out images."
    if columns > 2:
        yield "The intervals are Wilson's score intervals. They account for the number of held-out images, not for other data."
    if facts.is_best:
        yield (
            f"This checkpoint was chosen among the checkpoints of its run by {_escape(facts.config.deciding_metric)} on the "
            "same held-out images, so its metrics on new images may be worse."
        )


def _use(facts: _Facts) -> str:
    stated = preprocessing.of_run(facts.config, *pixel_stats(facts.config))
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (stated.mean, stated.std))
    size, source = stated.eval_size, facts.config.data.source
    remark = f" {SOURCES[source].remark}".rstrip()
    prepared = (
        f"resized to a short side of {stated.eval_resize} pixels ({stated.eval_interpolation}), cropped in the center to "
        f"{size}x{size}"
    )
    if stated.eval_interpolation == "area":
        share = f"{stated.eval_resize:.4g} of the short side"
        prepared = f"cropped in the center to a square of {share}, resized to {size}x{size} ({stated.eval_interpolation})"
    said = {
        "classes": "a score (logit) for each of {}. Every image is assigned to one of them, also an image of something else.",
        "labels": "a score (logit) for each of {}. Its sigmoid is the label's probability.",
        "": "{} of the registered task " + _escape(facts.config.task) + ".",
    }
    output = said[kind_of_task(facts.config.task)].format(facts.outputs)
    return (
        f"- Input: RGB images, {prepared}, scaled to 0 to 1, and normalized with mean {mean} and standard deviation {std} of "
        f"red, green and blue.\n- Output: {output}\n"
        f"- The metrics were measured on the held-out images of {_escape(source)} only.{remark} Other data, calibration, "
        "robustness and bias were not measured."
    )


def _data_rows(facts: _Facts) -> list[tuple[str, str]]:
    data = facts.config.data
    bad = facts.manifest.metadata["progress"].get("bad_images") or {}
    rows = [("source", data.source), ("training split", data.train_split)]
    rows += [("directory", PurePath(data.directory).name or data.directory)] if data.directory else []
    rows += [("held-out split", data.eval_split)] if data.eval_split is not None else []
    rows += [(f"{name}, fingerprint", text) for name, text in (facts.manifest.metadata.get("data") or {}).items()]
    rows += [("left out", f"{plural(len(bad), 'image')} that could not be read")] * bool(bad)
    return [*rows, ("classes", f"{len(facts.classes):,}"), ("image size in training", f"{data.image_size} pixels")]


def _recipe(config: Config) -> Iterable[str]:
    yield f"Recipe {_escape(config.name)}. Fields of the config that differ from the defaults of jaxdp:"
    values, defaults = flatten(dataclasses.asdict(config)), flatten(dataclasses.asdict(Config()))
    defaults |= {
        f"batch.{index}.{name}": value
        for index in range(len(config.batch))
        for name, value in dataclasses.asdict(Phase()).items()
    }
    changed = [(name, value) for name, value in values.items() if value != defaults.get(name) and name not in OMITTED]
    yield _table(["field", "value"], changed)


def _compute_rows(facts: _Facts) -> list[tuple[str, str]]:
    result, progress = facts.result, facts.manifest.metadata["progress"]
    if result is None:
        return [("the run", f"not finished; {plural(progress['steps'], 'step', ',')} up to this checkpoint")]
    mesh = f"mesh {result.mesh[0]}x{result.mesh[1]}"
    places = f"{plural(result.processes, 'process')} on {plural(result.hosts, 'host')}"
    length = f"{result.epochs:.2f} epochs, {plural(result.steps, 'step', ',')}"
    return [
        ("devices", f"{result.devices} x {result.device_kind}, {mesh}, {places}"),
        ("all-reduce", result.strategy),
        ("length of the run", f"{length}; stopped early: {result.stop_reason}" if result.stopped_early else length),
        ("time of the run", f"{format_duration(result.wall_seconds)} in {plural(result.sessions, 'session')}"),
        ("time of the steps", format_duration(result.training_seconds)),
        ("throughput of the steps", f"{result.images_per_second:,.0f} images/s"),
    ]


def _digest(facts: _Facts) -> Iterable[str]:
    digest = f"```text\n{facts.digest}\n```"
    if facts.exported is None:
        yield (
            "Digest of the weights that evaluation uses, of names, shapes and values. `jaxdp evaluate --weights` prints that "
            "of a file of ResNet weights, in any format:"
        )
        yield digest
        return
    yield f"SHA-256 of the file {_escape(facts.exported)}:"
    yield digest
    yield f"```bash\nsha256sum {shlex.quote(facts.exported) if facts.exported.isprintable() else 'FILE'}\n```"
