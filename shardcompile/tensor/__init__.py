"""The sharded tensor."""

from shardcompile.tensor.core import ShardTensor as ShardTensor
