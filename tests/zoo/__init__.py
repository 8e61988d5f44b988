"""Models of the world with random weights: what they compute on cut inputs, and what they send."""
