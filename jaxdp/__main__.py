"""`python -m jaxdp` is `jaxdp`."""

from jaxdp.cli import main

main()
