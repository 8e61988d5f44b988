"""The partitioner of joint graphs: torch's, with what a graph of sharded tensors needs before and after it.

Inductor takes it by its setting `custom_partitioner_fn`, other backends as the argument `partition_fn` of
`aot_module_simplified`. Private names of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
from torch import Tensor
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11 - 2.15
    AOTInput,
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.compile_utils import rand_ops  # 2.11 - 2.15
from torch._functorch.partitioners import min_cut_rematerialization_partition  # 2.11 - 2.15
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files  # 2.11 - 2.15
from torch._ops import HigherOrderOperator, OpOverload  # 2.11 - 2.15
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols  # 2.11 - 2.15
from torch.fx.node import Argument
from torch.multiprocessing.reductions import StorageWeakRef  # 2.11 - 2.15
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Partition = Callable[..., tuple[GraphModule, GraphModule]]

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NOT_MERGED = {*rand_ops, aten.empty, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Ops whose results differ, or may be written to."""


class Partitioner(CustomPartitionerFn):
    """Partitions a joint graph of sharded tensors for Inductor.

    Args:
        inner: the user's partitioner; None for torch's.
    """

    def __init__(self, inner: CustomPartitionerFn | None = None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: object
    ) -> tuple[GraphModule, GraphModule]:
        return partition(self.inner or min_cut_rematerialization_partition, gm, joint_inputs, **kwargs)  # type: ignore[arg-type]

    def uuid(self) -> object:
        """What stands for this partitioner in the keys of caches."""
        return get_hash_for_files((__file__,)), None if self.inner is None else self.inner.uuid()


def around(inner: CustomPartitionerFn | None) -> Partitioner:
    """Returns a `Partitioner` that calls another one, unless that is one itself."""
    return inner if isinstance(inner, Partitioner) else Partitioner(inner)


def partition(
    inner: Partition, joint: GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **kwargs: object
) -> tuple[GraphModule, GraphModule]:
    """Partitions a joint graph into a forward and a backward graph.

    - Equal nodes are merged by `merge_equal_nodes` in place of torch's `fx_graph_cse`.
    - Collectives of the backward pass stay in the backward graph. The partitioner would move one that depends on no
      gradient where that saves memory on this rank: ranks would send other collectives.
    - Collectives of the forward pass are not repeated in the backward graph.
    - An input that the forward pass writes to is saved as a copy.
    - Symbols in the sizes of what is saved are saved where no saved size defines them.

    Args:
        inner: partitions the graph.
        joint: the joint graph, which is changed.
        inputs: its example inputs.
        num_fwd_outputs: the number of its outputs that are results of the forward pass.
        kwargs: for `inner`.
    """
    merge_equal_nodes(joint.graph)
    _keep_collectives_of_backward_pass(joint.graph)
    _read_sizes_of_gradients_late(joint.graph)
    with _functorch_config.patch(cse=False):  # 2.11 - 2.15
        forward, backward = inner(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    _drop_repeated_collectives(forward.graph, backward.graph)
    _save_copies(forward.graph, backward.graph, num_fwd_outputs)
    _save_symbols(forward.graph, backward.graph)
    forward.recompile()
    backward.recompile()
    return forward, backward


def merge_equal_nodes(graph: Graph) -> None:
    """Merges the nodes of a functional graph that compute the same, but for those of some ops.

    A node stays whose storage is a result of the graph, since a caller may write to each result. Torch (2.11 - 2.15)
    merges equal collectives even then, and keeps their waits apart: both results name one memory. Here the wait that
    is a result returns a copy.
    """
    first: dict[object, Node] = {}
    returned = {storage for node in graph.output_node().all_input_nodes if (storage := _storage_of(node))}
    for node in graph.nodes:
        is_returned = _storage_of(node) in returned
        key = None if is_returned and node.target is not _WAIT else _what_it_computes(node)
        earlier = node if key is None else first.setdefault(key, node)
        if earlier is node:
            continue
        if is_returned:
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (earlier,))
            copy.meta = dict(node.meta)
            earlier = copy
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)


def _what_it_computes(node: Node) -> object:
    """A key that equal nodes have in common; None for a node that is not merged."""
    op = node.target
    if node.op != "call_function" or isinstance(op, HigherOrderOperator):
        return None
    if any(isinstance(user.target, HigherOrderOperator) for user in node.users):  # may write to it
        return None
    if isinstance(op, OpOverload) and (op.overloadpacket in _NOT_MERGED or _has_side_effect(node, op)):
        return None
    value = node.meta.get("val")
    size = value.node.expr if isinstance(value, torch.SymInt) else None  # items of one tensor have a symbol each
    # 1, 1.0 and True are equal.
    key = op, node.args, node.kwargs, size, tuple(map(type, tree_leaves((node.args, node.kwargs))))
    try:
        hash(key)
    except TypeError:  # a slice, for one
        return None
    return key


def _has_side_effect(node: Node, op: OpOverload) -> bool:
    return bool(node.is_impure()) and op.namespace not in ("_c10d_functional", "shardcompile")


def _storage_of(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None


def _waits(graph: Graph) -> list[Node]:
    return [*graph.find_nodes(op="call_function", target=_WAIT)]


def _keep_collectives_of_backward_pass(graph: Graph) -> None:
    for node in _waits(graph):
        parts = (node, *node.all_input_nodes)
        # Torch 2.14 repeats in the backward pass the wait for a collective of the forward pass.
        if all(part.meta.get("partitioner_tag") == "is_backward" for part in parts):  # 2.11 - 2.15
            for part in parts:
                part.meta["partitioner_tag"] = "must_be_in_backward"


def _read_sizes_of_gradients_late(graph: Graph) -> None:
    """Moves nodes that read sizes off gradients to where they are used.

    The partitioner has the first node that yields a symbol define it, and only the backward graph can read a gradient.
    """
    inputs = graph.find_nodes(op="placeholder")
    gradients = {node for node in inputs if "tangents" in str(node.target)}  # 2.11 - 2.15
    sizes = {
        node
        for node in graph.find_nodes(op="call_function", target=aten.sym_size.int)
        if node.args[0] in gradients and node.users
    }
    for node in list(graph.nodes) if sizes else ():
        for size in sizes & set(node.all_input_nodes):
            node.prepend(size)
            sizes.discard(size)


def _drop_repeated_collectives(forward: Graph, backward: Graph) -> None:
    """Removes collectives of the forward pass from the backward graph if it does not read their results.

    The partitioner keeps each wait that the backward graph can compute. It can compute a wait if the payload depends on
    no input. Such a payload is the zeros that most ranks hold of a partial sum, while one rank holds the values.
    """
    sent = {node.name for node in _waits(forward)}
    repeated = [node for node in _waits(backward) if node.name in sent and not node.users]
    for node in repeated:
        backward.erase_node(node)
    if repeated:
        backward.eliminate_dead_code()


def _save_copies(forward: Graph, backward: Graph, results: int) -> None:
    """Has the forward graph save copies of inputs, and of views of them, that it writes to.

    The backward graph would read the new values.

    Args:
        forward: its last nodes write to inputs. Other inputs get new values from results after the call.
        backward: reads what is saved.
        results: the number of outputs of the forward graph that are results. The other outputs are saved.
    """
    written = {source_of(node.args[0]) for node in forward.find_nodes(op="call_function", target=aten.copy_.default)}
    written |= _written_after_the_call(forward)
    output = forward.output_node()
    outputs = _outputs(forward)
    copies: dict[str, Node] = {}
    for n, node in enumerate(outputs) if written else ():
        if n < results or not isinstance(node, Node) or source_of(node) not in written:
            continue
        if node.name not in copies:
            copies[node.name] = _copy(forward, node)
        outputs[n] = copies[node.name]
    output.args = (tuple(outputs), *output.args[1:])
    for node in backward.find_nodes(op="placeholder") if copies else ():
        if node.name in copies:
            node.meta["val"] = copies[node.name].meta["val"]


def _outputs(graph: Graph) -> list[Argument]:
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple)), "a forward graph returns several values"
    return list(outputs)


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
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"].clone()
    return copy


def source_of(node: object) -> object:
    """The input, or the result of a kernel, that a node is a view of."""
    while isinstance(node, Node) and isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node


def _save_symbols(forward: Graph, backward: Graph) -> None:
    """Has the forward graph save the symbols in what the backward graph gets that nothing there defines.

    The partitioner saves symbols that are inputs of the graph. The size of a shard is no input; the shard is one.
    Inductor gives up on a saved tensor of 3 * s rows if s is neither an input nor the whole size of one.
    """
    saved = backward.find_nodes(op="placeholder")
    sizes = _sizes(forward, _undefined(saved))
    if not sizes:
        return
    output = forward.output_node()
    output.args = ((*_outputs(forward), *sizes), *output.args[1:])
    described = output.meta.get("desc")
    if described is not None:
        count = sum(isinstance(d, SavedForBackwardsAOTOutput) for d in described)
        more = [SavedForBackwardsAOTOutput(count + n) for n in range(len(sizes))]
        output.meta["desc"] = type(described)([*described, *more])
    numbers = [node for node in saved if isinstance(node.meta.get("val"), torch.SymInt)]
    after = numbers[-1] if numbers else None
    with backward.inserting_before(saved[0]) if after is None else backward.inserting_after(after):
        for size in sizes if after is None else reversed(sizes):
            backward.placeholder(size.name).meta = dict(size.meta)


def _undefined(nodes: Sequence[Node]) -> set[sympy.Symbol]:
    """The symbols in sizes, and in sizes and strides of tensors, that are not themselves among these."""
    values = [x.meta.get("val") for x in nodes]
    numbers = [n for t in values for n in ((*t.shape, *t.stride()) if isinstance(t, Tensor) else (t,))]
    terms = [n.node.expr for n in numbers if isinstance(n, torch.SymInt)]
    return {s for t in terms for s in free_symbols(t)} - {t for t in terms if t.is_Symbol}


def _sizes(graph: Graph, symbols: set[sympy.Symbol]) -> list[Node]:
    """Adds nodes that read symbols off the sizes of a graph's inputs; returns one for each symbol that was found."""
    found: dict[sympy.Symbol, Node] = {}
    inputs = graph.find_nodes(op="placeholder") if symbols else []
    for x in inputs:
        value = x.meta.get("val")
        for dim, n in enumerate(value.shape if isinstance(value, Tensor) else ()):
            symbol = n.node.expr if isinstance(n, torch.SymInt) else None
            if symbol in symbols and symbol not in found:
                with graph.inserting_after(inputs[-1]):
                    found[symbol] = graph.call_function(aten.sym_size.int, (x, dim))
                found[symbol].meta["val"] = n
    return [found[s] for s in sorted(found, key=str)]
