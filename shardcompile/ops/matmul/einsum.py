"""``einsum`` of two tensors, with any of their dims sharded.

Torch's own implementation flattens the batch, contracted and free dims into one dim each, of which only the first could
then be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.choice import choose
from shardcompile.ops.strategy import Strategy, along, partial
from shardcompile.ops.support.gather_log import log_replicated
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import layout_of, wrap
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import Layout

aten = torch.ops.aten


def _strategies(a: str, b: str, out: str) -> Iterable[Strategy]:
    for letter in dict.fromkeys(a + b):
        dims: list[int | None] = [x.index(letter) if letter in x else None for x in (a, b)]
        yield along(dims, [out.index(letter) if letter in out else "sum"])
    for op in ("sum", "avg"):
        yield partial([op, None], [op])
        yield partial([None, op], [op])


def contract(a: str, b: str, out: str, x: Tensor, y: Tensor) -> Sharded:
    """Returns ``torch.einsum("a,b->out", x, y)``, not differentiable.

    Args:
        a: the subscripts of `x`, each once.
        b: the subscripts of `y`, each once.
        out: the subscripts of the result; a subscript that is not in `out` is summed over.
        x: a sharded or plain tensor.
        y: a sharded or plain tensor; one of the two is sharded.
    """
    like = first_sharded([x, y])
    equation = f"{a},{b}->{out}"
    meta = global_meta(aten.einsum.default, (equation, [x, y]), {})
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    layouts = [layout_of(t, like._spec.layout.mesh) for t in (x, y)]

    def produced() -> list[int]:
        return [math.prod(map(compat.size_hint, shape)) * meta.dtype.itemsize]

    choice = choose(layouts, _strategies(a, b, out), 1, produced=produced)
    assert choice is not None, "replicating everything is always possible"
    log_replicated(aten.einsum.default, choice.plans)
    # Below `__torch_dispatch__` the lazy conjugate and negative bits of plain tensors are ignored.
    shards = [t._local_tensor if isinstance(t, Sharded) else t.resolve_conj().resolve_neg() for t in (x, y)]
    shards = [run_plan(plan, shard) for plan, shard in zip(choice.plans, shards, strict=True)]
    layout: Layout = choice.outputs[0].layout(layouts[0], shape, meta.dtype)
    return wrap(like, _local_einsum(a, b, out, *shards), layout, stride)


def _local_einsum(a: str, b: str, out: str, x: Tensor, y: Tensor) -> Tensor:
    """Returns ``einsum`` of local shards."""
    if type(x) is Tensor and type(y) is Tensor:
        return aten.einsum.default(f"{a},{b}->{out}", [x, y])
    # In a trace torch would guard on shard sizes of 0 or 1; a single `bmm` needs no such guard.
    batch = [c for c in a if c in b and c in out]
    contracted = [c for c in a if c in b and c not in out]
    left, right = [c for c in a if c not in b], [c for c in b if c not in a]
    size = dict(zip(b + a, (*y.shape, *x.shape), strict=True))

    def matrices(t: Tensor, letters: str, rows: list[str], columns: list[str]) -> Tensor:
        permuted = t.permute([letters.index(c) for c in (*batch, *rows, *columns)])
        shape = [math.prod([size[c] for c in group]) for group in (batch, rows, columns)]
        return aten.view.default(permuted.clone(memory_format=torch.contiguous_format), shape)

    product = aten.bmm.default(matrices(x, a, left, contracted), matrices(y, b, contracted, right))
    order = [*batch, *left, *right]
    return aten.view.default(product, [size[c] for c in order]).permute([order.index(c) for c in out])
