"""What the zoo knows of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A model, its inputs, and how it is sharded.

    Attributes:
        name: unique; that of its golden file.
        make: the model with random weights, tiny; called after the seed is set.
        inputs: for n rows of what is sharded, the full inputs.
        sharded: of each input the dim that is sharded, or None for one that stays plain.
        rows: of each input, how many of its rows belong to one of the n.
        call: how the model is called with the inputs.
        read: from what the model returns to one tensor.
        package: that it needs; empty for none.
        dtype: that it is compared in.
        tolerance: relative and absolute.
        gathers: for each whole gather of the golden file what a person says of it: part of the line, then a word
            (`needed`, or `not needed`) and why.
        graphs: of one compilation over all partitions and sizes; two where another size takes one more.
        shard_parameters: part of the names of parameters that are sharded along dim 0.
        sizes: what n is, for four partitions and for a fifth one.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], list[Tensor]]
    partition: tuple[int | None, ...]
    rows: tuple[int, ...] = ()
    call: Callable[..., Any] = lambda model, *inputs: model(*inputs)
    read: Callable[[Any], Tensor] = lambda out: out
    package: str = ""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    gathers: tuple[tuple[str, str], ...] = ()
    graphs: int = 1
    shard_parameters: str = ""
    sizes: tuple[int, int] = (8, 11)

    def rows_of(self, i: int) -> int:
        """Rows of an input for each of the n."""
        return self.rows[i] if self.rows else 1


class Reading(nn.Module):
    """A model that gives one tensor."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.model = entry.make()
        self.call, self.read = entry.call, entry.read

    def forward(self, *inputs: Tensor) -> Tensor:
        """That tensor."""
        return self.read(self.call(self.model, *inputs))
