"""Rows by number: looked up, written, added, counted."""
