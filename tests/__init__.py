"""The tests, by what they need, and `support`, which they import."""
