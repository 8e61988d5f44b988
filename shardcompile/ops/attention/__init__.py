"""Attention: fused ops on local shards, around a ring, over packed documents."""
