"""`python train.py` is `jaxdp train`."""

import sys

from jaxdp.cli import run

if __name__ == "__main__":
    run("train", sys.argv[1:], "train.py")
