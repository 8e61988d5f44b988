"""Fetches data-dependent ranges of rows, one per rank: the keys that packed documents or a block mask need.

`ranges` is a rank-invariant table: rank r wants the rows from ranges[r, 0] to ranges[r, 1]. It is on the CPU, since the
host issues the messages.
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
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.ranges import RangePlan, fetch_wanted, return_wanted
from shardcompile.collectives.shards import Shards, shards_of
from shardcompile.collectives.traffic import even_exchange, of_any_rows
from shardcompile.collectives.transport import Range
from shardcompile.compat.own_ops import define_op
from shardcompile.errors import LayoutError
from shardcompile.sharding import GroupPartition, IntLike, Partition, write_group_partition
from shardcompile.sharding.codec import partition_schema

_ops = torch.ops.shardcompile


class DocumentRanges(NamedTuple):
    """Arguments of `fetch_document_ranges` and `return_document_ranges`.

    Attributes:
        input: the local shard; of a return the values for the rows that this rank wants.
        ranges: the table of ranges, see the module.
        total: global number of rows.
        shard: number of rows in this rank's result.
        partition: the partition of the rows.
        group_name: the process group.
    """

    input: Tensor
    ranges: Tensor
    total: IntLike
    shard: IntLike
    partition: GroupPartition
    group_name: str


def documents_of(ends: Tensor, total: int) -> list[Range]:
    """Returns the range of rows of each document that is not empty.

    Args:
        ends: cumulative document lengths: [documents + 1], from 0 to the number of rows, as flash attention's
            ``cu_seqlens``. Documents may be empty.
        total: the number of rows.

    Raises:
        LayoutError: `ends` does not run from 0 to the number of rows, decreases, or is not of an integer dtype.
    """
    if ends.ndim != 1 or ends.dtype.is_floating_point or ends.dtype.is_complex or ends.dtype is torch.bool:
        raise LayoutError(f"cu_seqlens must be [documents + 1] integers, got {tuple(ends.shape)} of {ends.dtype}")
    marks = ends.tolist()
    if len(marks) < 1 or marks[0] != 0 or marks[-1] != total or any(b < a for a, b in itertools.pairwise(marks)):
        shown = f"{marks[:4]} ... {marks[-4:]}" if len(marks) > 8 else str(marks)
        raise LayoutError(f"cu_seqlens must rise from 0 to the number of rows, {total}; got {shown}")
    return [(a, b) for a, b in itertools.pairwise(marks) if b > a]


def fetch_reached(
    rows: Tensor, ends: Tensor, causal: bool, partition: Partition, mesh: DeviceMesh
) -> tuple[Tensor, IntLike]:
    """Fetches the rows of all documents that the local shard has rows of. Differentiable.

    Args:
        rows: the local shard: [n, ...].
        ends: as for `documents_of`, rank-invariant.
        causal: whether a row attends only to itself and to rows before it. Rows after the local shard are not fetched
            then.
        partition: the partition of the rows, over one mesh dim.
        mesh: the mesh.

    Returns:
        The rows, and the global index of the first one.

    Raises:
        LayoutError: see `documents_of`.
        DivergenceError: documents are not the same on every rank.
    """
    held, group_name = _group(partition, mesh)
    ranges = _ops.ranges_of_documents(ends.detach(), causal, partition.size, *write_group_partition(held), group_name)
    return _fetch_rows(rows, ranges, partition, mesh)


def fetch_named(
    rows: Tensor, block_mask: Sequence[Any], of_query: Partition, partition: Partition, mesh: DeviceMesh
) -> tuple[Tensor, IntLike]:
    """Fetches the keys from the first to the last block that a block mask needs for the local queries. Differentiable.

    Args:
        rows: the local shard of keys: [n, ...].
        block_mask: as `BlockMask.as_tuple` returns it, rank-invariant.
        of_query: the partition of the query rows, over one mesh dim.
        partition: the partition of the keys, over the same mesh dim.
        mesh: the mesh.

    Returns:
        The rows, and the global index of the first one.

    Raises:
        DivergenceError: masks are not the same on every rank.
    """
    held, group_name = _group(of_query, mesh)
    counts, indices = ([x for x in block_mask[i:6:2] if x is not None] for i in (2, 3))  # of partial and of full blocks
    size = block_mask[-3:-1]
    ranges = _ops.ranges_of_shards(
        counts, indices, *size, of_query.size, partition.size, *write_group_partition(held), group_name
    )
    return _fetch_rows(rows, ranges, partition, mesh)


def _group(partition: Partition, mesh: DeviceMesh) -> tuple[GroupPartition, str]:
    (mesh_dim,) = partition.mesh_dims
    return partition.group_partition(compat.coordinate(mesh) or ()), compat.group_name_of(mesh, mesh_dim)


def _fetch_rows(rows: Tensor, ranges: Tensor, partition: Partition, mesh: DeviceMesh) -> tuple[Tensor, IntLike]:
    held, group_name = _group(partition, mesh)
    with compat.unrecorded_symbols(rows):
        first, count = _unbound_ints(_ops.local_range(ranges, group_name))
    torch._check(count >= 0)
    torch._check(first >= 0)
    compat.suggest_hint(count, -(-compat.size_hint(partition.size) // mesh.shape[partition.mesh_dims[0]]))
    return FETCH_DOCUMENT_RANGES.start(
        DocumentRanges(rows, ranges, partition.size, count, held, group_name)
    ).wait(), first


def _unbound_ints(x: Tensor) -> list[Any]:
    return [compat.keep_symbol(n.item()) if compat.is_fake(x) else int(n) for n in x.unbind()]


def _document_ranges(
    ends: Tensor, causal: bool, total: int, sizes: list[int], key: int, grouping: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    shards = shards_of(total, 0, GroupPartition(sizes, key, grouping), group.size(), "varlen_attention")
    documents = documents_of(ends, total)
    ranges = []
    for a, b in shards:
        overlapping = [d for d in documents if d[0] < b and d[1] > a] if b > a else []
        ranges.append((overlapping[0][0], b if causal else overlapping[-1][1]) if overlapping else (0, 0))
    return torch.tensor(ranges, dtype=torch.int64)


def _block_mask_ranges(
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
    """Converts the block indices of a block mask to the range of keys that each rank needs.

    `of_query` and `of_keys` are the block sizes of queries and keys.
    """
    group = compat.process_group(group_name)
    shards = shards_of(total, 0, GroupPartition(sizes, key, grouping), group.size(), "flex_attention")
    first, last = _first_and_last_blocks(counts, indices)
    ranges = []
    for a, b in shards:
        query_blocks = slice(a // of_query, -(-b // of_query)) if b > a else slice(0, 0)
        start = min((i for i in first[query_blocks] if i >= 0), default=0) * of_keys
        end = (max(last[query_blocks], default=-1) + 1) * of_keys
        ranges.append((min(start, keys), min(end, keys)) if end else (0, 0))
    return torch.tensor(ranges, dtype=torch.int64)


def _first_and_last_blocks(counts: list[Tensor], indices: list[Tensor]) -> tuple[list[int], list[int]]:
    """Returns the first and the last key block that any head needs, for each query block; -1 where there is none."""
    none = torch.iinfo(torch.int64).max
    first = torch.full(counts[0].shape[-1:], none)
    last = torch.full_like(first, -1)
    for count, index in zip(counts, indices, strict=True):
        used = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
        blocks = index.long()
        low, high = blocks.masked_fill(~used, none), blocks.masked_fill(~used, -1)
        first = torch.minimum(first, low.amin((0, 1, 3)).cpu())
        last = torch.maximum(last, high.amax((0, 1, 3)).cpu())
    return first.masked_fill(last < 0, -1).tolist(), last.tolist()


def _local_range(ranges: Tensor, group_name: str) -> Tensor:
    start, end = ranges[compat.process_group(group_name).rank()].tolist()
    return torch.tensor([start, end - start])


def _describe(
    kind: str, exchange: Callable[..., Exchange], adjoint: Callable[[], Descriptor[DocumentRanges]]
) -> Descriptor[DocumentRanges]:
    def run(a: DocumentRanges) -> Tensor:
        group = compat.process_group(a.group_name)
        held = shards_of(int(a.total), 0, a.partition, group.size(), kind)
        plan = RangePlan.of(held, Shards((i, j) for i, j in a.ranges.tolist()), group.rank())
        return exchange(kind, a.input, 0, plan, int(a.shard)).start(descriptor, a.group_name)

    descriptor: Descriptor[DocumentRanges] = Descriptor(
        kind,
        DocumentRanges,
        run,
        sizes=lambda a: {0: a.shard},
        adjoint=lambda a, shape, grad: adjoint().start(a._replace(input=grad, shard=shape[0])).wait(),
        members=lambda a, n: [of_any_rows(a.input)],
        traffic=even_exchange,
        states=("dim", "shard sizes", "to dim", "ranges", "other sizes"),
        of_one_rank=True,
    )
    return descriptor


FETCH_DOCUMENT_RANGES = _describe("fetch_document_ranges", fetch_wanted, lambda: RETURN_DOCUMENT_RANGES)
RETURN_DOCUMENT_RANGES: Descriptor[DocumentRanges] = _describe(
    "return_document_ranges", return_wanted, lambda: FETCH_DOCUMENT_RANGES
)


def _fake_ranges(*rest: Any) -> Tensor:
    ranks = compat.process_group(rest[-1]).size()
    return torch.empty([ranks, 2], dtype=torch.int64, device="cpu")


define_op(
    f"ranges_of_documents(Tensor ends, bool causal, SymInt total, {partition_schema()}, str group_name) -> Tensor",
    _document_ranges,
    _fake_ranges,
)
define_op(
    "ranges_of_shards(Tensor[] counts, Tensor[] indices, SymInt of_query, SymInt of_keys, SymInt total, SymInt keys, "
    f"{partition_schema()}, str group_name) -> Tensor",
    _block_mask_ranges,
    _fake_ranges,
)
define_op(
    "local_range(Tensor ranges, str group_name) -> Tensor",
    _local_range,
    lambda *_: torch.empty([2], dtype=torch.int64, device="cpu"),
)
