"""Layer and group normalization."""
