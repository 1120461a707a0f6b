"""Callbacks that decide about a run: checks, audits, early stopping, when it is saved, and its files."""
