"""Ops on lists of tensors."""
