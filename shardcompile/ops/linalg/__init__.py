"""Matrix decompositions, inverses and solves of batches of matrices."""
