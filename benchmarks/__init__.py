"""Measurements, side by side in one run. Never part of the tests: a machine's mood is not a failure."""
