"""The tensor subclass `ShardTensor`."""

from shardcompile.tensor import functions
from shardcompile.tensor.core import ShardTensor as ShardTensor

__all__ = ["ShardTensor", "functions"]
