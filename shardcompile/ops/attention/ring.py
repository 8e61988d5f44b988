"""Ring attention: keys and values arrive one shard at a time, and the next shard is sent while one is attended to.

After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), with two
differences. A shard is sent by its owner and not by the neighbour, so that a rank that does not need a shard does not
receive it. And each step has a control dependency on the step before the last, so that at most two received shards are
held even if a compiler starts collectives early.
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
from shardcompile.ops.support.sharded_rows import take_rows
from shardcompile.sharding import IntLike


@dataclass(frozen=True)
class RingAttention:
    """Ring attention on one rank.

    Attributes:
        ring: the ring along which the shards of the keys are sent.
        first: global index of the first row of the query's local shard.
        causal: whether a row of the query attends only to the rows of the key up to its own index.
        scale: scale of the scores.
        rows_first: whether keys and whether values are stored as [batch, rows, heads, features]; rank-invariant. Shards
            are sent as they are stored, so that this format decides whether a copy is made.
    """

    ring: Ring
    first: IntLike
    causal: bool
    scale: float
    rows_first: tuple[bool, bool]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the result and the logsumexp of the scores.

        Args:
            query: the local shard of this rank: [batch, heads, rows, features].
            key: the local shard of this rank; may have fewer heads.
            value: the local shard of this rank; has the heads of the key.
            mask: None, or the mask for the local rows of the query and all rows of the key.
        """
        out: Tensor | None = None
        lse: Tensor | None = None
        done: deque[Tensor] = deque(maxlen=1)
        for keys, values, columns, shift in self._shards(key, value, mask, None, done):
            rest = (columns, self.causal, shift, self.scale)
            if out is None or lse is None:
                out, lse = attend(query, keys, values, *rest)
                out = out.to(wide_dtype(out.dtype))
            else:
                out, lse = attend_more(out, lse, query, keys, values, *rest)
            done.append(lse)
            del keys, values  # before the fetch of the next shard but one allocates
        assert out is not None and lse is not None, "a ring has at least one rank"
        return out.to(query.dtype), lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of this rank's local shards of query, key and value.

        The gradients of the keys and values of another rank are sent to it while the next shard is attended to. That
        rank adds them to its own.
        """
        grad_query: Any = None
        own: list[Tensor] = []
        returning: PendingShards | None = None
        done: deque[Tensor] = deque(maxlen=1)
        step = 0
        for keys, values, columns, shift in self._shards(key, value, mask, grad, done):
            grads = attend_backward(grad, query, keys, values, out, lse, columns, self.causal, shift, self.scale)
            del keys, values  # before the fetch of the next shard but one allocates
            done.append(grads[0])
            wide = grads[0].to(wide_dtype(query.dtype))
            grad_query = wide if grad_query is None else grad_query + wide
            if returning is not None:
                own = [x + received for x, received in zip(own, returning.wait(), strict=True)]
            # As the kernels store them: [batch, rows, heads, features].
            kv_grads = [x.transpose(1, 2) for x in grads[1:]]
            if step == 0:
                own = [x.to(wide_dtype(x.dtype)) for x in kv_grads]
            else:
                returning = self.ring.give_back(kv_grads, (1, 1), step)
            step += 1  # noqa: SIM113, `enumerate` would keep the last shard alive
        if returning is not None:
            own = [x + received for x, received in zip(own, returning.wait(), strict=True)]
        grad_key, grad_value = (x.to(key.dtype).transpose(1, 2) for x in own)
        return grad_query.to(query.dtype), grad_key, grad_value

    def _shards(
        self, key: Tensor, value: Tensor, mask: Tensor | None, first: Tensor | None, done: deque[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, IntLike]]:
        """Yields the shards of keys and values, the local one first, each with its columns of the mask and its shift.

        Args:
            key: the local shard of this rank.
            value: the local shard of this rank.
            mask: the mask for all rows of the key, or None.
            first: the control dependency of the first fetch, or None.
            done: holds the last result that the consumer has computed from a shard, the control dependency of the
                other fetches.
        """
        shards = [
            x.transpose(1, 2) if rows_first else x for x, rows_first in zip((key, value), self.rows_first, strict=True)
        ]
        dims = [1 if rows_first else 2 for rows_first in self.rows_first]
        fetching: PendingShards | None = None
        for step in range(self.ring.ranks):
            keys, values = (key, value) if fetching is None else self._heads_first(fetching.wait())
            if step + 1 < self.ring.ranks:
                fetching = self.ring.fetch(shards, dims, step + 1, after=done[-1] if step else first)
            size, start = self.ring.shard(step)
            columns = mask
            if mask is not None and not (isinstance(mask.shape[-1], int) and mask.shape[-1] == 1):
                columns = take_rows(mask, 3, start, 1, size)
            yield keys, values, columns, self.first - start if self.causal else 0

    def _heads_first(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Returns received shards as [batch, heads, rows, features]."""
        return [x.transpose(1, 2) if rows_first else x for x, rows_first in zip(shards, self.rows_first, strict=True)]
