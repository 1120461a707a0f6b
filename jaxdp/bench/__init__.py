"""Benchmarks of this machine: all-reduce, input pipeline, training step, scaling."""
