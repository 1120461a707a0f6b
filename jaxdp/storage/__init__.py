"""Object storage: files, data and runs at URLs such as s3://BUCKET/PATH, read and written through fsspec."""
