"""Types of command-line options that several commands share."""

from typing import Annotated

import tyro

from jaxdp.config import Config

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]  # --name without --no-name
ConfigFields = Annotated[Config, tyro.conf.arg(name="")]  # the fields of Config as flags without a prefix
