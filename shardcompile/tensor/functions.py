"""Functions of torch that do something of their own above autograd, before they come to an op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardcompile import compat, config
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import state_function, state_named_function
from shardcompile.sharded import Sharded
from shardcompile.tensor import flex, masks
from shardcompile.tensor.arguments import align_gradient
from shardcompile.tensor.autograd import in_one_piece
from shardcompile.tensor.core import ShardTensor
from shardcompile.tensor.cumulative import cumprod
from shardcompile.tensor.einsum import einsum
from shardcompile.tensor.embedding_bags import embedding_bag
from shardcompile.tensor.fourier import FOURIER_FUNCTIONS
from shardcompile.tensor.grouped import grouped_mm, grouped_mm_fallback
from shardcompile.tensor.higher_order import teach_higher_order_ops
from shardcompile.tensor.interpolation import interpolate
from shardcompile.tensor.masked_index import has_mask
from shardcompile.tensor.memory import MEMORY_FUNCTIONS
from shardcompile.tensor.numbers import NUMBER_FUNCTIONS, READS_NUMBER, as_number
from shardcompile.tensor.padding import pad
from shardcompile.tensor.random import FUNCTIONS as RANDOM_FUNCTIONS
from shardcompile.tensor.recurrent import RECURRENT_FUNCTIONS
from shardcompile.tensor.unique import unique, unique_consecutive

aten = torch.ops.aten


def _set_data(_: object, x: object, value: object) -> None:
    """``x.data = value``: torch exchanges the outer tensor only."""
    if type(x) is not ShardTensor or type(value) is not ShardTensor:
        raise UnsupportedOpError("x.data = y needs two sharded tensors or none; see ShardTensor.from_local")
    torch.Tensor.data.__set__(x, value)  # type: ignore[attr-defined]
    x._local_tensor, x._spec = value._local_tensor, value._spec
    x._keys = x._flat = x._hints = x._marked = x._copied = None


def _require_grad(func: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``x.requires_grad_()`` and ``x.requires_grad = True``."""
    wanted_before = x.requires_grad
    out = func(x, *args, **kwargs)
    if type(x) is ShardTensor and x.is_leaf and x.requires_grad and not wanted_before and x._holds_values:
        align_gradient(x)
    return out


def _gradient(func: Callable[..., object], x: Sharded) -> object:
    """``x.grad``; Dynamo, which reads it of parameters while it compiles an optimizer's step, is told what it is of."""
    grad = func(x)
    if type(grad) is ShardTensor and compat.is_compiling() and getattr(x, "_is_param", False):
        grad._beside_parameter = grad._spec == x._spec
    return grad


def _deep_copy(func: Callable[..., Sharded], x: Tensor, memo: dict[int, object]) -> Tensor:
    known = id(x) in memo
    out = func(x, memo)
    if not known and out.is_leaf:
        align_gradient(out)
    return out


def _product(func: Callable[..., Tensor], x: object, weight: object, *args: object, **kwargs: object) -> Tensor:
    """`linear` and `matmul`, which flatten all leading dims of `x` into one.

    A sharded dim can only be flattened as the leading one, so it is moved there first. The result is stored as that of
    plain tensors: a view of it would be a copy otherwise, and what is written to that would be lost.
    """
    if isinstance(x, ShardTensor) and x.ndim > 2 and isinstance(weight, Tensor) and weight.ndim <= 2:
        layout = x._spec.layout
        partition = [d for d in range(x.ndim - 1) if layout.partitions[d] is not None]
        if partition and any(not isinstance(e, int) or e != 1 for e in layout.shape[: partition[0]]):
            out = func(x.movedim(partition[0], 0), weight, *args, **kwargs).movedim(0, partition[0])
            # Not `contiguous`, which leaves strides of sizes of 1 as they are: by them kernels order their results.
            return out.clone(memory_format=torch.contiguous_format)
    return func(x, weight, *args, **kwargs)


def _fill_diagonal(func: Callable[..., Tensor], x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """`fill_diagonal_`, which asks for strides as numbers; a trace may know them as formulas."""
    if x.ndim == 2 and not wrap and compat.is_compiling():
        x.diagonal().fill_(fill_value)
        return x
    return func(x, fill_value, wrap)


def _attend(
    func: Callable[..., object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """`scaled_dot_product_attention`: its fused kernels draw random numbers of their own."""
    if compat.is_compiling():
        _tell_equal_sizes(query, key, value, attn_mask)
        settings = config.ways_of_attention()
        compat.add_guard(lambda _: config.ways_of_attention() == settings, "attention goes as it was set")
    dropout = kwargs.get("dropout_p", args[0] if args else 0.0)
    with contextlib.nullcontext() if dropout == 0.0 else sdpa_kernel(SDPBackend.MATH):
        return func(query, key, value, attn_mask, *args, **kwargs)


def _tell_equal_sizes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Compare sizes that have symbols of their own: torch 2.15 takes no fused kernel unless they are known as equal.

    They are global sizes, so that the guards hold on all ranks or on none.
    """
    if not query.ndim == key.ndim == value.ndim:
        return
    dims = [d for d in range(query.ndim) if d != query.ndim - 2]
    pairs = [(query.shape[d], key.shape[d]) for d in dims] + list(zip(key.shape, value.shape, strict=True))
    if mask is not None:
        wanted = (*query.shape[:-1], key.shape[-2])
        pairs += list(zip(reversed(mask.shape), reversed(wanted), strict=False))
    for a, b in pairs:
        numbers = [n for n in (a, b) if isinstance(n, int)]
        if len(numbers) < 2 and 1 not in numbers:  # a 1 is broadcast
            compat.same_symbol(a, b)
    if query.ndim > 2 and compat.size_hint(key.shape[-3]):
        bool(query.shape[-3] % key.shape[-3] == 0)


def _cdist(
    func: Callable[..., object],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> object:
    """`cdist`; where only a run tells the number of rows, by differences: torch asks if there are more than 25."""
    if compute_mode.endswith("_if_necessary") and any(compat.is_unbacked(n) for n in (*x1.shape, *x2.shape)):
        compute_mode = "donot_use_mm_for_euclid_dist"
    return func(x1, x2, p, compute_mode)


def _sgn(func: Callable[..., object], x: object, **kwargs: Tensor | None) -> object:
    """`sgn`, which of real numbers is `sign`; its gradient is a kind of tensor that has no symbolic size."""
    return func(x, **kwargs) if not isinstance(x, Tensor) or x.is_complex() else torch.sign(x, **kwargs)


def _unsafe_view(func: Callable[..., Sharded], x: Sharded, *args: object) -> Tensor:
    """A view that AOTAutograd returns in place of a compiled function's output, before that has a gradient."""
    out = func(x, *args)
    if type(x) is ShardTensor and not x.requires_grad:
        out._align_grad = x._align_grad
    return out


def _tensor_split(func: Callable[..., object], x: object, *args: object, **kwargs: object) -> object:
    """`tensor_split`, whose kernel reads the memory of a tensor that says where to split."""

    def known(where: object) -> object:
        if isinstance(where, Tensor) and compat.is_compiling():
            raise UnsupportedOpError(
                f"{func.__name__} of {x!r} by a tensor would need its values while it is compiled; pass a list of ints"
            )
        whole = where.full_tensor() if isinstance(where, ShardTensor) else where
        return whole.tolist() if isinstance(whole, Tensor) else whole

    if "tensor_indices_or_sections" in kwargs:
        args = (kwargs.pop("tensor_indices_or_sections"), *args)
    return func(x, *map(known, args), **{k: known(v) for k, v in kwargs.items()})


_Tensor: Any = torch.Tensor
_OF_MODULES: Any = torch._C._nn  # what is left of `torch.nn.functional` in a graph of Dynamo's


def _of_neighbours(run: Callable[..., object]) -> Callable[..., object]:
    """A function that looks at where the rows of a shard are, on tensors whose shards have neighbouring rows.

    Not for functions that return views: what is brought together is a value of its own.
    """

    def settled(func: object, *args: object, **kwargs: object) -> object:
        given = torch.utils._pytree.tree_map_only(ShardTensor, in_one_piece, (args, kwargs))
        return run(func, *given[0], **given[1])

    return settled


state_function([_Tensor.data.__set__], _set_data)
for _function, _run in {**MEMORY_FUNCTIONS, **NUMBER_FUNCTIONS, **RECURRENT_FUNCTIONS}.items():
    state_function([_function], _run)
state_function(READS_NUMBER, as_number, when=lambda _: compat.dispatch_is_off())
state_function([_Tensor.tensor_split, torch.tensor_split], _tensor_split, aten.tensor_split)
state_function([_Tensor.__deepcopy__], _deep_copy)
state_function([_Tensor.grad.__get__], _gradient)
state_function([_Tensor.requires_grad_, _Tensor.requires_grad.__set__], _require_grad)
state_function([aten._unsafe_view], _unsafe_view, aten._unsafe_view.default)
state_function([_Tensor.fill_diagonal_], _fill_diagonal, aten.fill_diagonal_.default)
state_function([torch.cdist], _cdist)
state_function([torch.sgn, _Tensor.sgn], _sgn, aten.sgn.default)
state_function(
    [torch.nn.functional.scaled_dot_product_attention],
    _of_neighbours(_attend),
    aten.scaled_dot_product_attention.default,
)
state_function([torch.nn.functional.embedding_bag], _of_neighbours(embedding_bag), aten._embedding_bag.default)
state_function([torch.nn.functional.pad, _OF_MODULES.pad], _of_neighbours(pad), aten.pad.default)
state_function([torch.nn.functional.interpolate], interpolate)
state_function([_Tensor.__getitem__], masks.getitem, when=lambda args: has_mask(args[1]))
state_function([_Tensor.__setitem__], masks.setitem, when=lambda args: has_mask(args[1]))
state_function([_Tensor.index_put, torch.index_put], masks.index_put)
state_function([_Tensor.index_put_, torch.index_put_], masks.index_put_)
state_function([_Tensor.masked_select, torch.masked_select], masks.masked_select, aten.masked_select.default)
state_function([_Tensor.masked_scatter, torch.masked_scatter], masks.masked_scatter, aten.masked_scatter.default)
state_function([_Tensor.masked_scatter_], masks.masked_scatter_, aten.masked_scatter_.default)
state_function([_Tensor.nonzero, torch.nonzero], masks.nonzero, aten.nonzero.default)
state_function([_Tensor.argwhere, torch.argwhere], masks.argwhere, aten.argwhere.default)
state_function([torch.where], masks.where, when=lambda args: len(args) == 1)
state_function([torch.unique, _Tensor.unique], unique, aten._unique2.default)
state_function(
    [torch.unique_consecutive, _Tensor.unique_consecutive], unique_consecutive, aten.unique_consecutive.default
)
state_function([torch.cumprod, _Tensor.cumprod], _of_neighbours(cumprod), aten.cumprod.default)
state_function([torch.nn.functional.linear], _product, aten.linear.default)
state_function([torch.matmul, _Tensor.matmul, _Tensor.__matmul__], _product, aten.matmul.default)
state_function([torch.einsum, torch._C._VariableFunctions.einsum], einsum, aten.einsum.default)  # type: ignore[attr-defined]
state_function([torch._grouped_mm], _of_neighbours(grouped_mm), aten._grouped_mm.default)  # what F.grouped_mm calls
state_named_function("transformers.grouped_mm_fallback", _of_neighbours(grouped_mm_fallback))
for _function, _run in (FOURIER_FUNCTIONS | RANDOM_FUNCTIONS).items():
    state_function([_function], _run)
state_function([torch.ops.higher_order.flex_attention], flex.attend)
for _op, _refuse in teach_higher_order_ops(ShardTensor).items():
    state_function([_op], _refuse)
