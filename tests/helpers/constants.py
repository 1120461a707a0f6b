"""`jaxdp` as a process with other values of constants: `python constants.py jaxdp.MODULE.NAME=VALUE ... COMMAND ...`."""

import importlib
import sys

from jaxdp.cli.main import main

LEASE_SECONDS = 3.0
CLOUD = "jaxdp.cloud.remote_workdir"


def short_leases(seconds=LEASE_SECONDS) -> list[str]:
    """`jaxdp` as a process from which another may soon take over a run at a URL."""
    return [sys.executable, "-u", __file__, f"{CLOUD}.LEASE_SECONDS={seconds}", f"{CLOUD}.UPLOAD_SECONDS=1"]


if __name__ == "__main__":
    while "=" in sys.argv[1]:
        name, _, value = sys.argv.pop(1).partition("=")
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, float(value))
    main()
