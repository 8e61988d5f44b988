"""Changes to how torch merges the equal nodes of a graph. The patches at the end give the reasons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch._functorch import compile_utils, partitioners  # 2.11 - 2.15
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, replace

aten = torch.ops.aten


def parts_stay_separate(stack: contextlib.ExitStack) -> None:
    parts = [
        *(aten.slice, aten.slice_backward, aten.slice_scatter, aten.select, aten.select_backward, aten.select_scatter),
        *(aten.as_strided, aten.as_strided_scatter, aten.split, aten.split_with_sizes, aten.diagonal, aten.roll),
        *(aten.constant_pad_nd, aten.arange, torch.ops.prims.iota),
        aten.full,  # a rank without rows sends it in place of a part; the slices of it may be gone from the graph
    ]
    replace(stack, compile_utils, "rand_ops", lambda kept: [*kept, *parts])  # 2.11 - 2.15


def one_wait_each(stack: contextlib.ExitStack) -> None:
    replace(stack, partitioners, "fx_graph_cse", _waiting_once)  # 2.11 - 2.15


def _waiting_once(merge: Callable[..., Graph]) -> Callable[..., Graph]:
    """Keep one wait for each merged collective. If another of its waits is a result of the graph, return a copy."""

    @functools.wraps(merge)
    def merged(*args: object, **kwargs: object) -> Graph:
        new = merge(*args, **kwargs)
        returned = {storage for node in new.output_node().all_input_nodes if (storage := _storage_of(node))}
        first: dict[object, Node] = {}
        for node in new.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
            earlier = first.setdefault(node.args[0], node)
            if earlier is node:
                continue
            if _storage_of(node) in returned:
                with new.inserting_before(node):
                    result = new.call_function(aten.clone.default, (earlier,))
                result.meta = dict(node.meta)
            else:
                result = earlier
            node.replace_all_uses_with(result)
            new.erase_node(node)
        return new

    return merged


def _storage_of(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


PARTS_STAY_APART = Patch(
    "parts_stay_separate",
    "torch._functorch.compile_utils.rand_ops",
    "Torch merges nodes that compute the same. On a rank whose n is 0, rows 0 to n and rows n to 2n of a tensor are "
    "the same: this rank would send one of them, and others both. The ops in this list are not merged.",
    "fx_graph_cse compares the arguments of nodes. Where these are local sizes, the ranks of one program merge "
    "different collectives, and wait for one another.",
    "2.11 - 2.15",
    parts_stay_separate,
)

ONE_WAIT_EACH = Patch(
    "one_wait_each",
    "torch._functorch.partitioners.fx_graph_cse",
    "Torch merges two equal collectives, but keeps both waits if one is a result of the graph. Both results then "
    "name one memory. Inductor writes to one of them in place while the other is still read, and a caller that writes "
    "to one result changes the other.",
    "fx_graph_cse does not merge a node that shares the storage of an output. A fake wait has another storage than "
    "the collective that it waits for, so the collective is merged and its waits are not. def f(x): "
    "return wait(all_reduce(x)), wait(all_reduce(x)).index_fill(0, i, 0.5) gives 0.5 in both.",
    "2.11 - 2.15",
    one_wait_each,
)
