"""Matrix products, batched and grouped, and einsum of two tensors."""
