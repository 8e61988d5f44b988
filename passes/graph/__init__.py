"""What passes read of a graph: its collectives, the properties of ops, dependencies, rank-dependent sizes."""
