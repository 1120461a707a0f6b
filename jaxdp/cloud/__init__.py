"""Runs at URLs: the local copy of a run, and its uploads."""
