"""Packed sequences. Torch reads how long they are from memory, so that the lengths of a batch are plain tensors."""

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
    """`_pack_padded_sequence`: the elements of `x` that torch packs, found by packing their indices."""
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
    """`_pad_packed_sequence`: the elements of `data` where torch puts them, found by padding their indices."""
    indices = torch.arange(data.shape[0], device=data.device).unsqueeze(1)
    places, lengths = func(indices, _plain(batch_sizes), batch_first, -1, total_length)
    places = places.squeeze(2)
    padded = data.index_select(0, places.flatten().clamp(min=0)).unflatten(0, places.shape)
    is_padding = (places < 0).view(places.shape + (1,) * (padded.ndim - 2))
    return padded.masked_fill(is_padding, value), lengths


def _run(func: Callable[..., object], x: Tensor, second: object, *args: object) -> object:
    """A recurrent layer; the second argument of one on a packed sequence is how many elements each step has."""
    if isinstance(second, Tensor) and not second.dtype.is_floating_point:
        second = _plain(second)
    return func(x, second, *args)


RECURRENT_FUNCTIONS: dict[object, Callable[..., object]] = {
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _unpack,
    **dict.fromkeys([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], _run),
}
"""What Python functions of torch do with packed sequences."""
