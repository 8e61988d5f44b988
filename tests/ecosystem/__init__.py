"""Rows of docs/ecosystem.md."""
