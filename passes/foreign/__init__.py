"""Chains of ops that others emit for uneven shards, and the pass that makes one collective of each."""
