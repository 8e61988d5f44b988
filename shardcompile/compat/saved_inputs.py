"""Changes to what the forward pass saves for the backward pass. `patches` gives the reasons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import sympy
import torch
from torch import Tensor
from torch._functorch import partitioners  # 2.11 - 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11 - 2.15
    AOTInput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols  # 2.11 - 2.15

from shardcompile.compat.patch import replace
from shardcompile.compat.shard_symbols import common_hints
from shardcompile.compat.sizes import IntLike, size_hint


def saved_before_written(stack: contextlib.ExitStack) -> None:
    replace(stack, partitioners, "_extract_fwd_bwd_modules", _copying_what_is_written)  # 2.11 - 2.15


def sizes_of_saved_products(stack: contextlib.ExitStack) -> None:
    replace(stack, partitioners, "_extract_fwd_bwd_modules", _saving_symbols)  # 2.11 - 2.15


def saved_by_common_hints(stack: contextlib.ExitStack) -> None:
    name = "optimization_hint" if hasattr(partitioners, "optimization_hint") else "size_hint"  # 2.12 - 2.15; 2.11
    replace(stack, partitioners, name, _common)


def _common(hint: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(hint)
    def of_all_ranks(size: IntLike, fallback: int = 4096) -> int:
        with common_hints():
            return size_hint(size, fallback)

    return of_all_ranks


def _saving_symbols(extract: Callable[..., object]) -> Callable[..., object]:
    """Have the forward graph save the symbols in the sizes of saved tensors that nothing else defines.

    The partitioner saves symbols that are inputs of the graph. The size of a shard is no input; the shard is one.
    """

    @functools.wraps(extract)
    def extract_modules(
        joint: GraphModule, saved: list[Node], saved_sym_nodes: list[Node], *args: object, **kwargs: object
    ) -> object:
        tangents = [*filter(partitioners._is_tangent, joint.graph.nodes)]  # 2.11 - 2.15
        find = partitioners.find_symbol_binding_fx_nodes  # 2.11 - 2.15

        def find_more(graph: Graph) -> dict[sympy.Symbol, Node]:
            # Only the backward graph can read a size off a gradient.
            found = {s: n for s, n in find(graph).items() if not set(tangents).intersection(n.all_input_nodes)}
            # For the cache of graphs, only the saved sizes define symbols; tensors of the backward pass do not.
            unbound = (_unbound([*saved, *tangents]) | _unbound(saved_sym_nodes)) - found.keys()
            return {**found, **_sizes(graph, unbound)} if unbound else found

        with contextlib.ExitStack() as meanwhile:
            replace(meanwhile, partitioners, "find_symbol_binding_fx_nodes", lambda _: find_more)
            return extract(joint, saved, saved_sym_nodes, *args, **kwargs)

    return extract_modules


def _unbound(saved: Sequence[Node]) -> set[sympy.Symbol]:
    """The symbols in saved sizes, and in sizes and strides of saved tensors, that are not themselves among these."""
    values = [x.meta.get("val") for x in saved]
    numbers = [n for t in values for n in ((*t.shape, *t.stride()) if isinstance(t, Tensor) else (t,))]
    terms = [n.node.expr for n in numbers if isinstance(n, torch.SymInt)]
    return {s for t in terms for s in free_symbols(t)} - {t for t in terms if t.is_Symbol}


def _sizes(graph: Graph, symbols: set[sympy.Symbol]) -> dict[sympy.Symbol, Node]:
    """Add nodes that read these symbols off the sizes of a graph's inputs; returns a node for each symbol found."""
    found: dict[sympy.Symbol, Node] = {}
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        for x in inputs:
            value = x.meta.get("val")
            for dim, n in enumerate(value.shape if isinstance(value, Tensor) else ()):
                symbol = n.node.expr if isinstance(n, torch.SymInt) else None
                if symbol in symbols and symbol not in found:
                    found[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
                    found[symbol].meta["val"] = n
    return found


def _copying_what_is_written(extract: Callable[..., tuple[GraphModule, GraphModule]]) -> Callable[..., object]:
    """Have the forward graph save a copy of an input, or of a view of one, if something writes to the input later."""

    @functools.wraps(extract)
    def extract_modules(*args: object, num_fwd_outputs: int, **kwargs: object) -> tuple[GraphModule, GraphModule]:
        forward, backward = extract(*args, num_fwd_outputs=num_fwd_outputs, **kwargs)
        for name, copy in _copies(forward.graph, num_fwd_outputs).items():
            for node in backward.graph.find_nodes(op="placeholder"):
                if node.name == name:
                    node.meta["val"] = copy.meta["val"]
        forward.recompile()
        return forward, backward

    return extract_modules


def _copies(graph: Graph, results: int) -> dict[str, Node]:
    """Have a forward graph save copies of the inputs that it saves and writes to.

    Args:
        graph: the forward graph. Its last nodes write to inputs. Other inputs get new values from results after the
            call.
        results: the number of outputs that are results. The other outputs are saved.

    Returns:
        The copies, by the name of the copied node.
    """
    written = {
        source_of(node.args[0]) for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    written |= _written_after_the_call(graph)
    if not written:
        return {}
    copies: dict[str, Node] = {}
    output = graph.output_node()
    outputs = output.args[0]
    assert isinstance(outputs, (list, tuple)), "a forward graph returns several values"
    saved = list(outputs)
    for n, node in enumerate(outputs):
        if n < results or not isinstance(node, Node) or source_of(node) not in written:
            continue
        if node.name not in copies:
            copies[node.name] = _copy(graph, node)
        saved[n] = copies[node.name]
    output.args = (tuple(saved), *output.args[1:])
    return copies


def _written_after_the_call(graph: Graph) -> set[object]:
    """The inputs whose new values are results of the graph, since they have gradients, which a graph cannot set."""
    results = [
        d.base if isinstance(d, SubclassGetAttrAOTOutput) else d for d in graph.output_node().meta.get("desc", ())
    ]
    renewed = [d.mutated_input for d in results if isinstance(d, InputMutationAOTOutput)]

    def given(x: Node) -> AOTInput | None:
        described = x.meta.get("desc")
        return described.base if isinstance(described, SubclassGetAttrAOTInput) else described

    return {x for x in graph.find_nodes(op="placeholder") if given(x) in renewed} if renewed else set()


def _copy(graph: Graph, node: Node) -> Node:
    after = node
    while after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"].clone()
    return copy


def source_of(node: object) -> object:
    """The input, or the result of a kernel, that a node is a view of."""
    while isinstance(node, Node) and isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node
