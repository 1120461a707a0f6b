"""Saving and restoring the training state: Orbax files, a manifest with checksums, retention. Nothing here runs a step."""
