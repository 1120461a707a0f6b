"""Runs and data at URLs such as s3://BUCKET/PATH. This package is imported only for a URL.

`remote_run` is a place for a run: its files and checkpoints, and the lease that one process at a time holds. `source` is a
source of bytes for data. Both use `location`: a folder of objects, read and written through fsspec.
"""
