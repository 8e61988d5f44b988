"""Formats durations and byte counts."""

from __future__ import annotations


def in_seconds(seconds: float) -> str:
    """Formats a duration in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def in_bytes(nbytes: float) -> str:
    """Formats a byte count in GiB, MiB, KiB or B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
