"""Reductions, and softmax."""
