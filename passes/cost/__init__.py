"""The cost model, rank-invariant: seconds and bytes of compute and of collectives."""
