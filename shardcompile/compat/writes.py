"""Replacements for functions of torch that look at the memory of a write's target. `patches` gives the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch._subclasses.fake_impls as fake_impls
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from shardcompile.compat.partitioner import source_of
from shardcompile.compat.patch import replace
from shardcompile.compat.replacements import answer_by_hint
from shardcompile.compat.torch_ops import is_written

if TYPE_CHECKING:
    from torch._inductor.ir import TensorBox  # 2.11 - 2.15
    from torch._subclasses.fake_tensor import FakeTensorMode  # 2.11 - 2.15


def overlap_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, torch, "_debug_has_internal_overlap", answer_by_hint)


def copies_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, fake_impls, "run_and_return_new_tensor_of_input_device", _copying_by_hint)  # 2.11 - 2.15


def _copying_by_hint(run: Callable[..., object]) -> Callable[..., object]:
    """Have the functional forms of writes decide by hints how they keep the strides of their target."""

    def run_op(fake_mode: FakeTensorMode, func: object, *args: object) -> object:
        shape_env = fake_mode.shape_env if func in _COPIES else None
        with contextlib.nullcontext() if shape_env is None else shape_env.suppress_guards():
            return run(fake_mode, func, *args)

    return run_op


_COPIES = (
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
)


def overlaps_of_sizes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.fx_passes import reinplace  # 2.11 - 2.15

    replace(stack, reinplace, "compute_overlapping_tensors", _overlapping_unless_known)


def _overlapping_unless_known(compute: Callable[..., set[int]]) -> Callable[..., set[int]]:
    """Treat views whose place in memory is a formula as overlapping: this leaves no guard, and is always safe."""

    def compute_overlapping(tensors: Sequence[torch.Tensor], *args: object, **kwargs: object) -> set[int]:
        places = [n for x in tensors for n in (*x.shape, *x.stride(), x.storage_offset())]
        if any(isinstance(n, torch.SymInt) for n in places):
            return set(range(len(tensors)))
        return compute(tensors, *args, **kwargs)

    return compute_overlapping


def joins_of_copies(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir  # 2.11 - 2.15

    replace(stack, ir.ConcatKernel, "realize_into", _copying_what_is_written)  # 2.11 - 2.15


def _copying_what_is_written(realize: Callable[..., object]) -> object:
    """Copy the parts of a join if an op writes to a part, or to the whole, in place."""
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir  # 2.11 - 2.15
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    copying = False

    def realize_into(part: TensorBox, whole: TensorBox, *rest: object, **options: object) -> object:  # options: 2.15
        nonlocal copying
        node = V.graph.current_node  # 2.11 - 2.15
        if copying or node is None or not any(map(_is_written_to, (node, *node.all_input_nodes))):
            return realize(part, whole, *rest, **options)
        copying = True  # torch's function calls this one again
        try:
            copy = ir.Pointwise.create(
                device=part.get_device(), dtype=part.get_dtype(), inner_fn=part.make_loader(), ranges=part.get_size()
            )
            return realize(copy, whole, *rest, **options)
        finally:
            copying = False

    return staticmethod(realize_into)


def _is_written_to(node: Node) -> bool:
    """Whether an op of a graph writes to the memory of a result."""
    source = source_of(node)
    assert isinstance(source, Node), "a view of a tensor leads to a node"
    seen = [source]
    for x in seen:
        for user in x.users:
            target = user.target
            if not isinstance(target, OpOverload):
                if isinstance(target, HigherOrderOperator):
                    return True  # kernels written by hand, and their wrappers, may write
            elif target._schema.is_mutable:
                written = [a for a, s in zip(user.args, target._schema.arguments, strict=False) if is_written(s)]
                if x in written:
                    return True
            elif target.is_view:
                seen.append(user)
    return False
