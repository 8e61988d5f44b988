"""Benchmarks, run from the repository root: `python -m benchmarks.step --help`."""
