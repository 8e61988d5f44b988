"""Collectives that have started, and the wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import ordered_ints


@dataclass(frozen=True)
class Pending:
    """A collective that has started.

    Attributes:
        flat: what it writes.
        rows: shape of the result with `dim` first.
        dim: where the rows go.
    """

    flat: Tensor
    rows: tuple[Any, ...]
    dim: int

    @staticmethod
    def of(flat: Tensor, shape: Sequence[object], dim: int, size: object) -> Pending:
        """A collective whose result has the given shape, but for the size of `dim`."""
        return Pending(flat, (size, *(s for d, s in enumerate(shape) if d != dim)), dim)

    def result(self) -> Tensor:
        """The result, not to be read before the wait."""
        return self._shaped(self.flat)

    def wait(self) -> Tensor:
        """Complete the collective; keeps it alive in a graph even if its result is empty on this rank."""
        return self._shaped(wait(self.flat))

    def _shaped(self, flat: Tensor) -> Tensor:
        rows = flat.view(self.rows)
        return rows.movedim(0, self.dim) if self.dim else rows


@dataclass(frozen=True)
class Decoded:
    """A reduction that has started of numbers in another form: in a wider dtype, or floats encoded for a maximum.

    Attributes:
        pending: the collective.
        encoded: the dtype that was encoded; None if numbers were only made wider.
        dtype: of the result.
    """

    pending: Pending
    encoded: torch.dtype | None
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """Complete the collective."""
        out = self.pending.wait()
        return (out if self.encoded is None else ordered_ints.decode(out, self.encoded)).to(self.dtype)

    result = wait
    """What is decoded has been read, so that there is nothing to give before the wait."""


def wait(x: Tensor | Pending | Decoded) -> Tensor:
    """Complete an asynchronous collective."""
    return torch.ops._c10d_functional.wait_tensor(x) if isinstance(x, Tensor) else x.wait()
