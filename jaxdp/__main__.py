"""`python -m jaxdp` is `jaxdp`."""

from jaxdp.cli.main import main

main()
