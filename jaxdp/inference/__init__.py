"""Using the checkpoints of a run without training: list, evaluate, predict, export."""
