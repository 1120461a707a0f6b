"""Sends the files of a run to a tracker of experiments, from a separate process. Nothing here reads the state of training."""
