"""Run and train PyTorch models on unevenly sharded tensors under `torch.compile`."""

__version__ = "0.1.0"

from shardcompile.tensor import ShardTensor as ShardTensor
