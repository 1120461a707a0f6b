"""`jaxdp predict`."""

import csv
import dataclasses
import io
import json
import sys
from typing import Annotated

import tyro

from jaxdp.config import ConfigError
from jaxdp.errors import EXIT_FAILURE
from jaxdp.flags import parse
from jaxdp.recipes import register_from

COLUMNS = ("image", "rank", "class", "name", "probability")


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Predict:
        """Name the likeliest classes of images, prepared as the run's evaluation prepares them, on this machine's devices.

        Examples:
          jaxdp predict --workdir runs/flowers picture.jpg
          jaxdp predict --workdir runs/flowers --checkpoint best --top 3 --csv told.csv holiday/
        """

        images: tyro.conf.Positional[tuple[str, ...]]
        """files, or folders of them, however deep"""
        workdir: str = "runs/digits"
        """of the run"""
        checkpoint: str = "newest"
        """newest, best (by accuracy), or the samples of one, as `jaxdp checkpoints` lists them"""
        top: int | None = None
        """likeliest classes of each image; None: 5, or all where there are fewer"""
        csv: str | None = None
        """a file to write, with a row for each image and class; into a pipe or a device it is written as it is"""
        overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """write over a file that is there"""
        config: str | None = None
        """a recipe's file (.py) that registers the run's model or strategy; None: they are jaxdp's own"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = parse(Predict, arguments, program)
    register_from(chosen.config)
    from jaxdp.data.folder import image_files
    from jaxdp.files import check_output, write_whole
    from jaxdp.training.predicting import Files, predict_from

    if not chosen.images:
        raise ConfigError("images: () is not allowed; give at least one file or folder")
    table = None if chosen.csv is None else check_output(chosen.csv, chosen.overwrite, "--csv")
    files, left_out, unread = image_files(chosen.images)
    predictions, bad, about = predict_from(chosen.workdir, Files(files), chosen.checkpoint, chosen.top)
    bad = unread | bad
    told = [(file, likeliest) for file, likeliest in zip(files, _by_image(predictions), strict=True) if likeliest]
    if table is not None:
        write_whole(table, _as_csv(told).encode("utf-8", "surrogateescape"))
    if chosen.json:
        rows = [{"image": file, "top": likeliest} for file, likeliest in told]
        print(json.dumps(about | {"predictions": rows, "bad_images": bad, "left_out": left_out}, indent=2))
    else:
        if table is None:
            _print(told)
        where = "" if table is None else f", in {table}"
        _say(f"{len(told)} image{'s' * (len(told) != 1)} by {about['checkpoint']}{where}")
        if left_out:
            _say(f"{len(left_out)} files do not end as images do and are left out, {left_out[0]} first")
    for file, reason in bad.items():
        _say(f"{file} cannot be used: {reason}")
    if bad:
        sys.exit(EXIT_FAILURE)


def _say(text: str) -> None:
    print(f"jaxdp: {text}", file=sys.stderr, flush=True)


def _print(told) -> None:
    if hasattr(sys.stdout, "reconfigure"):  # else it is a notebook's or a test's, which takes any character
        sys.stdout.reconfigure(errors="backslashreplace")
    for file, likeliest in told:
        shares = [f"{one['name']} {100 * one['probability']:.2f} %" for one in likeliest]
        print(f"{file}: {', '.join(shares)}")
    sys.stdout.flush()


def _by_image(predictions):
    """For each image [{"class", "name", "probability"}, ...]; empty for one that could not be used."""
    for classes, names, probabilities in zip(*predictions, strict=True):
        yield [
            {"class": int(number), "name": name, "probability": float(probability)}
            for number, name, probability in zip(classes[: len(names)], names, probabilities[: len(names)], strict=True)
        ]


def _as_csv(told) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for file, likeliest in told:
        for rank, one in enumerate(likeliest, 1):
            writer.writerow([file, rank, one["class"], one["name"], f"{one['probability']:.6g}"])
    return text.getvalue()
