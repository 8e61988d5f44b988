"""Attention over keys that come a shard at a time: while one is attended to, the next one is under way.

After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), with two
differences: a shard comes from its owner, not from the neighbour, so that a rank which needs none gets none; and each
step waits for the one before the last, so that a compiler which starts collectives early holds no more than two shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcompile.collectives import PendingShards, Ring
from shardcompile.ops.attention.kernels import attend, attend_backward, attend_more
from shardcompile.ops.support.precision import wide_dtype
from shardcompile.ops.view.rows import take_rows
from shardcompile.sharding import IntLike


@dataclass(frozen=True)
class RingAttention:
    """What a rank attends with.

    Attributes:
        ring: of the keys' shards.
        first: number of the first row of the query's shard.
        causal: whether a row of the query sees only the rows of the key up to its own number.
        scale: factor of the scores.
        by_rows: of keys and of values whether they are stored as [batch, rows, heads, features], on all ranks alike:
            what is stored as it travels is not copied before.
    """

    ring: Ring
    first: IntLike
    causal: bool
    scale: float
    by_rows: tuple[bool, bool]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the softmax's denominator.

        Args:
            query: this rank's local shard: [batch, heads, rows, features].
            key: this rank's local shard; may have fewer heads.
            value: the same.
            mask: None, or for the query's rows and all rows of the key.
        """
        out: Tensor | None = None
        denominator: Tensor | None = None
        done: deque[Tensor] = deque(maxlen=1)
        for keys, values, columns, shift in self._shards(key, value, mask, None, done):
            rest = (columns, self.causal, shift, self.scale)
            if out is None or denominator is None:
                out, denominator = attend(query, keys, values, *rest)
                out = out.to(wide_dtype(out.dtype))
            else:
                out, denominator = attend_more(out, denominator, query, keys, values, *rest)
            done.append(denominator)
            del keys, values  # before the next but one is fetched
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
        """The gradients of this rank's shards of query, key and value.

        Those of a shard of another rank go home while the next one is attended to, and are added there.
        """
        of_query: Any = None
        own: list[Tensor] = []
        going: PendingShards | None = None
        done: deque[Tensor] = deque(maxlen=1)
        by = 0
        for keys, values, columns, shift in self._shards(key, value, mask, grad, done):
            some = attend_backward(grad, query, keys, values, out, denominator, columns, self.causal, shift, self.scale)
            del keys, values  # before the next but one is fetched
            done.append(some[0])
            wide = some[0].to(wide_dtype(query.dtype))
            of_query = wide if of_query is None else of_query + wide
            if going is not None:
                own = [x + more for x, more in zip(own, going.wait(), strict=True)]
            # As the kernels store them: [batch, rows, heads, features].
            others = [x.transpose(1, 2) for x in some[1:]]
            if by == 0:
                own = [x.to(wide_dtype(x.dtype)) for x in others]
            else:
                going = self.ring.give_back(others, (1, 1), by)
            by += 1  # noqa: SIM113, `enumerate` would keep the last shard
        if going is not None:
            own = [x + more for x, more in zip(own, going.wait(), strict=True)]
        of_key, of_value = (x.to(key.dtype).transpose(1, 2) for x in own)
        return of_query.to(query.dtype), of_key, of_value

    def _shards(
        self, key: Tensor, value: Tensor, mask: Tensor | None, first: Tensor | None, done: deque[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, IntLike]]:
        """Yield one shard of keys and values after the other, the rank's own first, each with its part of the mask and
        its shift.

        Args:
            key: this rank's.
            value: this rank's.
            mask: as given.
            first: what the first step waits for.
            done: the last that the reader has worked out with a shard.
        """
        shards = [x.transpose(1, 2) if by_rows else x for x, by_rows in zip((key, value), self.by_rows, strict=True)]
        dims = [1 if by_rows else 2 for by_rows in self.by_rows]
        coming: PendingShards | None = None
        for by in range(self.ring.ranks):
            keys, values = (key, value) if coming is None else self._shaped(coming.wait())
            if by + 1 < self.ring.ranks:
                coming = self.ring.fetch(shards, dims, by + 1, after=done[-1] if by else first)
            size, start = self.ring.shard(by)
            columns = mask
            if mask is not None and not (isinstance(mask.shape[-1], int) and mask.shape[-1] == 1):
                columns = take_rows(mask, 3, start, 1, size)
            yield keys, values, columns, self.first - start if self.causal else 0

    def _shaped(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Shards that came, as [batch, heads, rows, features]."""
        return [x.transpose(1, 2) if by_rows else x for x, by_rows in zip(shards, self.by_rows, strict=True)]
