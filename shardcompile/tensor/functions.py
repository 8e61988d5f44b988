"""Implementations of torch functions on sharded tensors above autograd, and the table that registers them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
from shardcompile.tensor.autograd import with_contiguous_shards
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
from shardcompile.tensor.traced import WITH_THE_FIRST
from shardcompile.tensor.unique import unique, unique_consecutive

aten = torch.ops.aten


def _set_data(_: object, x: object, value: object) -> None:
    """Implements ``x.data = value``: torch replaces the outer tensor only, so the local shard is replaced here."""
    if type(x) is not ShardTensor or type(value) is not ShardTensor:
        raise UnsupportedOpError("x.data = y needs two sharded tensors or none; see ShardTensor.from_local")
    torch.Tensor.data.__set__(x, value)  # type: ignore[attr-defined]
    x._local_tensor, x._spec = value._local_tensor, value._spec
    x._keys = x._flat = x._hints = x._marked = x._copied = None


def _require_grad(func: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Implements ``x.requires_grad_()`` and ``x.requires_grad = True``."""
    required_before = x.requires_grad
    out = func(x, *args, **kwargs)
    if type(x) is ShardTensor and x.is_leaf and x.requires_grad and not required_before and x._holds_values:
        align_gradient(x)
    return out


def _gradient(func: Callable[..., object], x: Sharded) -> object:
    """Implements ``x.grad``; marks the gradient of a parameter for Dynamo, which compiles optimizer steps with it."""
    grad = func(x)
    if type(grad) is ShardTensor and compat.is_compiling() and getattr(x, "_is_param", False):
        grad._belongs_to_parameter = grad._spec == x._spec
    return grad


def _deep_copy(func: Callable[..., Sharded], x: Tensor, memo: dict[int, object]) -> Tensor:
    already_copied = id(x) in memo
    out = func(x, memo)
    if not already_copied and out.is_leaf:
        align_gradient(out)
    return out


def _product(func: Callable[..., Tensor], x: object, weight: object, *args: object, **kwargs: object) -> Tensor:
    """Implements `linear` and `matmul`, which flatten all leading dims of `x` into one.

    A sharded dim can only be flattened as the leading one, so it is moved there first. The result gets the strides of
    plain tensors: with others a view of it would be a copy, and writes to that view would be lost.
    """
    if isinstance(x, ShardTensor) and x.ndim > 2 and isinstance(weight, Tensor) and weight.ndim <= 2:
        layout = x._spec.layout
        sharded_dims = [d for d in range(x.ndim - 1) if layout.partitions[d] is not None]
        if sharded_dims and any(not isinstance(n, int) or n != 1 for n in layout.shape[: sharded_dims[0]]):
            out = func(x.movedim(sharded_dims[0], 0), weight, *args, **kwargs).movedim(0, sharded_dims[0])
            # `contiguous` would keep the strides of dims of size 1, from which kernels derive the order of their
            # results.
            return out.clone(memory_format=torch.contiguous_format)
    return func(x, weight, *args, **kwargs)


def _may_flatten(args: Sequence[Any]) -> bool:
    """Whether `linear` or `matmul` may have leading dims to flatten."""
    return not args or not isinstance(args[0], Tensor) or args[0].ndim > 2


def _fill_diagonal(func: Callable[..., Tensor], x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Implements `fill_diagonal_`; torch's reads the strides as integers, and they may be symbolic expressions."""
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
    """Implements `scaled_dot_product_attention`.

    With dropout the math backend is chosen, since the fused kernels draw random numbers of their own.
    """
    if compat.is_compiling():
        _guard_equal_sizes(query, key, value, attn_mask)
        settings = config.attention_settings()
        compat.add_guard(lambda _: config.attention_settings() == settings, "the attention strategy is unchanged")
    dropout = kwargs.get("dropout_p", args[0] if args else 0.0)
    with contextlib.nullcontext() if dropout == 0.0 else sdpa_kernel(SDPBackend.MATH):
        return func(query, key, value, attn_mask, *args, **kwargs)


def _guard_equal_sizes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Guards on the equality of sizes with different symbols; without it torch 2.15 uses no fused kernel.

    The guards are on global sizes, so they hold on all ranks or on none.
    """
    if not query.ndim == key.ndim == value.ndim:
        return
    dims = [d for d in range(query.ndim) if d != query.ndim - 2]
    pairs = [(query.shape[d], key.shape[d]) for d in dims] + list(zip(key.shape, value.shape, strict=True))
    if mask is not None:
        wanted = (*query.shape[:-1], key.shape[-2])
        pairs += list(zip(reversed(mask.shape), reversed(wanted), strict=False))
    for a, b in pairs:
        constants = [n for n in (a, b) if isinstance(n, int)]
        if len(constants) < 2 and 1 not in constants:  # a size of 1 is broadcast
            compat.guard_equal(a, b)
    if query.ndim > 2 and compat.size_hint(key.shape[-3]):
        bool(query.shape[-3] % key.shape[-3] == 0)


def _cdist(
    func: Callable[..., object],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> object:
    """Implements `cdist`; without matrix products if a size is unbacked, as torch would compare it with 25."""
    if compute_mode.endswith("_if_necessary") and any(compat.is_unbacked(n) for n in (*x1.shape, *x2.shape)):
        compute_mode = "donot_use_mm_for_euclid_dist"
    return func(x1, x2, p, compute_mode)


def _sgn(func: Callable[..., object], x: object, **kwargs: Tensor | None) -> object:
    """Implements `sgn` of real tensors as `sign`: the gradient of `sgn` is a zero tensor without symbolic sizes."""
    return func(x, **kwargs) if not isinstance(x, Tensor) or x.is_complex() else torch.sign(x, **kwargs)


def _unsafe_view(func: Callable[..., Sharded], x: Sharded, *args: object) -> Tensor:
    """Implements the view that AOTAutograd returns in place of an output of a compiled function."""
    out = func(x, *args)
    if type(x) is ShardTensor and not x.requires_grad:
        out._align_grad = x._align_grad
    return out


def _tensor_split(func: Callable[..., object], x: object, *args: object, **kwargs: object) -> object:
    """Implements `tensor_split`, whose kernel reads the memory of a tensor of split indices."""

    def as_list(indices: object) -> object:
        if isinstance(indices, Tensor) and compat.is_compiling():
            raise UnsupportedOpError(
                f"{func.__name__} of {x!r} by a tensor would need its values while it is compiled; pass a list of ints"
            )
        full = indices.full_tensor() if isinstance(indices, ShardTensor) else indices
        return full.tolist() if isinstance(full, Tensor) else full

    if "tensor_indices_or_sections" in kwargs:
        args = (kwargs.pop("tensor_indices_or_sections"), *args)
    return func(x, *map(as_list, args), **{k: as_list(v) for k, v in kwargs.items()})


_Tensor: Any = torch.Tensor
_NN: Any = torch._C._nn  # the functions that Dynamo's graphs call instead of `torch.nn.functional`


def _in_one_segment(run: Callable[..., object]) -> Callable[..., object]:
    """Wraps an implementation that needs the position of local rows, so that each shard is one segment of rows.

    Not for functions that return views: a shard that was brought to one segment is a new tensor.
    """

    def wrapper(func: object, *args: object, **kwargs: object) -> object:
        args, kwargs = torch.utils._pytree.tree_map_only(ShardTensor, with_contiguous_shards, (args, kwargs))
        return run(func, *args, **kwargs)

    return wrapper


state_function([_Tensor.data.__set__], _set_data)
# It is another function once `Tensor.data` is checked for plain tensors, by what is called before.
WITH_THE_FIRST.append(lambda: state_function([_Tensor.data.__set__], _set_data))
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
    _in_one_segment(_attend),
    aten.scaled_dot_product_attention.default,
)
state_function([torch.nn.functional.embedding_bag], _in_one_segment(embedding_bag), aten._embedding_bag.default)
state_function([torch.nn.functional.pad, _NN.pad], _in_one_segment(pad), aten.pad.default)
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
state_function([torch.cumprod, _Tensor.cumprod], _in_one_segment(cumprod), aten.cumprod.default)
state_function([torch.nn.functional.linear], _product, aten.linear.default, when=_may_flatten)
state_function([torch.matmul, _Tensor.matmul, _Tensor.__matmul__], _product, aten.matmul.default, when=_may_flatten)
state_function([torch.einsum, torch._C._VariableFunctions.einsum], einsum, aten.einsum.default)  # type: ignore[attr-defined]
state_function([torch._grouped_mm], _in_one_segment(grouped_mm), aten._grouped_mm.default)  # what F.grouped_mm calls
state_named_function("transformers.grouped_mm_fallback", _in_one_segment(grouped_mm_fallback))
for _function, _run in (FOURIER_FUNCTIONS | RANDOM_FUNCTIONS).items():
    state_function([_function], _run)
state_function([torch.ops.higher_order.flex_attention], flex.attend)
for _op, _refuse in teach_higher_order_ops(ShardTensor).items():
    state_function([_op], _refuse)
