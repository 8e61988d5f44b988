"""Rewrites chains of ops that other libraries emit for uneven shards, each into one collective."""
