"""Cumulative ops, and those that turn rows around."""
