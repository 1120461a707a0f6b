"""The training run: step, evaluation, programs, and the loop that connects them."""
