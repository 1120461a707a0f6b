"""Modes of the training step: each wraps a function of the plain step in `training/step.py`, which says in which order."""
