"""Scheduling: the order that overlaps most, a simulator that replays it, and lower bounds."""
