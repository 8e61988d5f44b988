"""Torch functions that draw a plain random tensor for a sharded argument: here they draw a sharded one.

A plain tensor would be drawn by the default generator of each rank, whatever its state. A sharded one follows the
contract of random ops: ranks that hold the same shard draw the same values, whatever the state of their generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

nnf: Any = torch.nn.functional


def _new(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Implements `Tensor.new` of a shape, which `torch.distributions` fills with noise."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
    if kwargs or not all(isinstance(n, (int, torch.SymInt)) for n in shape):
        return func(x, *args, **kwargs)
    return x.new_empty(shape)


def _fractional_max_pool(spatial: int) -> Callable[..., object]:
    """Implements `fractional_max_pool2d` and `fractional_max_pool3d`, with random samples sharded as the batch.

    Args:
        spatial: number of spatial dims.
    """

    def run(
        func: Callable[..., object],
        x: Tensor,
        kernel_size: int | Sequence[int],
        output_size: int | Sequence[int] | None = None,
        output_ratio: float | Sequence[float] | None = None,
        return_indices: bool = False,
        _random_samples: Tensor | None = None,
    ) -> object:
        if _random_samples is None and x.ndim > spatial:
            batched = x.detach() if x.ndim == spatial + 2 else x.detach().unsqueeze(0)
            # Only the layout of the sums is used: they are sharded as the batch and channels are.
            sums = batched.sum(list(range(2, batched.ndim)))
            _random_samples = torch.rand_like(sums.unsqueeze(-1).expand(-1, -1, spatial))
        return func(x, kernel_size, output_size, output_ratio, return_indices, _random_samples)

    return run


FUNCTIONS: dict[object, Callable[..., object]] = {
    torch.Tensor.new: _new,
    nnf.fractional_max_pool2d: _fractional_max_pool(2),
    nnf.fractional_max_pool2d_with_indices: _fractional_max_pool(2),
    nnf.fractional_max_pool3d: _fractional_max_pool(3),
    nnf.fractional_max_pool3d_with_indices: _fractional_max_pool(3),
}
"""Implementations by torch function."""
