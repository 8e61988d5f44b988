"""Torch's own all-reduce with what it lacks: narrow dtypes, and NaN in a maximum or minimum."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import extrema, transport
from shardcompile.collectives.pending import Decoded, Pending
from shardcompile.errors import CollectiveError
from shardcompile.watch import enter


def all_reduce(x: Tensor, reduce_op: str, group_name: str, *, async_op: bool = False) -> Pending | Decoded:
    """Start torch's own all-reduce, flat for the same reason as the collectives here; NaN wins a maximum or minimum.

    Args:
        x: a term.
        reduce_op: the reduction.
        group_name: the ranks.
        async_op: do not wait for the others before it starts, as is done for a while to see that they do the same.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
    """
    transport.check_reduction(reduce_op, x.dtype)
    if reduce_op in ("max", "min") and x.is_floating_point():
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        pending = _all_reduce(extrema.encode(wide, reduce_op), reduce_op, group_name, async_op)
        return Decoded(pending, wide.dtype, x.dtype)
    if x.is_complex() and reduce_op == "product":
        raise CollectiveError(
            f"torch has no all-reduce of products of {x.dtype}; redistribute the terms to Shard, then to Replicate"
        )
    carried = transport.reduced_in(x.dtype)
    if carried is not x.dtype:
        return Decoded(_all_reduce(x.to(carried), reduce_op, group_name, async_op), None, x.dtype)
    return _all_reduce(x, reduce_op, group_name, async_op)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, async_op: bool) -> Pending:
    # Inside a trace `reshape` asks how the block is stored, and would specialise on its size.
    with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
        flat = x.reshape([-1]) if x.ndim > 1 else x
    call = None
    if type(x) is Tensor and not torch.compiler.is_dynamo_compiling():
        group = compat.process_group(group_name)
        call = enter(group, f"all_reduce ({reduce_op})", x.dtype, ("shape",), tuple(x.shape))
        if not async_op:
            call.agree()
    return Pending(torch.ops._c10d_functional.all_reduce(flat, reduce_op, group_name), tuple(x.shape), 0, call)
