"""Rules: for each op, the legal ways to run it along one mesh dim. Pure: layouts in, strategies out."""

from shardcompile.rules import images, indexing, linalg, normalization, pointwise, reductions, views
from shardcompile.rules.pointwise import is_elementwise as is_elementwise
from shardcompile.rules.pointwise import is_pointwise as is_pointwise
from shardcompile.rules.pointwise import pointwise as pointwise_rule
from shardcompile.rules.registry import Rule as Rule
from shardcompile.rules.registry import find_rule as find_rule
from shardcompile.rules.registry import register as register
from shardcompile.rules.registry import registered_ops as registered_ops
from shardcompile.rules.registry import replace_rule as replace_rule
from shardcompile.rules.strategy import OpCall as OpCall
from shardcompile.rules.strategy import Strategy as Strategy
from shardcompile.rules.strategy import TensorArg as TensorArg
from shardcompile.rules.strategy import along as along
from shardcompile.rules.strategy import replicate_all as replicate_all

__all__ = ["images", "indexing", "linalg", "normalization", "pointwise", "pointwise_rule", "reductions", "views"]
