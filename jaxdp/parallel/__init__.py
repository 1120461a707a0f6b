"""Reduction over a device mesh: strategies, buckets, overlap with the backward pass, audits. No process management."""
