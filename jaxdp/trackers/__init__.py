"""Sends the files of a run to a tracker of experiments, from a process of its own. Nothing here reads the state of training."""
