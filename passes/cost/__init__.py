"""What things cost, the same on every rank."""
