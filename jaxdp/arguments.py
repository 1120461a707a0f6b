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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default=default)
    try:
        known, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return load_config(default)  # --config without a value: the full parser says so
    return load_config(known.config)
