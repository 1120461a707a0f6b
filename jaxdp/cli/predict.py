"""`jaxdp predict`: predict the classes of images."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from jaxdp.cli.options import CheckpointName, Switch, weights_flag
from jaxdp.config import GivenNetwork, Preprocessing
from jaxdp.errors import EXIT_FAILURE, ConfigError, plural, print_safe, printable
from jaxdp.flags import Arg, parse
from jaxdp.recipes import register_from

LONGEST_PATH = 4096  # Linux's PATH_MAX


@dataclasses.dataclass(frozen=True)
class Predict:
    """Print the most likely classes of images, preprocessed like the run's held-out images, on the devices of this machine.

    Examples:
      jaxdp predict --workdir runs/flowers picture.jpg
      jaxdp predict --workdir runs/flowers --checkpoint best --top 3 --csv predictions.csv holiday/
      jaxdp predict --weights resnet50.safetensors --data.eval-resize 232 picture.jpg
    """

    images: Annotated[tuple[str, ...], Arg("IMAGE ...", positional=True)]
    """Image files, or directories that are searched recursively"""
    workdir: str
    """Working directory of the run"""
    weights: str | None = None
    """Safetensors file of jaxdp, torchvision or timm to use in place of a run"""
    data: Preprocessing = dataclasses.field(default_factory=Preprocessing)
    model: GivenNetwork = dataclasses.field(default_factory=GivenNetwork)
    checkpoint: CheckpointName = "result"
    top: int | None = None
    """Number of classes per image (None: 5, or all if there are fewer)"""
    threshold: float | None = None
    """Probability from which one of several labels of an image is present (None: 0.5)"""
    flip: Switch = False
    """Predict from the mean of the logits of each image and its mirror image"""
    csv: str | None = None
    """CSV file to write (-: stdout), with one row per image and class, and a column `present` for several labels"""
    overwrite: Switch = False
    """Overwrite an existing CSV file"""
    config: str | None = None
    """Recipe file (.py) that registers the model of the run, if it is not jaxdp's"""
    json: Switch = False
    """Output as one JSON document on stdout"""


def run(arguments: list[str], program: str) -> None:
    weights = weights_flag(arguments)
    options = parse(Predict, arguments, program, default=None if weights is None else Predict((), ""))
    given = {f"{part}.{name}": value for part in ("data", "model") for name, value in vars(getattr(options, part)).items()}
    for name, value in given.items():
        if weights is None and value not in (None, (), "none"):
            raise ConfigError(f"--{name.replace('_', '-')}", value, reason="not used without --weights", hint="omit it")
    register_from(options.config)
    from jaxdp.data.image_folder import find_images
    from jaxdp.files import check_output, write_output
    from jaxdp.inference.predict import Images, Wanted, predict_source, predict_weights
    from jaxdp.setup.run_dir import run_config

    if weights is None:
        run_config(options.workdir)  # raises for a missing run before anything is said about images
    if not options.images:
        raise ConfigError("images", reason="missing", hint="give at least one file or directory")
    if options.csv == "-" and options.json:
        raise ConfigError("--csv", "-", reason="not used with --json", hint="give a file")
    table = None if options.csv in (None, "-") else check_output(options.csv, options.overwrite, "--csv")
    files, skipped, unreadable = find_images(options.images)
    wanted = Wanted(options.top, options.threshold, flip=options.flip)
    if weights is None:
        predicted = predict_source(options.workdir, Images(files), options.checkpoint, wanted=wanted)
    else:
        prepared, blur_pool = options.data, options.model.blur_pool
        predicted, words = predict_weights(weights, Images(files), given=prepared, blur_pool=blur_pool, wanted=wanted)
        _log(words)
    about, threshold = predicted.checkpoint, predicted.threshold
    bad = unreadable | predicted.bad_images
    results = [(file, classes) for file, classes in zip(files, _by_image(predicted), strict=True) if classes]
    if options.csv is not None:
        text = _as_csv(results, has_present=threshold is not None)
        if table is None:
            print_safe(text.rstrip())
        else:
            write_output(table, text.encode("utf-8", "surrogateescape"))
    if options.json:
        about |= {} if threshold is None else {"threshold": threshold}
        rows = [{"image": file, "top": classes} for file, classes in results]
        print_safe(json.dumps(about | {"predictions": rows, "bad_images": bad, "left_out": skipped}, indent=2))
    else:
        if options.csv is None:
            _print(results)
        destination = "" if table is None else f", written to {table}"
        _log(f"{plural(len(results), 'image')} predicted with {about['checkpoint']}{destination}")
        if skipped:
            _log(f"skipped {plural(len(skipped), 'file')} without an image suffix, first {printable(skipped[0], LONGEST_PATH)}")
    for file, reason in bad.items():
        _log(f"jaxdp: cannot read {printable(file, LONGEST_PATH)}: {reason}")
    if bad:
        sys.exit(EXIT_FAILURE)


def _log(text: str) -> None:
    print_safe(text, sys.stderr)


def _print(results: Iterable[tuple[str, list[dict[str, Any]]]]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for file, classes in results:
        shares = [
            entry.get("prediction") or f"{entry['name']} {100 * entry['probability']:.2f} %"
            for entry in classes
            if entry.get("present", True)
        ]
        print_safe(printable(f"{file}: {', '.join(shares) or 'no label'}", LONGEST_PATH))
    sys.stdout.flush()


def _by_image(predicted: Any) -> Iterator[list[dict[str, Any]]]:
    """For each image [{"class", "name", "probability"}, ...], most likely first; [] for an unreadable image. For the task
    labels, with "present", and all present ones. For a registered task with its own targets [{"prediction", "outputs"}]."""
    import jax

    if predicted.predictions.classes.shape[1] == 0:  # of a registered task with its own targets
        for row, texts in enumerate(predicted.predictions.names):
            outputs = jax.tree.map(lambda part, row=row: part[row].tolist(), predicted.predictions.scores)
            yield [{"prediction": text, "outputs": outputs} for text in texts]
        return
    names, threshold = predicted.class_names, predicted.threshold
    for classes, scores in zip(predicted.predictions.classes, predicted.predictions.scores, strict=True):
        is_present = [] if threshold is None else (scores >= threshold).tolist()
        present = [k for k in (-scores).argsort().tolist() if is_present and is_present[k]]
        yield [
            {"class": k, "name": names[k], "probability": float(scores[k])} | ({"present": is_present[k]} if is_present else {})
            for k in dict.fromkeys([*classes[classes >= 0].tolist(), *present])
        ]


def _as_csv(results: Iterable[tuple[str, list[dict[str, Any]]]], *, has_present: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    results = list(results)
    if results and "prediction" in results[0][1][0]:
        writer.writerows([["image", "prediction"], *([file, one["prediction"]] for file, (one,) in results)])
        return text.getvalue()
    writer.writerow(["image", "rank", "class", "name", "probability", *["present"] * has_present])
    for file, classes in results:
        for rank, entry in enumerate(classes, 1):
            present = [int(entry["present"])] if has_present else []
            writer.writerow([file, rank, entry["class"], entry["name"], f"{entry['probability']:.6g}", *present])
    return text.getvalue()
