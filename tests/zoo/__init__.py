"""Models of the world with random weights: what they compute on sharded inputs, and what they send."""
