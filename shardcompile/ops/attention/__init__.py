"""Attention: fused ops on local shards, ring attention, and attention within packed documents."""
