"""Gradients of plain leaf tensors are all-reduced in buckets in eager mode, as by DistributedDataParallel.

A leaf, such as the weight of a module, is promoted through two autograd nodes. In the backward pass the inner one
(`Promote`) adds this rank's term of the gradient to the open bucket of the backward pass. The outer one has the lowest
priority of all nodes, so that it runs when nothing else can: it reduces what is in the buckets, and passes the complete
gradient on to the leaf. Hooks of the leaf, `torch.autograd.grad` and what else looks at gradients of leaves thus see
complete plain tensors, and no collective depends on whether a rank has hooks. What plain ops make of leaves, such as a
normalized weight, counts as a leaf: its gradient is passed on to them at the end.

Buckets follow from the order of the backward pass, which is the same on all ranks. A bucket that holds
`config.gradient_bucket_bytes` is reduced at once, while the backward pass goes on.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial

from shardcompile import compat, config
from shardcompile.errors import UnsupportedOpError
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Spec
from shardcompile.tensor.autograd import Promote, brought_to, complete_gradient


def promote_leaf(x: Tensor, cls: type[Sharded], mesh: DeviceMesh) -> Sharded:
    """Promotes a plain tensor for which `may_wait` holds to a replicated one; its gradient is reduced with others."""
    alias = torch.ops.aten.alias.default(x)
    node = alias.grad_fn
    compat.run_after_others(node)
    node.register_prehook(_complete)
    return Promote.apply(alias, cls, mesh, _deposit)  # type: ignore[no-any-return]


def may_wait(x: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the gradient of a plain tensor may be reduced at the end of the backward pass.

    It may if nothing but plain leaves receive it, on the device of the mesh, and it is not traced.
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_leaf or _is_made_of_leaves(x))
        and x.device.type == mesh.device_type
        and config.gradient_bucket_bytes > 0
        and not compat.is_traced()
        and not compat.is_transforming()
        and not compat.gradients_are_read_while_backward_runs()
    )


_NODES_BEHIND = 32
"""How many autograd nodes may lie between leaves and a tensor that counts as one; each promotion walks over them."""


def _is_made_of_leaves(x: Tensor) -> bool:
    """Whether a few ops of torch, and nothing else, lie between leaves and a plain tensor.

    A node of Python may lead to sharded tensors, whose gradients are reduced in turn, or into compiled code. That of a
    module's backward hook leads on to what it wraps; a rank may have such hooks that others do not have.
    """
    seen: set[Node] = set()
    pending = [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            if node.name() != "BackwardHookFunctionBackward":
                return False
        elif len(seen) == _NODES_BEHIND:
            return False
        else:
            seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return True


class _Bucket:
    """Terms of gradients of one backward pass that one collective reduces.

    Args:
        grad: a gradient, of the class and layout of all, but for the shape.

    Attributes:
        nbytes: bytes of all terms.
    """

    def __init__(self, grad: Sharded) -> None:
        self._cls, self._like = type(grad), grad._spec.layout
        self._terms: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._reduced: Sharded | None = None
        self._values: dict[int, Tensor] | None = None
        self.nbytes = 0

    def add(self, term: Tensor) -> int:
        """Adds this rank's term of a gradient, and returns its position."""
        self._terms.append(term)
        self._shapes.append(term.shape)
        self.nbytes += term.nbytes
        return len(self._terms) - 1

    def start(self) -> None:
        """Starts the collective, unless it has started."""
        if self._reduced is None:
            flat = [term.reshape(-1) for term in self._terms]
            self._terms.clear()
            joined = flat[0] if len(flat) == 1 else torch.cat(flat)
            layout = Layout.chunked(self._like.mesh, self._like.placements, joined.shape, joined.dtype)
            terms = self._cls._wrap(joined, Spec.of(layout, (1,)))
            self._reduced = brought_to(terms, layout.replicated(), async_op=True)

    def take(self, position: int) -> Tensor:
        """Waits for the collective, and returns a reduced gradient, once. It has memory of its own."""
        if self._values is None:
            assert self._reduced is not None, "a bucket is started before its values are taken"
            joined = self._reduced._local_tensor
            sizes = [shape.numel() for shape in self._shapes]
            parts = [joined] if len(sizes) == 1 else [part.clone() for part in joined.split(sizes)]
            self._values = {
                i: part.view(shape) for i, (part, shape) in enumerate(zip(parts, self._shapes, strict=True))
            }
        return self._values.pop(position)


class _BackwardPass:
    """The buckets of one backward pass. The gradients in them keep it alive."""

    def __init__(self) -> None:
        self._open: dict[object, _Bucket] = {}
        self._outer_nodes_run = False

    def deposit(self, grad: Sharded) -> None:
        """Adds this rank's term of a gradient to a bucket.

        Raises:
            UnsupportedOpError: outer nodes ran while a CPU computed the gradient of this one. The engine has a thread
                for each device, which runs what is ready for it, so that ranks may differ in what they reduce together.
        """
        if self._outer_nodes_run and grad.device.type != "cpu":
            raise UnsupportedOpError(
                f"the backward pass reaches a parameter of shape {tuple(grad.shape)} on {grad.device} by way of "
                "another device. Gradients of plain tensors cannot be reduced together then: set "
                "shardcompile.config.gradient_bucket_bytes = 0 on all ranks"
            )
        layout = grad._spec.layout
        key = (id(layout.mesh), layout.placements, layout.dtype, grad.device)
        if key not in self._open:
            self._open[key] = _Bucket(grad)
        bucket = self._open[key]
        grad._deposit = _Deposit(self, bucket, bucket.add(grad._local_tensor))
        if bucket.nbytes >= config.gradient_bucket_bytes:
            bucket.start()
            del self._open[key]

    def start(self) -> None:
        """Starts the collectives of all open buckets, for an outer node."""
        self._outer_nodes_run = True
        for bucket in self._open.values():
            bucket.start()
        self._open.clear()


class _Deposit(NamedTuple):
    """Where the reduced value of a gradient is to be found."""

    backward_pass: _BackwardPass
    bucket: _Bucket
    position: int


_PASSES: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()
"""The backward passes that have gradients in buckets, by the engine's number."""


def _deposit(grad: Sharded) -> Tensor:
    """Leaves a gradient that is a sum over ranks to the outer node; makes any other one complete."""
    placements = grad._spec.layout.placements
    sums = all(p.is_replicate() or (isinstance(p, Partial) and p.reduce_op == "sum") for p in placements)
    if (
        torch.is_grad_enabled()
        or not sums
        or not grad._spec.layout.is_partial
        or type(grad._local_tensor) is not Tensor
    ):
        return complete_gradient(grad)
    number = compat.backward_pass()
    backward_pass = _PASSES.get(number)
    if backward_pass is None:
        backward_pass = _PASSES[number] = _BackwardPass()
    backward_pass.deposit(grad)
    return grad


def _complete(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Makes the gradient that the outer node receives complete and plain."""
    (grad,) = gradients
    if not isinstance(grad, Sharded):
        return gradients
    if grad._deposit is None:
        return (complete_gradient(grad),)
    backward_pass, bucket, position = grad._deposit
    backward_pass.start()
    return (bucket.take(position),)
