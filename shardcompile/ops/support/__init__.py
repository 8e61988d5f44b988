"""Helpers that several families of ops share."""
