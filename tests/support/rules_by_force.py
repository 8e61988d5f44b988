"""Every strategy of every rule, tried by force: shards of a world of 3 in one process must give the shards of the result.

A sweep over ranks tries what is chosen; this tries what could be. The calls are those that PyTorch's operator database
makes, forward and backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile.collectives.transport import check_reduction
from shardcompile.errors import CollectiveError
from shardcompile.ops import OpCall, Strategy, TensorArg, find_rule, record_of
from shardcompile.sharding import Layout, MeshShape, Partition, Unflattened
from shardcompile.testing.arrange import uneven_sizes
from tests.support import op_check, op_db

WORLD = 3
_HALVES = (torch.float16, torch.bfloat16, torch.complex32)  # their terms are rounded
MESH = MeshShape((WORLD,))
REDUCE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda terms: torch.stack(terms).sum(0, dtype=terms[0].dtype),
    "avg": lambda terms: torch.stack(terms).mean(0),
    "product": lambda terms: torch.stack(terms).prod(0, dtype=terms[0].dtype),
    "max": lambda terms: torch.stack(terms).amax(0),
    "min": lambda terms: torch.stack(terms).amin(0),
}


class _Calls(TorchDispatchMode):
    """Keeps every call of an op that has a rule, once for its shapes and other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, tuple[Any, Any, Any, Any]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in op.tags
        wanted = find_rule(op) is not None and not op._schema.is_mutable and not random
        kept = pytree.tree_map(_copied, (args, kwargs)) if wanted else None
        out = op(*args, **kwargs)
        if kept is not None:
            what = pytree.tree_map(lambda a: (a.shape, a.dtype) if isinstance(a, Tensor) else a, (args, kwargs))
            self.kept.setdefault(f"{op} {what}", (op, *kept, pytree.tree_map(_copied, out)))
        return out


def _copied(a: Any) -> Any:
    return a.detach().clone() if isinstance(a, Tensor) else a


def _calls_of(name: str) -> list[tuple[Any, Any, Any, Any]]:
    with _Calls() as calls:
        for case, full in op_db.samples(name, 3):
            try:
                op_check.run_plain(case, full)
            except Exception:
                continue
    return list(calls.kept.values())


def _whole(x: Tensor) -> TensorArg:
    return TensorArg(Layout.of(MESH, [Replicate()], tuple(x.shape), x.dtype, [None] * x.ndim))


def _layout(shape: Sequence[int], dtype: torch.dtype, placement: Placement, partition: Partition | None) -> Layout:
    partitions = [partition if isinstance(placement, Shard) and placement.dim == d else None for d in range(len(shape))]
    return Layout.of(MESH, [placement], tuple(shape), dtype, partitions)


def _terms(x: Tensor, reduce_op: str) -> list[Tensor]:
    if reduce_op == "product":
        return [x, torch.ones_like(x), torch.ones_like(x)]
    if reduce_op in ("max", "min") or not (x.is_floating_point() or x.is_complex()):
        return [x] * WORLD if reduce_op != "sum" else [x, torch.zeros_like(x), torch.zeros_like(x)]
    if reduce_op == "avg":
        return [x - 3, x + 1, x + 2]
    return [x - 3, torch.ones_like(x), torch.full_like(x, 2)]


def _pieces(x: Tensor, placement: Placement, partition: Partition | None) -> list[Tensor]:
    if isinstance(placement, Partial):
        return _terms(x, placement.reduce_op)
    if isinstance(placement, Shard):
        assert partition is not None
        return [b.contiguous() for b in x.split(partition.sizes, placement.dim)]
    return [x] * WORLD


def _joined(shards: list[Any], placement: Placement, layout: Layout) -> Tensor:
    if isinstance(placement, Partial):
        return REDUCE[placement.reduce_op](shards)
    if isinstance(placement, Shard):
        for r, b in enumerate(shards):
            assert tuple(b.shape) == tuple(layout.local_shape((r,))), f"shard {r}: {b.shape}, its layout {layout}"
        # Where leading dims were flattened into the partition one, each stretch of it is divided.
        apart = Unflattened.of(layout)
        parts = [b.reshape([int(n) for n in apart.shape(b.shape)]) for b in shards]
        return torch.cat(parts, apart.dim(placement.dim)).reshape(layout.shape)
    assert all(torch.allclose(b, shards[0], equal_nan=True) for b in shards), "copies differ"
    return shards[0]


def _try(op: Any, args: Any, kwargs: Any, expected: Any, strategy: Strategy, style: int) -> bool:
    """Run a strategy on local shards and compare. Returns whether it could be tried with such a partition."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    sizes = {x.shape[p.dim] for x, p in zip(tensors, strategy.inputs, strict=True) if isinstance(p, Shard)}
    if len(sizes) > 1:
        raise AssertionError(f"it partitions sizes {sizes} alike")
    partition = Partition.of_sizes([0], [WORLD], uneven_sizes(sizes.pop(), WORLD, style)) if sizes else None
    after = (
        strategy.on_partition(partition) if strategy.on_partition is not None and partition is not None else partition
    )
    if after is None and partition is not None:
        return False
    pieces = [_pieces(x, p, partition) for x, p in zip(tensors, strategy.inputs, strict=True)]
    described, named = pytree.tree_unflatten([_whole(x) if isinstance(x, Tensor) else x for x in leaves], structure)
    call = OpCall(op, described, named, tuple(_whole(x) for x in tensors))
    outputs = expected if isinstance(expected, (tuple, list)) and len(op._schema.returns) > 1 else [expected]
    flat = [o if isinstance(o, (tuple, list)) else [o] for o in outputs]
    layouts = [
        [_layout(o.shape, o.dtype, p, after) if isinstance(o, Tensor) else None for o in group]
        for group, p in zip(flat, strategy.outputs, strict=True)
    ]
    rule = find_rule(op)
    assert rule is not None
    results = []
    for r in range(WORLD):
        local = iter([p[r] for p in pieces])
        shard_args, shard_kwargs = pytree.tree_unflatten(
            [next(local).clone() if isinstance(x, Tensor) else x for x in leaves], structure
        )
        if rule.local_args is not None:
            known = [x for group in layouts for x in group if x is not None]
            shard_args = rule.local_args(call, shard_args, known, lambda layout, r=r: layout.local_shape((r,)))
        out = (record_of(op).kernel or op)(*shard_args, **shard_kwargs)
        out = out if len(op._schema.returns) > 1 else [out]
        results.append([o if isinstance(o, (tuple, list)) else [o] for o in out])
    for n, (group, placement) in enumerate(zip(flat, strategy.outputs, strict=True)):
        for i, wanted in enumerate(group):
            if isinstance(wanted, Tensor):
                layout = layouts[n][i]
                assert layout is not None
                got = _joined([results[r][n][i] for r in range(WORLD)], placement, layout)
                single = any(t.dtype in (torch.float32, torch.complex64) for t in (*tensors, wanted))
                limit = {"rtol": 1e-4, "atol": 1e-4} if single else {"rtol": 1e-7, "atol": 1e-9}
                torch.testing.assert_close(got, wanted.to(got.dtype), equal_nan=True, **limit)
    return True


def _exists(x: TensorArg, placement: Placement) -> bool:
    """Whether there is such a pending reduction of this dtype."""
    if not isinstance(placement, Partial):
        return True
    try:
        check_reduction(placement.reduce_op, x.dtype)
    except CollectiveError:
        return False
    return placement.reduce_op != "sum" or x.dtype is not torch.bool


def wrong(name: str) -> tuple[list[str], int]:
    problems, tried = [], 0
    warnings.simplefilter("ignore")
    for op, args, kwargs, expected in _calls_of(name):
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = tuple(_whole(x) for x in leaves if isinstance(x, Tensor))
        described, named = pytree.tree_map(lambda a: _whole(a) if isinstance(a, Tensor) else a, (args, kwargs))
        rule = find_rule(op)
        assert rule is not None
        overflows = any(
            bool((x.abs() > 1e100).any()) for x in leaves if isinstance(x, Tensor) and x.is_floating_point()
        )
        if "empty" in op._schema.name or overflows or any(t.dtype in _HALVES for t in tensors):
            continue
        for strategy in rule.strategies_for(OpCall(op, described, named, tensors)):
            if not all(map(_exists, tensors, strategy.inputs)):
                continue
            for style in range(3):
                text = f"{op} {[t.shape for t in tensors]} {strategy.inputs} -> {strategy.outputs}"
                try:
                    tried += _try(op, args, kwargs, expected, strategy, style)
                except Exception as error:
                    problems.append(f"{text}: {type(error).__name__}: {str(error)[:300]}")
                    break
    return problems, tried
