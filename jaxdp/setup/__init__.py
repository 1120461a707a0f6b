"""What happens around the training loop: the run directory, data and plan, equal processes, the choice of the all-reduce."""
