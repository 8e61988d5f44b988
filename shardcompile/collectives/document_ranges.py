"""Ranges of rows that a tensor says, one for each rank: those around its shard that packed documents reach.

`spans` is a table, the same on every rank of a group: rank r wants the rows from spans[r, 0] to spans[r, 1]. It lies on
the CPU, since messages are sent from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.ranges import fetch_wanted, return_wanted
from shardcompile.collectives.shards import shards_of
from shardcompile.collectives.traffic import even_exchange, of_any_rows
from shardcompile.collectives.transport import Range
from shardcompile.errors import LayoutError
from shardcompile.sharding import GroupPartition, IntLike, Partition, write_partition
from shardcompile.sharding.arguments import partition_schema

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
for _schema in (
    f"spans_of_documents(Tensor ends, bool causal, SymInt total, {partition_schema()}, str group_name) -> Tensor",
    "spans_of_shards(Tensor[] counts, Tensor[] indices, SymInt of_query, SymInt of_keys, SymInt total, SymInt keys, "
    f"{partition_schema()}, str group_name) -> Tensor",
    "rows_of_span(Tensor spans, str group_name) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)

_ops = torch.ops.shardcompile


class Spans(NamedTuple):
    """Arguments of `fetch_spans` and `return_spans`.

    Attributes:
        input: this rank's local shard; of a return what belongs to the rows that it wants.
        spans: see above.
        total: how many rows there are.
        shard: how many rows this rank gets.
        sharded: the shards that ranks hold.
        group_name: the ranks.
    """

    input: Tensor
    spans: Tensor
    total: IntLike
    shard: IntLike
    partition: GroupPartition
    group_name: str


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


def fetch_reached(
    rows: Tensor, ends: Tensor, causal: bool, partition: Partition, mesh: DeviceMesh
) -> tuple[Tensor, IntLike]:
    """The rows of all documents of which a rank has some: of a causal mask none behind its own. Differentiable.

    Args:
        rows: this rank's local shard: [n, ...].
        ends: as for `documents_of`, the same on every rank.
        causal: whether a row reaches only those in front of it.
        sharded: of the rows, over one mesh dim.
        mesh: the mesh.

    Returns:
        The rows, and the number of the first one in the whole dim.

    Raises:
        LayoutError: see `documents_of`.
        DivergenceError: documents are not the same on every rank.
    """
    held, group_name = _group(partition, mesh)
    spans = _ops.spans_of_documents(ends.detach(), causal, partition.size, *write_partition(held), group_name)
    return _fetch_rows(rows, spans, partition, mesh)


def fetch_named(
    rows: Tensor, block_mask: Sequence[Any], of_query: Partition, partition: Partition, mesh: DeviceMesh
) -> tuple[Tensor, IntLike]:
    """The rows of keys from the first to the last shard that a shard mask names for a rank's queries. Differentiable.

    Args:
        rows: this rank's local shard of keys: [n, ...].
        block_mask: as `BlockMask.as_tuple` gives it, the same on every rank.
        of_query: sharded of the query's rows, over one mesh dim.
        sharded: of the keys, over the same one.
        mesh: the mesh.

    Returns:
        The rows, and the number of the first one in the whole dim.

    Raises:
        DivergenceError: masks are not the same on every rank.
    """
    held, group_name = _group(of_query, mesh)
    counts, indices = ([x for x in block_mask[i:6:2] if x is not None] for i in (2, 3))  # of partial and of full shards
    size = block_mask[-3:-1]
    spans = _ops.spans_of_shards(
        counts, indices, *size, of_query.size, partition.size, *write_partition(held), group_name
    )
    return _fetch_rows(rows, spans, partition, mesh)


def _group(partition: Partition, mesh: DeviceMesh) -> tuple[GroupPartition, str]:
    (mesh_dim,) = partition.mesh_dims
    return partition.group_ref(compat.coordinate(mesh) or ()), compat.group_name_of(mesh, mesh_dim)


def _fetch_rows(rows: Tensor, spans: Tensor, partition: Partition, mesh: DeviceMesh) -> tuple[Tensor, IntLike]:
    held, group_name = _group(partition, mesh)
    with compat.unrecorded_symbols(rows):
        first, count = _numbers(_ops.rows_of_span(spans, group_name))
    torch._check(count >= 0)
    torch._check(first >= 0)
    compat.suggest_hint(count, -(-compat.size_hint(partition.size) // mesh.shape[partition.mesh_dims[0]]))
    return FETCH_SPANS.start(Spans(rows, spans, partition.size, count, held, group_name)).wait(), first


def _numbers(x: Tensor) -> list[Any]:
    return [compat.keep_symbol(n.item()) if compat.is_fake(x) else int(n) for n in x.unbind()]


def _spans_of_documents(
    ends: Tensor, causal: bool, total: int, sizes: list[int], key: int, grouping: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    shards = shards_of(total, 0, GroupPartition(sizes, key, grouping), group.size(), "varlen_attention")
    documents = documents_of(ends, total)
    spans = []
    for a, b in shards:
        of_shard = [d for d in documents if d[0] < b and d[1] > a] if b > a else []
        spans.append((of_shard[0][0], b if causal else of_shard[-1][1]) if of_shard else (0, 0))
    return torch.tensor(spans, dtype=torch.int64)


def _spans_of_shards(
    counts: list[Tensor],
    indices: list[Tensor],
    of_query: int,
    of_keys: int,
    total: int,
    keys: int,
    sizes: list[int],
    key: int,
    grouping: list[int],
    group_name: str,
) -> Tensor:
    """From how many shards of keys rows of shards see, and which, to the rows of keys that ranks need."""
    group = compat.process_group(group_name)
    shards = shards_of(total, 0, GroupPartition(sizes, key, grouping), group.size(), "flex_attention")
    first, last = _ends_of_shards(counts, indices)
    spans = []
    for a, b in shards:
        seen = slice(a // of_query, -(-b // of_query)) if b > a else slice(0, 0)
        start = min((i for i in first[seen] if i >= 0), default=0) * of_keys
        end = (max(last[seen], default=-1) + 1) * of_keys
        spans.append((min(start, keys), min(end, keys)) if end else (0, 0))
    return torch.tensor(spans, dtype=torch.int64)


def _ends_of_shards(counts: list[Tensor], indices: list[Tensor]) -> tuple[list[int], list[int]]:
    """By shard of queries the first and the last shard of keys that any head sees; -1 where there is none."""
    none = torch.iinfo(torch.int64).max
    first = torch.full(counts[0].shape[-1:], none)
    last = torch.full_like(first, -1)
    for count, index in zip(counts, indices, strict=True):
        named = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
        where = index.long()
        low, high = where.masked_fill(~named, none), where.masked_fill(~named, -1)
        first = torch.minimum(first, low.amin((0, 1, 3)).cpu())
        last = torch.maximum(last, high.amax((0, 1, 3)).cpu())
    return first.masked_fill(last < 0, -1).tolist(), last.tolist()


def _rows_of_span(spans: Tensor, group_name: str) -> Tensor:
    start, end = spans[compat.process_group(group_name).rank()].tolist()
    return torch.tensor([start, end - start])


def _held_and_wanted(a: Spans, what: str) -> tuple[list[Range], list[Range]]:
    ranks = compat.process_group(a.group_name).size()
    return shards_of(int(a.total), 0, a.partition, ranks, what), [(i, j) for i, j in a.spans.tolist()]


def _fetch(a: Spans) -> Tensor:
    group, (held, wanted) = compat.process_group(a.group_name), _held_and_wanted(a, "fetch_spans")
    exchange = fetch_wanted(FETCH_SPANS.kind, a.input, 0, held, wanted, int(a.shard), group)
    return exchange.start(FETCH_SPANS, a.group_name)


def _return(a: Spans) -> Tensor:
    group, (held, wanted) = compat.process_group(a.group_name), _held_and_wanted(a, "return_spans")
    exchange = return_wanted(RETURN_SPANS.kind, a.input, 0, held, wanted, int(a.shard), group)
    return exchange.start(RETURN_SPANS, a.group_name)


def _adjoint(of: Callable[[], Descriptor[Spans]]) -> Callable[[Spans, torch.Size, Tensor], Tensor]:
    def adjoint(a: Spans, shape: torch.Size, grad: Tensor) -> Tensor:
        return of().start(a._replace(input=grad, shard=shape[0])).wait()

    return adjoint


FETCH_SPANS: Descriptor[Spans] = Descriptor(
    "fetch_spans",
    Spans,
    _fetch,
    sizes=lambda a: {0: a.shard},
    adjoint=_adjoint(lambda: RETURN_SPANS),
    members=lambda a, n: [of_any_rows(a.input, a.shard)],
    traffic=even_exchange,
    states=("dim", "sharded of", "to dim", "in", "other sizes"),
    of_one_rank=True,
)

RETURN_SPANS: Descriptor[Spans] = Descriptor(
    "return_spans",
    Spans,
    _return,
    sizes=lambda a: {0: a.shard},
    adjoint=_adjoint(lambda: FETCH_SPANS),
    members=lambda a, n: [of_any_rows(a.input, a.shard)],
    traffic=even_exchange,
    states=("dim", "sharded of", "to dim", "in", "other sizes"),
    of_one_rank=True,
)

_LIBRARY.impl("spans_of_documents", _spans_of_documents, "CompositeExplicitAutograd")
_LIBRARY.impl("spans_of_shards", _spans_of_shards, "CompositeExplicitAutograd")
_LIBRARY.impl("rows_of_span", _rows_of_span, "CompositeExplicitAutograd")


def _fake_spans(*rest: Any) -> Tensor:
    ranks = compat.process_group(rest[-1]).size()
    return torch.empty([ranks, 2], dtype=torch.int64, device="cpu")


for _name in ("spans_of_documents", "spans_of_shards"):
    torch.library.register_fake(f"shardcompile::{_name}", _fake_spans, lib=_LIBRARY)
torch.library.register_fake(
    "shardcompile::rows_of_span", lambda *_: torch.empty([2], dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
