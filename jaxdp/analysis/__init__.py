"""What a step would cost on other hardware: cost models and ahead-of-time compilation. Nothing here runs a step."""
