"""The commands of the command line: a module for each, with `run(arguments, program)`."""

import time

STARTED = time.monotonic()  # when the command was given
