"""Programs for developers, run from the repository root: `python -m tools.fuzz --help`."""
