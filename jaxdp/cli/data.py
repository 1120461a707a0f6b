"""`jaxdp data prepare`: prepare a data set of tensorflow-datasets."""

import dataclasses
from typing import Annotated

from jaxdp.errors import ConfigError, one_of, print_safe
from jaxdp.flags import Arg, parse


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Download a data set and prepare it as array_record files, which training reads without TensorFlow (extra prepare).

    Examples:
      jaxdp data prepare imagenette
      jaxdp data prepare imagenet2012 --directory ~/tensorflow_datasets --manual-directory ~/downloads
    """

    name: Annotated[str, Arg("NAME", positional=True)]
    """Name of the data set, optionally with config and version: NAME/CONFIG:VERSION"""
    directory: str | None = None
    """Directory of prepared data sets (None: ~/tensorflow_datasets)"""
    manual_directory: str | None = None
    """Directory of archives that must be downloaded by hand, such as ImageNet's"""


def run(arguments: list[str], program: str) -> None:
    if not arguments:
        raise ConfigError("data", reason="missing command", hint=f"use {program} prepare NAME")
    if arguments[0] not in ("prepare", "-h", "--help"):
        raise one_of("data", arguments[0], ["prepare"])
    options = parse(Prepare, arguments[arguments[0] == "prepare" :], f"{program} prepare")
    from jaxdp.data.tfds import prepare

    print_safe(prepare(options.name, options.directory, options.manual_directory))
