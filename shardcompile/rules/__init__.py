"""Rules: for each op, the legal ways to run it along one mesh dim. Pure: layouts in, strategies out."""

from shardcompile.rules import images, indexing, linalg, normalization, pointwise, reductions, views

__all__ = ["images", "indexing", "linalg", "normalization", "pointwise", "reductions", "views"]
