"""Everything about URLs such as s3://BUCKET/PATH, imported only for one.

`remote_run` is a place for a run: its files and checkpoints, and the lease that one process at a time holds. `source` is a
source of bytes for data. Both stand on `location`: a folder of objects, read and written through fsspec.
"""
