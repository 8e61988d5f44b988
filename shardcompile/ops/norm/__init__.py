"""Layer and group normalisation."""
