"""Packed sequences and recurrent layers. Torch reads the sequence lengths from memory, so they become plain tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardcompile.sharded import Sharded


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, Sharded) else x


def _pack(
    func: Callable[..., tuple[Tensor, Tensor]], x: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Implements `_pack_padded_sequence`: packs the indices of the elements, and gathers `x` by them."""
    if x.ndim < 2 or x.numel() == 0:
        return func(_plain(x), _plain(lengths), batch_first)
    indices = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[0], x.shape[1], 1)
    packed, batch_sizes = func(indices, _plain(lengths), batch_first)
    return x.flatten(0, 1).index_select(0, packed.squeeze(1)), batch_sizes


def _unpack(
    func: Callable[..., tuple[Tensor, Tensor]],
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Implements `_pad_packed_sequence`: pads the indices of the elements, and gathers `data` by them."""
    indices = torch.arange(data.shape[0], device=data.device).unsqueeze(1)
    padded_indices, lengths = func(indices, _plain(batch_sizes), batch_first, -1, total_length)
    padded_indices = padded_indices.squeeze(2)
    padded = data.index_select(0, padded_indices.flatten().clamp(min=0)).unflatten(0, padded_indices.shape)
    is_padding = (padded_indices < 0).view(padded_indices.shape + (1,) * (padded.ndim - 2))
    return padded.masked_fill(is_padding, value), lengths


def _run(func: Callable[..., object], x: Tensor, second: object, *args: object) -> object:
    """Runs a recurrent layer; for a packed sequence the second argument is the batch size of each step."""
    if isinstance(second, Tensor) and not second.dtype.is_floating_point:
        second = _plain(second)
    return func(x, second, *args)


RECURRENT_FUNCTIONS: dict[object, Callable[..., object]] = {
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _unpack,
    **dict.fromkeys([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], _run),
}
"""Implementations of the torch functions for packed sequences."""
