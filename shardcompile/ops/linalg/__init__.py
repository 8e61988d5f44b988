"""Decompositions and solutions of batches of matrices."""
