"""`jaxdp doctor`: what a machine has, against what a run needs, and proofs on the devices that are there."""
