"""When things run: the order that hides most, replayed by a simulator, and what none can beat."""
