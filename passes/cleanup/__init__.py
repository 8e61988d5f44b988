"""Passes that take communication out: what is repeated, not needed, or can be reduced together."""
