"""Data-dependent exchange of rows: gathers the counts, derives the new partition, and moves the rows.

`counts` is a rank-invariant table: counts[s, d] rows go from rank s to rank d. It is on the CPU, since the host issues
the messages. Rows to send are ordered by destination; received rows are ordered by source.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.pending import wait
from shardcompile.collectives.routing_statistics import note_rows
from shardcompile.collectives.traffic import (
    Load,
    Member,
    Traffic,
    even_exchange,
    even_gather,
    exchanged_in_a_bucket,
    is_number,
    of_any_rows,
)
from shardcompile.compat.own_ops import define_op
from shardcompile.diagnosis import Call, enter
from shardcompile.errors import CollectiveError, LayoutError, RowRangeError
from shardcompile.sharding import GroupPartition, IntLike, Partition, digest_of, write_group_partition
from shardcompile.sharding.codec import partition_schema

_NOMINAL_ROWS = 64

_OUT_OF_RANGE = -(2**62)
"""Added to an out-of-range index, and sent in place of each count of a rank that has one."""
_FAR = 2**61
"""Out-of-range indices are clamped to this magnitude."""

_ops = torch.ops.shardcompile


class GatherCounts(NamedTuple):
    """Arguments of the op `gather_counts`; see the function.

    Attributes:
        input: this rank's counts.
        wanted: for the message.
        group_name: the process group.
    """

    input: Tensor
    wanted: str
    group_name: str


class ExchangeRows(NamedTuple):
    """Arguments of the op `exchange_rows`; see the function.

    Attributes:
        inputs: payloads, with rows ordered by destination.
        counts: the table of counts.
        shard: number of rows that this rank receives.
        back: whether rows take the reverse direction.
        group_name: the process group.
    """

    inputs: list[Tensor]
    counts: Tensor
    shard: IntLike
    back: bool
    group_name: str


def gather_counts(mine: Tensor, group_name: str, wanted: str = "counts are not negative") -> Tensor:
    """Gathers the counts of all ranks of a group: [ranks, k], int64, on the CPU.

    Args:
        mine: this rank's counts: [k]; for an exchange the number of rows that it sends to each rank. May be encoded by
            `counts_in_range`.
        group_name: the process group.
        wanted: the condition that an out-of-range index violates, for the message.

    Raises:
        RowRangeError: on every rank, if `counts_in_range` found an out-of-range index on some rank.
    """
    return wait(GATHER_COUNTS.packet(mine, wanted, group_name))


def counts_in_range(counts: Tensor, numbers: Tensor, bad: Tensor) -> Tensor:
    """Returns counts for `gather_counts`; if an index is out of range, an encoding of the index in their place.

    Every rank learns of the error from the gathered counts, without a collective of its own.

    Args:
        counts: number of rows for each rank: [k], int64.
        numbers: the indices that were counted: [n], int64.
        bad: which of them are out of range: [n], bool.
    """
    candidates = torch.where(bad, numbers.clamp(-_FAR, _FAR), -_FAR - 1)
    return torch.where(bad.any(), torch.constant_pad_nd(candidates, [0, 1], -_FAR - 1).amax() + _OUT_OF_RANGE, counts)


def exchange_rows(
    inputs: Sequence[Tensor], counts: Tensor, shard: IntLike, group_name: str, *, back: bool = False
) -> list[Tensor]:
    """Exchanges rows between ranks, those of all tensors in one message per peer. Differentiable.

    Args:
        inputs: payloads of any dtypes, each [n, ...], with rows ordered by destination.
        counts: as `gather_counts` returns it.
        shard: number of rows that this rank receives.
        group_name: the process group.
        back: whether to take the reverse direction: rows ordered by their source are sent back to it.

    Returns:
        The received rows of each payload, ordered by sending rank: [shard, ...].

    Raises:
        CollectiveError: the number of rows differs from that in `counts`.
    """
    flat = EXCHANGE_ROWS.packet(list(inputs), counts, shard, back, group_name)
    return [wait(f).view([shard, *x.shape[1:]]) for f, x in zip(flat, inputs, strict=True)]


def rows_from(counts: Tensor, group_name: str) -> Tensor:
    """Returns the number of rows that this rank receives from each rank: ``counts[:, rank]``, [ranks, ...].

    An op, since a graph must not depend on the rank.
    """
    return _ops.rows_from(counts, group_name)


def shard_starts(partition: Partition, mesh: DeviceMesh) -> Tensor:
    """Returns the first row of each shard of a partition over one mesh dim: [ranks], int64, on the CPU.

    An op, since a graph knows only the local shard size.
    """
    (mesh_dim,) = partition.mesh_dims
    ref = partition.group_partition(compat.coordinate(mesh) or ())
    group_name = compat.group_name_of(mesh, mesh_dim)
    return _ops.shard_starts(partition.size, *write_group_partition(ref), group_name)


def partition_of_sizes(
    sizes: Tensor,
    mesh: DeviceMesh,
    mesh_dims: Sequence[int],
    dim_size: IntLike | None = None,
    shard: IntLike | None = None,
    about: IntLike | None = None,
) -> Partition:
    """Returns the partition whose shard sizes a tensor holds; inside a trace they are unbacked.

    Args:
        sizes: all shard sizes, outermost mesh dim slowest, rank-invariant; integers.
        mesh: the mesh.
        mesh_dims: the mesh dims of the partition, outermost first.
        dim_size: the global size that the sizes must add up to; any if None.
        shard: the local shard size, if it is known.
        about: hint of the global size, for the compiler and the cost model.

    Raises:
        LayoutError: the sizes do not add up to `dim_size`, a size is negative, their number is wrong, or that of this
            rank is not `shard`.
    """
    parts = [mesh.shape[m] for m in mesh_dims]
    if sizes.dtype.is_floating_point or sizes.dtype.is_complex or sizes.dtype is torch.bool or sizes.ndim != 1:
        raise LayoutError(
            f"shard sizes are integers, one for each of {math.prod(parts)} shards; got a tensor of "
            f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        )
    groups = ",".join(compat.group_name_of(mesh, m) for m in mesh_dims)
    wanted, local_size = (-1 if n is None else n for n in (dim_size, shard))
    if not compat.is_fake(sizes):
        return _checked_partition(sizes, mesh_dims, parts, wanted, local_size, groups)[0]
    total, key, size = _ops.partition_of_sizes(sizes.detach(), parts, wanted, local_size, groups).unbind()
    symbol = compat.keep_symbol(key.item())
    dim_size = compat.keep_symbol(total.item()) if dim_size is None else dim_size
    shard = compat.keep_symbol(size.item()) if shard is None else shard
    torch._check(shard >= 0)
    torch._check(dim_size >= shard)
    hint = compat.size_hint(dim_size if about is None else about)
    compat.suggest_hint(dim_size, hint)
    compat.suggest_hint(shard, -(-hint // math.prod(parts)))
    return Partition.traced(mesh_dims, parts, dim_size, symbol, shard)


def first_rows(x: Tensor, count: IntLike) -> Tensor:
    """Returns a copy of the first rows of a tensor.

    Args:
        x: [n, ...].
        count: number of rows, at most n; may be an unbacked symbol.
    """
    # A static n may be a local shard size. A bound on `count` would then hold on this rank only: if n is 0, the
    # compiler would take `count` for 0 on all ranks.
    unbounded = isinstance(x.shape[0], int) and not isinstance(count, int)
    if not unbounded:
        torch._check(count <= x.shape[0])
    if unbounded or compat.is_unbacked(x.shape[0]):  # for an unbacked n, the length of a slice would be a formula
        return x.index_select(0, torch.arange(count, device=x.device))  # type: ignore[arg-type]
    return x.narrow(0, 0, count).clone()


def _checked_partition(
    sizes: Tensor, mesh_dims: Sequence[int], parts: Sequence[int], size: object, shard: object, group_names: str
) -> tuple[Partition, int]:
    """Returns a partition and its local shard size, after checking them. Sizes that are not known are -1."""
    partition = Partition.of_sizes(mesh_dims, parts, sizes.tolist())
    if size not in (-1, partition.size):
        raise LayoutError(
            f"shard sizes {list(partition.sizes)} add up to {partition.size}, but the dim has size {size}"
        )
    index = 0
    for count, name in zip(parts, group_names.split(","), strict=True):
        index = index * count + compat.process_group(name).rank()
    if shard not in (-1, partition.sizes[index]):
        raise LayoutError(
            f"this rank's local shard has {shard} rows; shard sizes {list(partition.sizes)} say "
            f"{partition.sizes[index]}"
        )
    return partition, partition.sizes[index]


def _partition_of_sizes(sizes: Tensor, parts: list[int], dim_size: int, shard: int, group_names: str) -> Tensor:
    """Returns global size, key and local shard size: [3], int64, on the CPU."""
    partition, size = _checked_partition(sizes, range(len(parts)), parts, dim_size, shard, group_names)
    return torch.tensor([partition.size, partition.trace.key, size], device="cpu")


def _shard_starts(total: int, sizes: list[int], key: int, grouping: list[int], group_name: str) -> Tensor:
    ranks = compat.process_group(group_name).size()
    shards = GroupPartition(sizes, key, grouping).shards(total, ranks)
    return torch.tensor([a for a, _ in transport.running_ends(shards)], device="cpu")


def _fake_starts(total: int, sizes: list[int], key: int, grouping: list[int], group_name: str) -> Tensor:
    return torch.empty([compat.process_group(group_name).size()], dtype=torch.int64, device="cpu")


def _gather_counts(a: GatherCounts) -> Tensor:
    group, mine = compat.process_group(a.group_name), a.input
    call = GATHER_COUNTS.enter(group, mine.dtype, group.size())
    call.agree()
    pending = torch.ops._c10d_functional.all_gather_into_tensor(mine, group.size(), a.group_name)
    counts: Tensor = call.run([functools.partial(wait, pending)])[0].view(group.size(), mine.shape[0]).cpu()
    table = counts[:, : group.size()]  # a table of counts may have further columns
    _known_tables(a.group_name, table.shape[1])[_digest(table)] = None
    check_not_negative(counts[:, 0], a.wanted, _OUT_OF_RANGE)
    return counts


def check_not_negative(numbers: Tensor, wanted: str, offset: int = 0) -> None:
    """Raises an error that names the ranks whose number is negative.

    Args:
        numbers: one of each rank of the group, on the CPU: [ranks].
        wanted: the condition that a negative number violates, for the message.
        offset: what was added to an index that is out of range.

    Raises:
        RowRangeError: a number is negative.
    """
    if int(numbers.min()) < 0:
        bad = [(rank, number - offset) for rank, number in enumerate(numbers.tolist()) if number < 0]
        others = ", ".join(f"rank {rank} of the group has {index}" for rank, index in bad)
        raise RowRangeError(f"{wanted}; {others}. No row was moved")


_KNOWN = 256
_TABLES: dict[tuple[str, int], OrderedDict[int, None]] = {}
compat.forget_with_world(_TABLES.clear)


def _known_tables(group_name: str, columns: int) -> OrderedDict[int, None]:
    """Returns the digests of the tables that a group has gathered last, which are rank-invariant."""
    known = _TABLES.setdefault((group_name, columns), OrderedDict())
    while len(known) > _KNOWN:
        known.popitem(last=False)
    return known


def _digest(counts: Tensor) -> int:
    """Hashes a table of counts to 56 bits, the same in every process.

    Each row is hashed to its product with fixed 64-bit weights, modulo 2 ** 64, as in multilinear hashing (Lemire,
    Kaser, "Strongly universal string hashing is fast", 2014): the table has the square of the number of ranks.
    """
    return digest_of(counts.mv(_weights(counts.shape[1])).numpy().tobytes())


@functools.cache
def _weights(columns: int) -> Tensor:
    return torch.tensor([digest_of(f"weight {n}") * 256 + 1 - 2**63 for n in range(columns)], device="cpu")


def _peers(counts: Tensor, back: bool, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """Returns the number of rows that this rank sends to each rank, and receives from each."""
    if tuple(counts.shape) != (group.size(), group.size()):
        raise CollectiveError(
            f"exchange_rows: the table of counts is {list(counts.shape)}, but the group has {group.size()} ranks"
        )
    sent, received = counts[group.rank()].tolist(), counts[:, group.rank()].tolist()
    return (received, sent) if back else (sent, received)


def _exchange_rows(a: ExchangeRows) -> list[Tensor]:
    group, inputs, shard = compat.process_group(a.group_name), a.inputs, int(a.shard)
    sent, received = _peers(a.counts, a.back, group)
    for x in inputs:
        if x.shape[0] != sum(sent) or shard != sum(received):
            raise CollectiveError(
                f"exchange_rows: rank {group.rank()} of the group has {x.shape[0]} rows (shape {tuple(x.shape)}) and "
                f"expects {shard}; by the table of counts it sends {sum(sent)} and receives {sum(received)}"
            )
    note_rows(group, inputs, a.counts, a.back)
    if int(a.counts.sum()) == int(a.counts.trace()):  # no rank sends a row to another one, as all of them see
        return [x.clone(memory_format=torch.contiguous_format).view(-1) for x in inputs]
    outs = [x.new_empty([shard * math.prod(x.shape[1:])]) for x in inputs]
    if len(inputs) == 1:
        target = outs[0].view([shard, *inputs[0].shape[1:]])
        call, works = _start(
            group, inputs, transport.rows_first(inputs[0], 0), sent, target, received, a.counts, a.back
        )
        transport.complete(outs, call, works)
        return outs
    rows = [_bytes(transport.rows_first(x, 0)) for x in inputs]
    packed = torch.cat([r[a:b].reshape(-1) for a, b in transport.running_ends(sent) for r in rows])
    widths = [r.shape[1] for r in rows]
    memory = scratch.borrow(shard * sum(widths), packed)
    lengths = [[n * sum(widths) for n in peers] for peers in (sent, received)]
    call, works = _start(group, inputs, packed, lengths[0], memory, lengths[1], a.counts, a.back)

    def unpack() -> None:
        shares = zip(memory.split(lengths[1]), received, strict=True)
        parts = [share.split([n * w for w in widths]) for share, n in shares]
        for out, of_peers in zip(outs, zip(*parts, strict=True), strict=True):
            torch.cat(of_peers, out=out.view(torch.uint8))
        scratch.give_back(memory)

    transport.complete(outs, call, works, unpack)
    return outs


def _start(
    group: ProcessGroup,
    inputs: Sequence[Tensor],
    packed: Tensor,
    sent: list[int],
    out: Tensor,
    received: list[int],
    counts: Tensor,
    back: bool,
) -> tuple[Call, list[Work]]:
    """Starts to send ranges of `packed` and to receive ranges of `out`, of `sent` and `received` rows.

    A backend's own all-to-all has no tags: a rank with another table would misinterpret messages. So it is used only
    for tables that the group has gathered, which are rank-invariant. Other exchanges are messages with tags derived
    from the table.
    """
    row = digest_of(repr(tuple((str(x.dtype), *x.shape[1:]) for x in inputs)))
    table = _digest(counts)
    if table in _known_tables(group.group_name, counts.shape[1]) and transport.transport_of(group).has_all_to_all:
        call = enter(group, EXCHANGE_ROWS.kind, inputs[0].dtype, ("row digest",), row)
        return call, transport.transport_of(group).all_to_all(call, packed, sent, out, received)
    arriving = tuple(counts.sum(1 if back else 0).tolist())
    call = EXCHANGE_ROWS.enter(group, inputs[0].dtype, arriving, table, row)
    ends = transport.running_ends
    return call, transport.send_ranges(call, packed, ends(sent), out, ends(received))


def _bytes(rows: Tensor) -> Tensor:
    """Returns rows as bytes: [n, width]."""
    return transport.as_bytes(rows).view(rows.shape[0], math.prod(rows.shape[1:]) * rows.itemsize)


def _rows_from(counts: Tensor, group_name: str) -> Tensor:
    return counts[:, compat.process_group(group_name).rank()].clone()


def _fake_exchange(a: ExchangeRows) -> list[Tensor]:
    return [x.new_empty([a.shard * math.prod(x.shape[1:])]) for x in a.inputs]


def _load(members: Sequence[Member], n: int) -> Load:
    """Returns the load, estimated as if all ranks send as much as this one."""
    return Load(np.full([2, n], (n - 1) / n * sum(m.nbytes for m in members)))


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic to other ranks, with packing where several tensors share a message."""
    return even_exchange(members, n) if len(members) == 1 else exchanged_in_a_bucket(_load(members, n))


def _fake_counts(a: GatherCounts) -> Tensor:
    ranks = compat.process_group(a.group_name).size()
    return torch.empty([ranks, a.input.shape[0]], dtype=torch.int64, device="cpu")


def _whole(a: ExchangeRows) -> object:
    """Returns the bytes of all ranks, estimated from a symbolic number of rows, whose hint is rank-invariant.

    An int would be the number of rows of this rank only.
    """
    rows = next((n for n in (a.inputs[0].shape[0], a.shard) if not is_number(n)), _NOMINAL_ROWS)
    width = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in a.inputs)
    return compat.process_group(a.group_name).size() * rows * width


def _exchange_adjoint(
    a: ExchangeRows, shapes: Sequence[torch.Size], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    # Autograd passes zeros for integer payloads, such as the indices of experts: they need no exchange.
    wanted = [(i, g) for i, g in enumerate(grads) if g is not None and (g.is_floating_point() or g.is_complex())]
    pairs = [(i, g.view([a.shard, *shapes[i][1:]])) for i, g in wanted]
    out: list[Tensor | None] = [None] * len(grads)
    returned = exchange_rows([g for _, g in pairs], a.counts, shapes[0][0], a.group_name, back=not a.back)
    for (i, _), grad in zip(pairs, returned, strict=True):
        out[i] = grad
    return out


GATHER_COUNTS = Descriptor(
    "gather_counts",
    GatherCounts,
    _gather_counts,
    fake=_fake_counts,
    traffic=even_gather,
    states=("ranks",),
    of_one_rank=True,
    moves_rows=False,
)

EXCHANGE_ROWS = Descriptor(
    "exchange_rows",
    ExchangeRows,
    _exchange_rows,
    fake=_fake_exchange,
    adjoint=_exchange_adjoint,
    members=lambda a, n: [of_any_rows(x) for x in a.inputs],
    traffic=_traffic,
    whole=_whole,
    joins=Joins("exchange_rows", load=_load),
    states=("rows", "counts digest", "row digest"),
    of_one_rank=True,
    returns="Tensor[]",
)

define_op(
    "rows_from(Tensor counts, str group_name) -> Tensor",
    _rows_from,
    lambda counts, _: counts.new_empty([counts.shape[0], *counts.shape[2:]]),
)
define_op(f"shard_starts(SymInt total, {partition_schema()}, str group_name) -> Tensor", _shard_starts, _fake_starts)
define_op(
    "partition_of_sizes(Tensor sizes, int[] parts, SymInt size, SymInt shard, str group_names) -> Tensor",
    _partition_of_sizes,
    lambda *_: torch.empty([3], dtype=torch.int64, device="cpu"),
)
