"""The user-facing functional collectives: sizes as Python ints, a process group instead of its name, sync or async.

Those that take a process group and no rank trace into one node and its wait. They are differentiable, also twice, where
the reduction is sum or avg.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile.collectives import reductions, transport
from shardcompile.collectives.pending import Decoded, Pending, wait
from shardcompile.diagnosis import Call, enter
from shardcompile.errors import CollectiveError
from shardcompile.sharding import CHUNK_KEY

_ops = torch.ops.shardcompile
_P = TypeVar("_P", bound=Pending | Decoded)


def _check(sizes: Sequence[int], group: ProcessGroup) -> list[int]:
    if len(sizes) != group.size() or any(s < 0 for s in sizes):
        raise CollectiveError(f"a group of {group.size()} ranks needs {group.size()} non-negative sizes, got {sizes}")
    return list(sizes)


def _normalize(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise CollectiveError(f"dim {dim} is out of range for a tensor of {x.ndim} dims")
    return dim % x.ndim


def _finish(pending: _P, async_op: bool) -> Tensor | _P:
    return pending if async_op else pending.wait()


def all_gather_v(
    x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup, *, async_op: bool = False
) -> Tensor | Pending:
    """Concatenates the local shards of all ranks along `dim`: Shard to Replicate.

        rank 0  [a a a]
        rank 1  [b b b b b]   ->   [a a a b b b b b c]   on every rank
        rank 2  [c]

    Backward: `reduce_scatter_v` with the same sizes.

    Args:
        x: this rank's local shard, [..., sizes[rank], ...] at `dim`.
        dim: the sharded dim.
        sizes: shard sizes of all ranks along `dim`; zeros allowed.
        group: the process group.
        async_op: return at once; the result is what `Pending.wait` returns.

    Raises:
        CollectiveError: `x` is not of the stated size, or the number of sizes is wrong.
    """
    sizes, dim = _check(sizes, group), _normalize(x, dim)
    out = _ops.all_gather_v(x, dim, sum(sizes), sizes, CHUNK_KEY, [], group.group_name)
    return _finish(Pending.of(out, x.shape, dim, sum(sizes)), async_op)


def reduce_scatter_v(
    x: Tensor,
    dim: int,
    sizes: Sequence[int],
    group: ProcessGroup,
    *,
    reduce_op: str = "sum",
    async_op: bool = False,
) -> Tensor | Pending:
    """Reduces the `x` of all ranks and keeps the local shard along `dim`: Partial to Shard.

    Backward (sum and avg): `all_gather_v` with the same sizes.

    Args:
        x: a term of the reduction, of the same shape on every rank, size sum(sizes) at `dim`.
        dim: the dim to shard.
        sizes: shard sizes of all ranks.
        group: the process group.
        reduce_op: sum, avg, product, max or min.
        async_op: return at once; the result is what `Pending.wait` returns.

    Raises:
        CollectiveError: `x` is not of size sum(sizes), or there is no such reduction of this dtype.
    """
    sizes, dim = _check(sizes, group), _normalize(x, dim)
    out = _ops.reduce_scatter_v(x, dim, sizes[group.rank()], reduce_op, sizes, CHUNK_KEY, [], group.group_name)
    return _finish(Pending.of(out, x.shape, dim, sizes[group.rank()]), async_op)


def all_to_all_v(
    x: Tensor,
    src_dim: int,
    dst_dim: int,
    src_sizes: Sequence[int],
    dst_sizes: Sequence[int],
    group: ProcessGroup,
    *,
    async_op: bool = False,
) -> Tensor | Pending:
    """Moves the sharding from `src_dim` to `dst_dim`: Shard(src_dim) to Shard(dst_dim).

    Backward: the same with the two swapped.

    Args:
        x: [..., src_sizes[rank] at src_dim, ..., sum(dst_sizes) at dst_dim, ...].
        src_dim: the dim that is sharded before.
        dst_dim: the dim that is sharded afterwards.
        src_sizes: shard sizes of all ranks along `src_dim`.
        dst_sizes: shard sizes of all ranks along `dst_dim`.
        group: the process group.
        async_op: return at once; the result is what `Pending.wait` returns.
    """
    src_sizes, dst_sizes = _check(src_sizes, group), _check(dst_sizes, group)
    src_dim, dst_dim = _normalize(x, src_dim), _normalize(x, dst_dim)
    if src_dim == dst_dim:
        raise CollectiveError(
            f"all_to_all_v needs two different dims, got dim {src_dim} twice; fetch_ranges changes the partition of "
            f"one dim"
        )
    out = _ops.all_to_all_v(
        x,
        src_dim,
        dst_dim,
        sum(src_sizes),
        dst_sizes[group.rank()],
        *(src_sizes, CHUNK_KEY, []),
        *(dst_sizes, CHUNK_KEY, []),
        group.group_name,
    )
    shape = [dst_sizes[group.rank()] if d == dst_dim else s for d, s in enumerate(x.shape)]
    return _finish(Pending.of(out, shape, src_dim, sum(src_sizes)), async_op)


def fetch_ranges(
    x: Tensor,
    dim: int,
    src_sizes: Sequence[int],
    dst_sizes: Sequence[int],
    group: ProcessGroup,
    *,
    before: int = 0,
    after: int = 0,
    async_op: bool = False,
) -> Tensor | Pending:
    """Changes the partition of a sharded dim: Shard(dim) to Shard(dim) with other shard sizes and an optional halo.

    Each rank holds `src_sizes[rank]` rows and fetches those of its shard of `dst_sizes`. It also gets `before` rows
    before and `after` rows after it, clipped to the global dim. Empty shards get no halo.

    Backward: the gradients of each row are sent to its owner and added there.

    Args:
        x: [..., src_sizes[rank] at dim, ...].
        dim: the sharded dim.
        src_sizes: shard sizes of all ranks before.
        dst_sizes: shard sizes of all ranks afterwards; the same sum.
        group: the process group.
        before: halo rows before the shard.
        after: halo rows after the shard.
        async_op: return at once; the result is what `Pending.wait` returns.

    Raises:
        CollectiveError: the two partitions have different sums.
    """
    src_sizes, dst_sizes, dim = _check(src_sizes, group), _check(dst_sizes, group), _normalize(x, dim)
    if sum(src_sizes) != sum(dst_sizes):
        raise CollectiveError(
            f"fetch_ranges: the global sizes of the two partitions differ: {src_sizes} has {sum(src_sizes)} rows, "
            f"{dst_sizes} has {sum(dst_sizes)}"
        )
    start, end = transport.running_ends(dst_sizes)[group.rank()]
    if end > start:
        start, end = max(start - before, 0), min(end + after, sum(src_sizes))
    out = _ops.fetch_ranges(
        x,
        dim,
        sum(src_sizes),
        end - start,
        *(src_sizes, CHUNK_KEY, []),
        *(dst_sizes, CHUNK_KEY, []),
        [sum(src_sizes), 1, 1, before, after] if before or after else [],
        None,
        group.group_name,
    )
    return _finish(Pending.of(out, x.shape, dim, end - start), async_op)


def all_reduce(
    x: Tensor, group: ProcessGroup, *, reduce_op: str = "sum", async_op: bool = False
) -> Tensor | Pending | Decoded:
    """Reduces the `x` of all ranks: Partial to Replicate. Maximum and minimum propagate NaN, as torch's do.

    Args:
        x: a term of the reduction, of the same shape on every rank.
        group: the process group.
        reduce_op: sum, avg, product, max or min.
        async_op: return at once; the result is what `Pending.wait` returns.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
    """
    if reduce_op in ("max", "min") and x.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(f"all_reduce with {reduce_op} has no gradient; only sum and avg have. Detach the tensor")
    transport.check_reduction(reduce_op, x.dtype)
    if reduce_op == "avg":  # torch implements the gradient of sum only
        x, reduce_op = x / group.size(), "sum"
    return _finish(reductions.all_reduce(x, reduce_op, group.group_name), async_op)


def all_gather_even(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenates tensors of one shape along their first dim, on all ranks."""
    call = enter(group, "all_gather", x.dtype, ("shape",), tuple(x.shape))
    call.agree()
    start = torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)
    return call.run([functools.partial(wait, start)])[0]


def broadcast(x: Tensor, src: int, group: ProcessGroup) -> Tensor:
    """Returns the value of rank `src` of the group on every rank. Not differentiable.

    Args:
        x: the value on rank `src`; on other ranks any tensor of its shape and dtype.
        src: source rank in the group.
        group: the process group.
    """
    out = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if out.numel():
        flat = out.view(torch.uint8) if out.ndim else out.view(1).view(torch.uint8)
        call = enter(group, "broadcast", x.dtype, ("shape", "from rank"), tuple(x.shape), src)
        call.agree()
        call.run([functools.partial(dist.broadcast, flat, group=group, group_src=src)])
    return out


def _world() -> ProcessGroup:
    assert dist.group.WORLD is not None, "a mesh exists, and so does the default process group"
    return dist.group.WORLD


def send_shards(shards: dict[int, Tensor]) -> None:
    """Sends each rank its shard, bit for bit.

    Args:
        shards: the shards, keyed by global rank.
    """
    rows = [(rank, shard.contiguous().resolve_conj().resolve_neg()) for rank, shard in shards.items()]
    _finish_messages(rows, [])


def receive_shard(out: Tensor, src: int) -> None:
    """Receives a shard that rank `src` sends with `send_shards`.

    Args:
        out: a contiguous tensor to write.
        src: global rank of the sender.
    """
    _finish_messages([], [(src, out)])


def _finish_messages(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    call = Call.between_two(_world())
    transport.CallWork(call, transport.exchange(call, sends, receives)).wait()
