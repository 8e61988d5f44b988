"""Sorting and top-k."""
