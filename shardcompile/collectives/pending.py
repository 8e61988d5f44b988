"""Pending results of collectives that have started, and the wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import ordered_ints


@dataclass(frozen=True)
class Pending:
    """The result of a collective that has started.

    Attributes:
        flat: the flat tensor that it writes.
        rows: shape of the result with `dim` outermost.
        dim: position of the outermost dim in the result.
    """

    flat: Tensor
    rows: tuple[Any, ...]
    dim: int

    @staticmethod
    def of(flat: Tensor, shape: Sequence[object], dim: int, size: object) -> Pending:
        """Returns the pending result of this shape, with `dim` replaced by `size`."""
        return Pending(flat, (size, *(s for d, s in enumerate(shape) if d != dim)), dim)

    def result(self) -> Tensor:
        """Returns the result, which must not be read before the wait."""
        return self._shaped(self.flat)

    def wait(self) -> Tensor:
        """Waits for the collective; keeps it alive in a graph even if its result is empty on this rank."""
        return self._shaped(wait(self.flat))

    def _shaped(self, flat: Tensor) -> Tensor:
        rows = flat.view(self.rows)
        return rows.movedim(0, self.dim) if self.dim else rows


@dataclass(frozen=True)
class Decoded:
    """The result of a reduction that has started on converted values: of a wider dtype, or `ordered_ints`.

    Attributes:
        pending: the result in the converted form.
        encoded: the float dtype that `ordered_ints` encoded; None if values were only converted to a wider dtype.
        dtype: dtype of the result.
    """

    pending: Pending
    encoded: torch.dtype | None
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """Waits for the collective, then decodes its result."""
        out = self.pending.wait()
        return (out if self.encoded is None else ordered_ints.decode(out, self.encoded)).to(self.dtype)

    result = wait
    """Decoding reads the result, so that there is none before the wait."""


def wait(x: Tensor | Pending | Decoded) -> Tensor:
    """Waits for an asynchronous collective and returns its result."""
    return torch.ops._c10d_functional.wait_tensor(x) if isinstance(x, Tensor) else x.wait()
