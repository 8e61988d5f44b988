"""Passes that remove communication: what is repeated, dead, inverse, or can be reduced together."""
