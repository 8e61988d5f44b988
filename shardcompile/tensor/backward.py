"""`torch.autograd.backward` and `torch.autograd.grad` of sharded tensors.

Code that runs inside of a backward pass may call torch functions: the recomputation of a checkpoint, a hook, the
backward of a custom autograd function. `ShardTensor.__torch_function__` serves them, and promotes plain parameters
among their arguments, only if the backward pass does not start with torch functions disabled. So the engine is given
gradient edges instead of sharded tensors: an edge is not asked for a torch function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardcompile import compat
from shardcompile.sharded import Sharded
from shardcompile.tensor.arguments import align_gradient, laid_out

Root = Tensor | GradientEdge

_autograd: Any = torch.autograd  # its annotations take tensors or edges, not both


def backward(
    tensors: object,
    grad_tensors: object = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: object = None,
    inputs: object = None,
) -> None:
    """Implements `torch.autograd.backward`, with the arguments of that."""
    roots, gradients = _laid_out(tensors, grad_tensors if grad_tensors is not None else grad_variables)
    chosen = None if inputs is None else _sequence(inputs)
    if _needs_tensors(roots, chosen or ()):
        with torch._C.DisableTorchFunctionSubclass():
            _autograd.backward(roots, gradients, retain_graph, create_graph, inputs=inputs)
        return
    for x in chosen or ():
        if isinstance(x, Sharded) and not x.is_leaf:
            x.retain_grad()  # as torch does with tensors
    _autograd.backward(
        _edges(roots),
        _with_ones(roots, gradients),
        retain_graph,
        create_graph,
        inputs=None if chosen is None else _edges(chosen),
    )


def grad(
    outputs: object,
    inputs: object,
    grad_outputs: object = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Implements `torch.autograd.grad`, with the arguments of that."""
    chosen = _sequence(inputs)
    options: dict[str, Any] = {
        "retain_graph": retain_graph,
        "create_graph": create_graph,
        "only_inputs": only_inputs,
        "allow_unused": allow_unused,
    }
    if is_grads_batched or _needs_tensors(_sequence(outputs), chosen):
        options |= {"is_grads_batched": is_grads_batched, "materialize_grads": materialize_grads}
        with torch._C.DisableTorchFunctionSubclass():
            return _autograd.grad(outputs, chosen, grad_outputs, **options)  # type: ignore[no-any-return]
    roots, gradients = _laid_out(outputs, grad_outputs)
    if materialize_grads:
        if allow_unused is False:
            raise ValueError("materialize_grads=True needs allow_unused to be True, or not to be passed")
        options["allow_unused"] = True  # torch materializes no gradient of an edge
    found = _autograd.grad(_edges(roots), _edges(chosen), _with_ones(roots, gradients), **options)
    if not materialize_grads:
        return found  # type: ignore[no-any-return]
    return tuple(
        torch.zeros_like(x, requires_grad=create_graph) if g is None and isinstance(x, Tensor) else g
        for g, x in zip(found, chosen, strict=True)
    )


def _sequence(values: object) -> Sequence[Root]:
    if isinstance(values, (Tensor, GradientEdge)):
        return (values,)
    return tuple(values.values() if isinstance(values, Mapping) else values)  # type: ignore[arg-type]


def _laid_out(tensors: object, gradients: object) -> tuple[Sequence[Root], Sequence[Tensor | None]]:
    """Returns the roots and their gradients in the layouts that these have."""
    roots = _sequence(tensors)
    given: list[Any] = [None] * len(roots) if gradients is None else list(_sequence(gradients))
    for i, (x, gradient) in enumerate(zip(roots, given, strict=False)):
        if isinstance(x, Sharded):
            given[i] = laid_out(gradient, x._spec.layout.reduced(), type(x))
    return roots, given


def _needs_tensors(roots: Sequence[Root], inputs: Sequence[Root]) -> bool:
    """Whether edges would not do: in a trace, and where torch raises an error for a tensor."""
    sharded = [x for x in (*roots, *inputs) if isinstance(x, Sharded)]
    return compat.is_traced() or not all(x.requires_grad for x in sharded)


def _edges(tensors: Sequence[Root]) -> list[Root]:
    """Replaces sharded tensors by their gradient edges. The caller keeps the tensors, which own the nodes."""
    for x in tensors:
        if isinstance(x, Sharded) and x._align_grad:
            align_gradient(x)
    return [_edge(x) if isinstance(x, Sharded) else x for x in tensors]


def _edge(x: Sharded) -> GradientEdge:
    return get_gradient_edge(x) if x.grad_fn is None else GradientEdge(x.grad_fn, x.output_nr)


def _with_ones(roots: Sequence[Root], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replaces the gradients that torch creates for tensors of one element, since an edge does not tell the layout."""
    if len(roots) != len(gradients):
        return list(gradients)  # torch raises the error
    return [
        torch.ones_like(x.detach())
        if g is None and isinstance(x, Sharded) and x.numel() == 1 and x.dtype.is_floating_point
        else g
        for x, g in zip(roots, gradients, strict=True)
    ]


WITH_FUNCTIONS_ENABLED: dict[Any, Callable[..., object]] = {
    torch.autograd.backward: backward,
    torch.autograd.grad: grad,
    Tensor.backward: lambda x, *args, **kwargs: x.backward(*args, **kwargs),
}
"""Implementations that run with torch functions enabled, by torch function."""
