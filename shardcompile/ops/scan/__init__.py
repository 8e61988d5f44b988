"""Cumulative ops (scans), and `flip`, `roll` and `repeat`."""
