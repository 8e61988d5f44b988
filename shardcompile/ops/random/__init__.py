"""Random ops."""
