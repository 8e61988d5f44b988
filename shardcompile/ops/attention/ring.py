"""Attention over keys that come a block at a time: while one is attended to, the next one is under way.

After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), with two
differences: a block comes from its owner, not from the neighbour, so that a rank which needs none gets none; and each
step waits for the one before the last, so that a compiler which starts collectives early holds no more than two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcompile.collectives import Pending, Ring
from shardcompile.layout import IntLike
from shardcompile.ops.attention.kernels import attend, attend_backward, attend_more, joined_rows, separate_rows
from shardcompile.ops.support.precision import wide_dtype
from shardcompile.ops.view.rows import take_rows


@dataclass(frozen=True)
class RingAttention:
    """What a rank attends with.

    Attributes:
        ring: of the keys' blocks.
        first: number of the first row of the query's block.
        causal: whether a row of the query sees only the rows of the key up to its own number.
        scale: factor of the scores.
    """

    ring: Ring
    first: IntLike
    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the softmax's denominator.

        Args:
            query: this rank's block: [batch, heads, rows, features].
            key: this rank's block; may have fewer heads.
            value: the same.
            mask: None, or for the query's rows and all rows of the key.
        """
        out: Tensor | None = None
        denominator: Tensor | None = None
        done: list[Tensor] = []
        for keys, values, columns, shift in self._blocks(key, value, mask, None, done):
            rest = (query, keys, values, columns, self.causal, shift, self.scale)
            if out is None or denominator is None:
                out, denominator = attend(*rest)
                out = out.to(wide_dtype(out.dtype))
            else:
                out, denominator = attend_more(out, denominator, *rest)
            done.append(denominator)
        assert out is not None and denominator is not None, "a ring has ranks"
        return out.to(query.dtype), denominator

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        denominator: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of this rank's blocks of query, key and value.

        Those of a block of another rank go home while the next one is attended to, and are added there.
        """
        features = key.shape[-1]
        of_query: Any = None
        of_rows: Any = None
        going: Pending | None = None
        done: list[Tensor] = []
        for by, (keys, values, columns, shift) in enumerate(self._blocks(key, value, mask, grad, done)):
            some = attend_backward(grad, query, keys, values, out, denominator, columns, self.causal, shift, self.scale)
            done.append(some[0])
            wide = some[0].to(wide_dtype(query.dtype))
            of_query = wide if of_query is None else of_query + wide
            rows = joined_rows(some[1], some[2])
            if going is not None:
                of_rows = of_rows + going.wait()
            if by == 0:
                of_rows = rows.to(wide_dtype(rows.dtype))
            else:
                going = self.ring.give_back(rows, by)
        if going is not None:
            of_rows = of_rows + going.wait()
        of_key, of_value = separate_rows(of_rows.to(key.dtype), features)
        return of_query.to(query.dtype), of_key, of_value

    def _blocks(
        self, key: Tensor, value: Tensor, mask: Tensor | None, first: Tensor | None, done: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, IntLike]]:
        """One block of keys and values after the other, the own one first; what it needs of the mask; its shift.

        Args:
            key: this rank's.
            value: this rank's.
            mask: as given.
            first: what the first step waits for.
            done: what the reader has worked out with each block so far.
        """
        features = key.shape[-1]
        rows = joined_rows(key, value)
        coming: Pending | None = None
        for by in range(self.ring.ranks):
            keys, values = (key, value) if coming is None else separate_rows(coming.wait(), features)
            if by + 1 < self.ring.ranks:
                coming = self.ring.fetch(rows, by + 1, after=done[by - 1] if by else first)
            size, start = self.ring.block(by)
            columns = mask
            if mask is not None and not (isinstance(mask.shape[-1], int) and mask.shape[-1] == 1):
                columns = take_rows(mask, 3, start, 1, size)
            yield keys, values, columns, self.first - start if self.causal else 0
