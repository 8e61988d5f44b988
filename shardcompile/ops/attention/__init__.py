"""Attention: fused ops on blocks, around a ring, over packed documents."""
