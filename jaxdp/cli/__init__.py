"""The command line: one module per command, with `run(arguments, program)`. Modules of the library do not belong here."""

import time

STARTED = time.monotonic()  # start of the command
