"""Reduction over a device mesh: strategies, buckets, overlap with the backward pass, audits. It knows nothing of processes."""
