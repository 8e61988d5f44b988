"""Pointwise ops, and other ops that preserve the shape."""
