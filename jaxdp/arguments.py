"""What of a command line has to be known before its full parser is made."""

import argparse

from jaxdp.recipes import load_config


def given(arguments, flag: str, default: str) -> str:
    """The value of a flag, before the full parser sees it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, default=default, dest="value")
    try:
        return parser.parse_known_args(arguments)[0].value
    except argparse.ArgumentError:
        return default


def load(arguments, default):
    """The recipe that --config names, before the other flags are laid over it."""
    return load_config(given(arguments, "--config", default))  # without a value the full parser says so
