"""All-reduce: torch's own, with deadlock diagnosis, support for narrow dtypes, and maxima that propagate NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from shardcompile import compat
from shardcompile.collectives import ordered_ints, transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.pending import Decoded, Pending, wait
from shardcompile.collectives.traffic import Member, Traffic, even_scatter
from shardcompile.errors import CollectiveError

_c10d = torch.ops._c10d_functional


class AllReduce(NamedTuple):
    """Arguments of `all_reduce`, with one payload or, for torch's coalesced op, several.

    Attributes:
        input: a term of the reduction.
        reduce_op: the reduction.
        group_name: the process group.
    """

    input: Tensor
    reduce_op: str
    group_name: str


def _reduce(a: AllReduce) -> Tensor:
    group = compat.process_group(a.group_name)
    out = a.input.clone(memory_format=torch.contiguous_format)
    call = ALL_REDUCE.enter(group, out.dtype, tuple(out.shape), of=a.reduce_op)

    def start() -> Sequence[Work]:
        (work,) = call.run([lambda: dist.all_reduce(out, _OPERATIONS[a.reduce_op], group, async_op=True)])
        return [] if work is None else [work]

    def meet_and_run() -> None:
        call.meet()
        call.run([work.wait for work in start()])

    # torch reduces whatever the ranks pass: if they differ, results would be wrong, so they first meet at a barrier. To
    # start must not wait for other ranks, so that where they have to meet, the collective starts in its wait.
    if call.has_to_meet():
        transport.complete(out, call, [], meet_and_run)
    else:
        transport.complete(out, call, start())
    return out


def _adjoint(a: AllReduce, shape: torch.Size, grad: Tensor) -> Tensor:
    if a.reduce_op != "sum":
        raise CollectiveError(f"all_reduce with {a.reduce_op} has no gradient; only sum has. Detach the tensor")
    return wait(ALL_REDUCE.call(AllReduce(grad.contiguous(), "sum", a.group_name)))


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of a reduce-scatter and an all-gather."""
    half = even_scatter(members, n)
    return Traffic(2 * half.busiest, 2 * half.total)


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

ALL_REDUCE = Descriptor(
    "all_reduce",
    AllReduce,
    _reduce,
    fake=lambda a: torch.empty_like(a.input, memory_format=torch.contiguous_format),
    adjoint=_adjoint,
    traffic=_traffic,
    joins=Joins("all_reduce", lambda a: []),
    states=("shape",),
    moves_rows=False,
    overloads=(
        _c10d.all_reduce.default,
        _c10d.all_reduce_.default,
        _c10d.all_reduce_coalesced.default,
        _c10d.all_reduce_coalesced_.default,
    ),
)


def all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Pending | Decoded:
    """Starts an all-reduce, in a graph on a flat tensor like other collectives; maximum and minimum propagate NaN.

    Args:
        x: a term of the reduction.
        reduce_op: the reduction.
        group_name: the process group.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
        DivergenceError: the other ranks do not take part.
    """
    transport.check_reduction(reduce_op, x.dtype)
    if reduce_op in ("max", "min") and x.is_floating_point():
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return Decoded(_start(ordered_ints.encode(wide, reduce_op), reduce_op, group_name), wide.dtype, x.dtype)
    if x.is_complex() and reduce_op == "product":
        raise CollectiveError(
            f"torch has no all-reduce of products of {x.dtype}; redistribute the terms to Shard, then to Replicate"
        )
    carried = transport.reduced_in(x.dtype)
    if carried is not x.dtype:
        return Decoded(_start(x.to(carried), reduce_op, group_name), None, x.dtype)
    return _start(x, reduce_op, group_name)


def _start(x: Tensor, reduce_op: str, group_name: str) -> Pending:
    flat = x
    if x.ndim > 1 and type(x) is not Tensor:  # in eager code it keeps its shape for error messages
        with compat.without_guards(x):  # `reshape` queries the strides, and would specialise on the local shard size
            flat = x.reshape([-1])
    return Pending(ALL_REDUCE.call(AllReduce(flat, reduce_op, group_name)), tuple(x.shape), 0)
