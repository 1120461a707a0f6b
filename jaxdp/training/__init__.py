"""The training run: step, evaluation, programs, and the trainer that connects them."""
