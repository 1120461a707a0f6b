"""Cost of a step on other hardware: cost models and ahead-of-time compilation. No step is run."""
