"""Torch functions of plain sparse tensors, which are the same on every rank, and sharded dense tensors.

A product keeps the dims of the dense operand sharded that are not summed over. Everything else runs on full tensors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from shardcompile import config
from shardcompile.collectives import all_reduce
from shardcompile.dispatch.calls import kind_of, plain_text
from shardcompile.errors import UnsupportedOpError
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Spec, contiguous_stride
from shardcompile.tensor.arguments import IN_PLACE, not_in_place
from shardcompile.tensor.autograd import FromLocal, Promote, ToLocal, redistributed

log = logging.getLogger("shardcompile")

_PRODUCTS = ("matmul", "__matmul__", "mm", "mv", "bmm", "_sparse_mm", "linear")
_SUMS = ("addmm", "_sparse_addmm", "addmv")
_PROPERTIES = ("__get__", "__set__", "__delete__")
_LOGGED: set[str] = set()


def is_sparse(a: object) -> bool:
    """Returns whether an argument is a plain sparse or nested tensor."""
    return isinstance(a, Tensor) and not isinstance(a, Sharded) and (a.layout is not torch.strided or a.is_nested)


def any_sparse(func: Callable[..., object], args: Iterable[object]) -> bool:
    """Returns whether a function takes a sparse tensor as a value."""
    return func.__name__ not in _PROPERTIES and any(map(is_sparse, _leaves(args)))


def _leaves(args: Iterable[object]) -> Iterable[object]:
    for a in args:
        if isinstance(a, (list, tuple)):
            yield from _leaves(a)
        else:
            yield a


def with_sparse_operands(
    cls: type[Sharded], func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Runs a function whose arguments contain plain sparse and sharded tensors.

    Args:
        cls: the class of sharded tensors.
        func: the function, as `__torch_function__` receives it.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        UnsupportedOpError: the result is sparse.
    """
    name = func.__name__
    out: Any = NotImplemented
    if name == "__rmatmul__":
        func, args, name = torch.matmul, (args[1], args[0]), "matmul"
    if any(isinstance(a, Tensor) and a.is_nested for a in args):
        pass  # nested tensors always run on full tensors
    elif name in _PRODUCTS and not kwargs and len(args) == 2:
        out = _product(cls, func, *args)
    elif name in _SUMS and len(args) == 3 and set(kwargs) <= {"alpha", "beta"}:
        out = _sum(name, *args, **kwargs)
    if out is NotImplemented:
        out = _on_full(cls, func, args, kwargs)
    return out


def _product(cls: type[Sharded], func: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Multiplies a sparse and a dense operand: each rank multiplies its local shard of the dense one."""
    sparse, dense = (a, b) if is_sparse(a) else (b, a)
    if not isinstance(dense, Sharded):
        return NotImplemented
    layout = dense._spec.layout.reduced()
    summed = dense.ndim - 1 if sparse is b or dense.ndim == 1 else dense.ndim - 2
    # Sparse batches are replicated, so the batch dims of the dense operand have to be, too.
    gathered = {summed, *(range(dense.ndim - 2) if sparse.ndim > 2 else ())}
    partitions = [None if d in gathered else c for d, c in enumerate(layout.partitions)]
    needed = Layout.of_partitions(layout.mesh, layout.shape, layout.dtype, partitions)
    if any(c is not layout.partitions[d] for d, c in enumerate(partitions)):
        _report_gather(func, (a, b), f"dim {summed} of the dense one is summed over")
    local = ToLocal.apply(redistributed(dense, needed), None)
    if sparse.requires_grad and torch.is_grad_enabled():
        sharding_dims = [m for m, p in enumerate(needed.placements) if isinstance(p, Shard)]
        sparse = CompleteGradient.apply(sparse, layout.mesh, sharding_dims)
    empty = [d for d, n in enumerate(local.shape) if n == 0 and partitions[d] is not None]
    for d in empty:  # sparse kernels need at least one column
        local = torch.cat([local, local.new_zeros([1 if e == d else n for e, n in enumerate(local.shape)])], d)
    out = func(sparse, local) if is_sparse(a) else func(local, sparse)
    for d in empty:
        out = out.narrow(d, 0, 0)
    shape = [n if c is None else needed.shape[d] for d, (n, c) in enumerate(zip(out.shape, partitions, strict=True))]
    result = Layout.of_partitions(layout.mesh, shape, out.dtype, partitions)
    return FromLocal.apply(out.contiguous(), cls, Spec.of(result, contiguous_stride(result.shape)))


def _sum(name: str, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Computes ``beta * x + alpha * (a @ b)`` with a sparse `a` or `b`."""
    if is_sparse(x) or not (is_sparse(a) or is_sparse(b)):
        return NotImplemented
    multiply: Callable[..., Tensor] = torch.sparse.mm if name == "_sparse_addmm" else torch.matmul
    product = multiply(a, b)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # `x` is ignored even where it is not finite
        return product + x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return product + (x if beta == 1 else x * beta)


def _on_full(
    cls: type[Sharded], func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Runs a function on full tensors. Its dense results become replicated tensors."""
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    sharded = [x for x in leaves if isinstance(x, Sharded)]
    mesh, text = sharded[0]._spec.layout.mesh, _describe(func, leaves)
    if isinstance(kwargs.get("out"), Tensor):
        raise UnsupportedOpError(f"{text} with out=; leave it out, and copy the result")
    target: Any = None
    run: Callable[..., Any] | None = func
    if func in IN_PLACE and isinstance(args[0], Sharded):
        target, run = args[0], not_in_place(func)
        if run is None:
            raise UnsupportedOpError(
                f"{text} writes to a sharded tensor; write a dense one, such as to_dense() of the sparse one"
            )
    assert run is not None, "there is a function to run"
    _report_gather(func, leaves, "it has no rule for sparse and nested tensors")
    full = torch.utils._pytree.tree_map_only(Sharded, lambda x: x.full_tensor(), (tuple(args), dict(kwargs)))

    def wrapped(out: object) -> object:
        if isinstance(out, (list, tuple)):
            return type(out)(map(wrapped, out))
        if is_sparse(out):
            raise UnsupportedOpError(
                f"{text} returns a {kind_of(out)} tensor, and shards are dense. Take x.full_tensor() of the sharded "  # type: ignore[arg-type]
                "operands first: then the result is a plain tensor of that kind, the same on every rank"
            )
        return Promote.apply(out, cls, mesh) if isinstance(out, Tensor) else out

    out = wrapped(run(*full[0], **full[1]))
    return out if target is None else target.copy_(out)  # type: ignore[arg-type]


class CompleteGradient(torch.autograd.Function):
    """Returns a plain sparse tensor unchanged, and all-reduces its gradient, of which each rank computes one term."""

    @staticmethod
    def forward(ctx: Any, sparse: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
        """Returns the tensor."""
        ctx.groups = [mesh.get_group(m) for m in mesh_dims]
        return sparse.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """All-reduces the values of the gradient; their indices are those of the tensor, the same on every rank."""
        if grad.layout is torch.sparse_coo:
            grad = grad.coalesce()
        values = grad if grad.layout is torch.strided else grad.values()
        for group in ctx.groups:
            values = all_reduce(values.contiguous(), group)  # type: ignore[assignment]
        return _with_values(grad, values), None, None


def _with_values(x: Tensor, values: Tensor) -> Tensor:
    """Returns a sparse tensor with the indices of `x` and other values."""
    if x.layout is torch.strided:
        return values
    if x.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)
    by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (x.crow_indices(), x.col_indices()) if by_rows else (x.ccol_indices(), x.row_indices())
    return torch.sparse_compressed_tensor(*indices, values, x.shape, layout=x.layout, check_invariants=False)


def _describe(func: Callable[..., object], given: Sequence[object]) -> str:
    operands = [
        x._spec.layout.describe() if isinstance(x, Sharded) else plain_text(x) for x in given if isinstance(x, Tensor)
    ]
    return f"{func.__name__} of {'; '.join(operands)}"


def _report_gather(func: Callable[..., object], given: Sequence[object], why: str) -> None:
    """Logs, once for each function, that sharded operands are gathered; raises an error if the fallback is forbidden.

    Raises:
        UnsupportedOpError: `config.fallback` is "error".
    """
    text = f"{_describe(func, given)}: sharded operands are gathered, as {why}"
    if config.fallback == "error":
        raise UnsupportedOpError(f"{text}; shardcompile.config.fallback is 'error'. Redistribute them first")
    if func.__name__ not in _LOGGED:
        _LOGGED.add(func.__name__)
        log.info(text)
        if config.fallback == "warn":
            warnings.warn(text, stacklevel=2)
