"""Rows by index: looked up, written, added, counted."""
