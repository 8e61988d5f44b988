"""Functions of torch that draw a plain tensor for a sharded one: they draw a sharded one here.

A plain tensor is drawn by the default generator of each rank, as it is. What is drawn here follows the contract of
random ops: ranks that hold the same part draw the same, whatever the state of their generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

nnf: Any = torch.nn.functional


def _new(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.new` of a shape, which distributions fill with noise."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
    if kwargs or not all(isinstance(n, (int, torch.SymInt)) for n in shape):
        return func(x, *args, **kwargs)
    return x.new_empty(shape)


def _fractional_max_pool(spatial: int) -> Callable[..., object]:
    """Returns `fractional_max_pool2d` or `fractional_max_pool3d`, with samples that are laid out as the batch is.

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
            # Only the layout of the sums counts: sharded as samples and channels are.
            of_channels = batched.sum(list(range(2, batched.ndim)))
            _random_samples = torch.rand_like(of_channels.unsqueeze(-1).expand(-1, -1, spatial))
        return func(x, kernel_size, output_size, output_ratio, return_indices, _random_samples)

    return run


FUNCTIONS: dict[object, Callable[..., object]] = {
    torch.Tensor.new: _new,
    nnf.fractional_max_pool2d: _fractional_max_pool(2),
    nnf.fractional_max_pool2d_with_indices: _fractional_max_pool(2),
    nnf.fractional_max_pool3d: _fractional_max_pool(3),
    nnf.fractional_max_pool3d_with_indices: _fractional_max_pool(3),
}
"""By function of torch, what takes its place."""
