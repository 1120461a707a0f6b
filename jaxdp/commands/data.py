"""`jaxdp data prepare`."""

import dataclasses

import tyro

from jaxdp.config import ConfigError


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Prepare:
        """Download a data set and prepare it as array_record, which training reads without TensorFlow (extra prepare).

        Examples:
          jaxdp data prepare imagenette
          jaxdp data prepare imagenet2012 --directory ~/tensorflow_datasets --manual-directory ~/downloads
        """

        name: tyro.conf.Positional[str]
        """of the data set, with its config and version where they matter: name/config:version"""
        directory: str | None = None
        """where prepared data sets are kept; default: ~/tensorflow_datasets"""
        manual_directory: str | None = None
        """where archives lie that cannot be downloaded, as ImageNet's"""

    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: {program} prepare NAME [options]; `{program} prepare --help` lists the options")
        return
    if not arguments or arguments[0] != "prepare":
        raise ConfigError(f"data: {arguments[0] if arguments else ''!r} is not allowed; give prepare")
    chosen = tyro.cli(Prepare, args=arguments[1:], prog=f"{program} prepare")
    from jaxdp.data.prepared import prepare

    print(prepare(chosen.name, chosen.directory, chosen.manual_directory))
