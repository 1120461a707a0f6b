"""`python train.py` is `jaxdp train`."""

import sys

from jaxdp.cli.main import run

if __name__ == "__main__":
    run("train", sys.argv[1:], "train.py")
