"""Pointwise ops, and those that keep a shape."""
