"""`jaxdp` as a process with other values of constants: `python constants.py jaxdp.MODULE.NAME=VALUE ... COMMAND ...`."""

import importlib
import sys

from jaxdp.cli.main import main

LEASE_SECONDS = 3.0
CLOUD = "jaxdp.cloud.remote_workdir"
# Another process may soon take over a run at a URL.
SHORT_LEASES = [sys.executable, "-u", __file__, f"{CLOUD}.LEASE_SECONDS={LEASE_SECONDS}", f"{CLOUD}.UPLOAD_SECONDS=1"]

if __name__ == "__main__":
    while "=" in sys.argv[1]:
        name, _, value = sys.argv.pop(1).partition("=")
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, float(value))
    main()
