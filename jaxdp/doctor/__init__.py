"""`jaxdp doctor`: checks of this machine against the needs of a recipe, and proofs that its devices train correctly."""
