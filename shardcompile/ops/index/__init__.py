"""Ops that gather, write, add and count rows by index."""
