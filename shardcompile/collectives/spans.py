"""Ranges of rows that a tensor says, one for each rank: those around its block that packed documents reach.

`spans` is a table, the same on every rank of a group: rank r wants the rows from spans[r, 0] to spans[r, 1]. It lies on
the CPU, since messages are sent from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.ops import Pending, blocks_of, fetch_wanted, return_wanted
from shardcompile.collectives.transport import Range
from shardcompile.errors import LayoutError
from shardcompile.layout import Cut, IntLike

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
_CUT = "SymInt[] sizes, SymInt key, int[] nest"
for _schema in (
    f"spans_of_documents(Tensor ends, bool causal, SymInt total, {_CUT}, str group_name) -> Tensor",
    "rows_of_span(Tensor spans, str group_name) -> Tensor",
    f"fetch_spans(Tensor input, Tensor spans, SymInt total, SymInt block, {_CUT}, str group_name) -> Tensor",
    f"return_spans(Tensor input, Tensor spans, SymInt total, SymInt block, {_CUT}, str group_name) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)

_ops = torch.ops.shardcompile
SPANS = (_ops.fetch_spans, _ops.return_spans)
"""The ops of this module that communicate."""


def documents_of(ends: Tensor, total: int) -> list[Range]:
    """The rows of each document.

    Args:
        ends: where documents begin and end: [documents + 1], from 0 to the number of rows, as flash attention's
            ``cu_seqlens``. Documents may be empty.
        total: the number of rows.

    Raises:
        LayoutError: it does not run from 0 to the number of rows, falls, or holds no whole numbers.
    """
    if ends.ndim != 1 or ends.dtype.is_floating_point or ends.dtype.is_complex or ends.dtype is torch.bool:
        raise LayoutError(f"cu_seqlens is [documents + 1] whole numbers, got {tuple(ends.shape)} of {ends.dtype}")
    marks = ends.tolist()
    if len(marks) < 1 or marks[0] != 0 or marks[-1] != total or any(b < a for a, b in itertools.pairwise(marks)):
        shown = f"{marks[:4]} ... {marks[-4:]}" if len(marks) > 8 else str(marks)
        raise LayoutError(f"cu_seqlens rises from 0 to the number of rows, {total}; got {shown}")
    return [(a, b) for a, b in itertools.pairwise(marks) if b > a]


def fetch_reached(rows: Tensor, ends: Tensor, causal: bool, cut: Cut, mesh: DeviceMesh) -> tuple[Tensor, IntLike]:
    """The rows of all documents of which a rank has some: of a causal mask none behind its own. Differentiable.

    Args:
        rows: this rank's block: [n, ...].
        ends: as for `documents_of`, the same on every rank.
        causal: whether a row reaches only those in front of it.
        cut: of the rows, over one mesh dim.
        mesh: the mesh.

    Returns:
        The rows, and the number of the first one in the whole dim.

    Raises:
        LayoutError: see `documents_of`.
        DivergenceError: documents are not the same on every rank.
    """
    (mesh_dim,) = cut.mesh_dims
    held = cut.group_ref(compat.coordinate(mesh) or ())
    of_cut = (cut.extent, held.sizes, held.key, held.nest)
    group_name = compat.group_name_of(mesh, mesh_dim)
    spans = _ops.spans_of_documents(ends.detach(), causal, *of_cut, group_name)
    with compat.unrecorded_symbols(rows):
        first, count = _numbers(_ops.rows_of_span(spans, group_name))
    torch._check(count >= 0)
    torch._check(first >= 0)
    compat.suggest_hint(count, -(-compat.size_hint(cut.extent) // mesh.shape[mesh_dim]))
    flat = _ops.fetch_spans(rows, spans, of_cut[0], count, *of_cut[1:], group_name)
    return Pending.of(flat, rows.shape, 0, count).wait(), first


def _numbers(x: Tensor) -> list[Any]:
    return [compat.keep_symbol(n.item()) if compat.is_fake(x) else int(n) for n in x.unbind()]


def _spans_of_documents(
    ends: Tensor, causal: bool, total: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    blocks = blocks_of(total, 0, (sizes, key, nest), group.size(), "varlen_attention")
    documents = documents_of(ends, total)
    spans = []
    for a, b in blocks:
        of_block = [d for d in documents if d[0] < b and d[1] > a] if b > a else []
        spans.append((of_block[0][0], b if causal else of_block[-1][1]) if of_block else (0, 0))
    return torch.tensor(spans, dtype=torch.int64)


def _rows_of_span(spans: Tensor, group_name: str) -> Tensor:
    start, end = spans[compat.process_group(group_name).rank()].tolist()
    return torch.tensor([start, end - start])


def _table(spans: Tensor) -> list[Range]:
    return [(a, b) for a, b in spans.tolist()]


def _fetch_spans(
    x: Tensor, spans: Tensor, total: int, block: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    held = blocks_of(total, 0, (sizes, key, nest), group.size(), "fetch_spans")
    return fetch_wanted(x, 0, held, _table(spans), block, group, "fetch_spans")


def _return_spans(
    x: Tensor, spans: Tensor, total: int, block: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    held = blocks_of(total, 0, (sizes, key, nest), group.size(), "return_spans")
    return return_wanted(x, 0, held, _table(spans), block, group, "return_spans")


def _fake_rows(x: Tensor, spans: Tensor, total: Any, block: Any, *_: Any) -> Tensor:
    return x.new_empty([math.prod([block, *x.shape[1:]])])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, spans, ctx.total, ctx.block, *ctx.rest = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(spans)


def _adjoint(op: Any) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (spans,) = ctx.saved_tensors
        rows = Pending.of(grad, ctx.shape, 0, ctx.block).result()
        flat = op(rows, spans, ctx.total, ctx.shape[0], *ctx.rest)
        return (Pending.of(flat, ctx.shape, 0, ctx.shape[0]).wait(), None, None, None, *[None] * len(ctx.rest))

    return backward


for _name, _real in (("fetch_spans", _fetch_spans), ("return_spans", _return_spans)):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _traced = compat.lowered_when_traced(getattr(_ops, _name).default, _fake_rows)
    torch.library.register_fake(f"shardcompile::{_name}", _traced, lib=_LIBRARY)
for _name, _back in (("fetch_spans", _ops.return_spans), ("return_spans", _ops.fetch_spans)):
    torch.library.register_autograd(f"shardcompile::{_name}", _adjoint(_back), setup_context=_keep, lib=_LIBRARY)
_LIBRARY.impl("spans_of_documents", _spans_of_documents, "CompositeExplicitAutograd")
_LIBRARY.impl("rows_of_span", _rows_of_span, "CompositeExplicitAutograd")


def _fake_spans(ends: Tensor, *rest: Any) -> Tensor:
    ranks = compat.process_group(rest[-1]).size()
    return torch.empty([ranks, 2], dtype=torch.int64, device="cpu")


torch.library.register_fake("shardcompile::spans_of_documents", _fake_spans, lib=_LIBRARY)
torch.library.register_fake(
    "shardcompile::rows_of_span", lambda *_: torch.empty([2], dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
compat.count_as_collective(SPANS)
