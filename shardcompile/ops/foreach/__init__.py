"""Ops on lists of tensors: foreach ops, fused optimizers and gradient scaling."""
