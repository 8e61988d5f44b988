"""Chains of ops that others emit for uneven blocks, and the pass that makes one collective of each."""
