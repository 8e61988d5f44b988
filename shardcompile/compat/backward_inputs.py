"""Inputs of the graphs that AOTAutograd makes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from torch.fx import Graph, Node


def saved_for_backward(graph: Graph) -> frozenset[Node]:
    """The inputs of a backward graph that the forward pass has saved, which are freed after their last use.

    Autograd hands them over (`steal_args`), and generated code deletes them. Inputs of the forward pass belong to the
    user, gradients to autograd's engine. Both are told by the names that AOTAutograd gives them.
    """
    inputs = graph.find_nodes(op="placeholder")
    if not any(n.name.startswith("tangents") for n in inputs):
        return frozenset()
    return frozenset(n for n in inputs if not n.name.startswith(("primals", "tangents", "fwd_", "bwd_")))
