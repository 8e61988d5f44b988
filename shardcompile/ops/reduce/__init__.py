"""Reductions, softmax and losses."""
