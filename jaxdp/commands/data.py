"""`jaxdp data prepare`."""

import dataclasses
from typing import Annotated

import tyro

from jaxdp.flags import one_of, parse


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Prepare:
        """Download a data set and prepare it as array_record, which training reads without TensorFlow (extra prepare).

        Examples:
          jaxdp data prepare imagenette
          jaxdp data prepare imagenet2012 --directory ~/tensorflow_datasets --manual-directory ~/downloads
        """

        name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
        """of the data set, with its config and version where they matter: name/config:version"""
        directory: str | None = None
        """where prepared data sets are kept; default: ~/tensorflow_datasets"""
        manual_directory: str | None = None
        """where archives lie that cannot be downloaded, as ImageNet's"""

    if arguments and arguments[0] in ("-h", "--help"):
        print(
            f"usage: {program} prepare NAME [options]\n\nDownload and prepare a data set of tensorflow-datasets.\n\n"
            f"`{program} prepare --help` lists every option.\n\nExample:\n  {program} prepare imagenette"
        )
        return
    if not arguments or arguments[0] != "prepare":
        raise one_of("data", arguments[0] if arguments else "", ["prepare"])
    chosen = parse(Prepare, arguments[1:], f"{program} prepare")
    from jaxdp.data.prepared import prepare

    print(prepare(chosen.name, chosen.directory, chosen.manual_directory))
