"""Sends the files of a run to an experiment tracker, from a separate process. Nothing here reads the state of training.

The process is separate because the clients block their caller while a tracker does not answer. With its server suspended for
60 s, MLflow's log_artifact returned after 60.3 s, and wandb.init raised after 61.5 s, its time-out.
"""
