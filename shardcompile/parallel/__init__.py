"""Parallel algorithms on sharded tensors: routing, gather plans, neighbor search, halo exchange, packed documents,
context parallelism and checks of replicated modules.
"""
