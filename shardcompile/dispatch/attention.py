"""Torch's fused attention ops on sharded tensors.

Where nothing is cut the fused kernel itself runs. Otherwise attention is computed from products and a softmax whose
sums may run over a cut sequence; like the fused kernels it keeps only the logarithm of the softmax's denominator for
the backward pass. Fused kernels are not run on blocks: some refuse a block that is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcompile.dispatch.precision import widened
from shardcompile.errors import UnsupportedOpError
from shardcompile.layout import Layout, Spec
from shardcompile.plan import find_plan
from shardcompile.redistribute import run_plan

aten = torch.ops.aten


@dataclass(frozen=True)
class _Attention:
    """The arguments that all fused ops share; tensors are [batch, heads, rows, features].

    Attributes:
        query: as given.
        key: as given; may have fewer heads.
        value: as given; may have fewer heads.
        mask: None, or what is added to the scores, or bools that tell which scores count.
        causal: whether a row of the query sees only the rows of the key up to its own number.
        scale: factor of the scores; by default one over the root of the features.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    causal: bool
    scale: float | None

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return self.scale if self.scale is not None else 1 / math.sqrt(self.query.shape[-1])

    def scores(self) -> Any:
        """Products of query and key, scaled and masked."""
        key = _repeated(widened(self.key), self.query.shape[1])
        scores = _product(widened(self.query), key.transpose(-2, -1)) * self.factor
        hidden = -float("inf")
        if self.causal:
            rows, columns = scores.shape[-2:]
            device = scores.device
            allowed = torch.arange(rows, device=device).unsqueeze(1) >= torch.arange(columns, device=device)
            scores = torch.where(allowed, scores, hidden)
        if self.mask is None:
            return scores
        return torch.where(self.mask, scores, hidden) if self.mask.dtype is torch.bool else scores + self.mask

    def forward(self) -> tuple[Any, Any]:
        """The result, and the logarithm of the softmax's denominator."""
        scores = self.scores()
        denominator = aten.logsumexp.default(scores, [-1], False)
        weights = _weights(scores, denominator)
        out = _product(weights, _repeated(widened(self.value), self.query.shape[1]))
        # Stored as the fused kernels do, so that heads can be joined by a view.
        out = out.to(self.query.dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return out, denominator

    def backward(self, grad: Any, out: Any, denominator: Any) -> tuple[Any, Any, Any, Any]:
        """Gradients of query, key, value and scores."""
        grad = widened(grad)
        heads = self.query.shape[1]
        weights = _weights(self.scores(), denominator)
        grad_weights = _product(grad, _repeated(widened(self.value), heads).transpose(-2, -1))
        mean = (grad * widened(out)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - mean)
        grad_query = _product(grad_scores, _repeated(widened(self.key), heads)) * self.factor
        grad_key = _product(grad_scores.transpose(-2, -1), widened(self.query)) * self.factor
        grad_value = _product(weights.transpose(-2, -1), grad)
        dtype = self.query.dtype
        return (
            grad_query.to(dtype),
            _summed(grad_key, self.key.shape[1]).to(dtype),
            _summed(grad_value, self.value.shape[1]).to(dtype),
            grad_scores,
        )


def _product(a: Any, b: Any) -> Any:
    """Batched product with all dims of the batch kept apart, so that any of them may be cut."""
    cls = type(a if hasattr(a, "_spec") else b)
    return cls.__torch_dispatch__(aten.matmul.default, (), (a, b), {})


def _weights(scores: Any, denominator: Any) -> Any:
    """The softmax; zeros for a row of which nothing counts."""
    denominator = torch.where(denominator == -float("inf"), 0.0, denominator)
    return (scores - denominator.unsqueeze(-1)).exp()


def _repeated(x: Any, heads: int) -> Any:
    """Heads of keys and values, once for each head of the query that uses them."""
    batch, own, rows, features = x.shape
    if own is heads or own == heads:
        return x
    return x.unsqueeze(2).expand(batch, own, heads // own, rows, features).reshape(batch, heads, rows, features)


def _summed(x: Any, heads: int) -> Any:
    """Inverse of `_repeated` for gradients."""
    batch, many, rows, features = x.shape
    if many is heads or many == heads:
        return x
    return x.reshape(batch, heads, many // heads, rows, features).sum(2)


# The ops


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if isinstance(x, Tensor)]


def _is_whole(attention: _Attention) -> bool:
    parts = _tensors([attention.query, attention.key, attention.value, attention.mask])
    return all(x._spec.layout.is_replicated for x in parts if hasattr(x, "_spec"))


def _on_whole_values(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The fused kernel on every rank, on full values."""
    sharded = next(x for x in _tensors([*args, *kwargs.values()]) if hasattr(x, "_spec"))
    cls, like = type(sharded), sharded._spec.layout.replicated()

    def whole(x: Any) -> Any:
        if not hasattr(x, "_spec"):
            return x
        layout = x._spec.layout
        return run_plan(find_plan(layout, layout.replicated()), x._local_tensor)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        layout = Layout.of(like.mesh, like.placements, tuple(x.shape), x.dtype, (None,) * x.ndim)
        return cls._wrap(x, Spec.of(layout, tuple(x.stride())))

    return tuple(wrapped(x) for x in op(*[whole(a) for a in args], **{k: whole(a) for k, a in kwargs.items()}))


def _refuse_dropout(op: Any, dropout_p: float) -> None:
    if dropout_p > 0:
        raise UnsupportedOpError(
            f"{op} with dropout on sharded tensors: use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _argument(op: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            if i < len(args) and not argument.kwarg_only:
                return args[i]
            return kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def _attention_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Attention:
    def get(name: str) -> Any:
        return _argument(op, args, kwargs, name)

    _refuse_dropout(op, get("dropout_p"))
    mask = get("attn_mask")
    mask = get("attn_bias") if mask is None else mask
    return _Attention(get("query"), get("key"), get("value"), mask, get("is_causal"), get("scale"))


def _forward(op: Any) -> Callable[..., Any]:
    """The op's other results, such as the state of the random numbers, are empty: only our backward reads them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        attention = _attention_of(op, args, kwargs)
        if _is_whole(attention):
            return _on_whole_values(op, args, kwargs)
        out, denominator = attention.forward()
        others = [
            attention.key.shape[2] if "max" in r.name else denominator.new_zeros(()) for r in op._schema.returns[2:]
        ]
        return (out, denominator, *others)

    return run


def _backward(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        attention = _attention_of(op, args, kwargs)
        if _is_whole(attention):
            return _on_whole_values(op, args, kwargs)
        grad = next(a for a in args if isinstance(a, Tensor))
        out, denominator = (_argument(op, args, kwargs, n) for n in ("out", "logsumexp"))
        *grads, grad_scores = attention.backward(grad, out, denominator)
        if len(op._schema.returns) == 3:
            return tuple(grads)
        wanted = _argument(op, args, kwargs, "grad_input_mask")
        mask = attention.mask
        grad_mask = grad_scores.sum_to_size(mask.shape).to(mask.dtype) if wanted[3] and mask is not None else None
        return (*grads, grad_mask)

    return run


ATTENTION_OPS: dict[Any, Callable[..., Any]] = {
    **{
        op: _forward(op)
        for op in (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        )
    },
    **{
        op: _backward(op)
        for op in (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
        )
    },
}
"""By op, its sharded form."""
