"""A call of every op that torch tags as random, made from its schema.

An op that torch adds has a call here without a line of code, if its arguments have names that are known. Otherwise
`call_of` raises, and the op needs a value for its argument, or a reason in `ELSEWHERE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLUMNS = 4
_SCALARS: dict[str, Any] = {
    "p": 0.4,
    "train": True,
    "training": True,
    "num_samples": 2,
    "lambd": 1.5,
    "dropout_p": 0.4,
    "to": 9,
    "low": 2,
    "high": 9,
    "from": 2,
}
"""By name of the argument, where its default is not taken."""

_KEEP_DEFAULT = {"low", "high"}  # of `rrelu`, `uniform` and `prims`, where these are bounds with a default
_GPU = "its kernel is of GPUs only"
_PLAIN = "takes no tensor, so that it draws a plain one, by the default generator of each rank"
_LAYER = "a call has lists of parameters: `LAYERS` has the modules"
_ATTENTION = "refused with dropout; the way out is the backend MATH"
ELSEWHERE: dict[str, str] = {
    # The last version with them is torch 2.11.
    **dict.fromkeys(
        (
            f"aten::{op}.{overload}{out}"
            for op in ("rand", "randn")
            for overload in ("names", "generator_with_names")
            for out in ("", "_out")
        ),
        "tensors with names",
    ),
    **dict.fromkeys(
        (
            *("aten::_cudnn_attention_backward", "aten::_cudnn_attention_forward", "aten::_cudnn_init_dropout_state"),
            *("aten::_cudnn_init_dropout_state.out", "aten::_cudnn_rnn", "aten::_cudnn_rnn.out", "aten::miopen_rnn"),
            *("aten::miopen_rnn.out", "aten::_lstm_mps", "aten::_lstm_mps.out", "aten::_fused_dropout"),
            *("aten::_fused_dropout.out", "aten::_fill_mem_eff_dropout_mask_", "aten::_efficient_attention_forward"),
            *("aten::_flash_attention_forward", "aten::_flash_attention_forward.quantized"),
            *(
                "aten::_flash_attention_forward_no_dropout_inplace",
                "aten::_cudnn_attention_forward_no_dropout_inplace",
                "aten::_triton_scaled_dot_attention",
            ),
            *("aten::_triton_scaled_dot_attention.out", "aten::_scaled_dot_product_flash_attention.quantized"),
            *("aten::_scaled_dot_product_attention_math_for_mps", "aten::_nested_tensor_softmax_with_shape"),
            *("aten::_scaled_dot_product_fused_attention_overrideable", "rngprims::philox_rand"),
        ),
        _GPU,
    ),
    **dict.fromkeys(
        (
            *("aten::rand", "aten::rand.generator", "aten::randn", "aten::randn.generator", "aten::randint"),
            *("aten::randint.generator", "aten::randint.low", "aten::randint.low_generator", "aten::randperm"),
            *("aten::randperm.generator", "aten::normal.float_float", "prims::normal", "prims::uniform"),
            *("prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_rand_eager_offset"),
            *("prims::inductor_rand_eager_offsets",),
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        (
            *("aten::gru.input", "aten::gru.data", "aten::lstm.input", "aten::lstm.data", "aten::rnn_relu.input"),
            *("aten::rnn_relu.data", "aten::rnn_tanh.input", "aten::rnn_tanh.data"),
        ),
        _LAYER,
    ),
    **dict.fromkeys(
        (
            *("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention"),
            *("aten::_scaled_dot_product_cudnn_attention_backward", "aten::_fused_sdp_choice"),
            *("aten::_scaled_dot_product_efficient_attention_backward",),
            *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ),
        _ATTENTION,
    ),
}
"""Random ops that are not called here, and why."""


class RandomOp(NamedTuple):
    """A random op and its call.

    Attributes:
        op: the overload.
        values: makes a full tensor that it draws with.
        draw: called with a tensor, plain or sharded; gives all tensors that the op returns or writes to.
    """

    op: Any
    values: Callable[[int], Tensor]
    draw: Callable[[Any], list[Any]]

    def __str__(self) -> str:
        return str(self.op.name())


def random_ops() -> list[Any]:
    """All overloads that torch tags as random."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        if torch.Tag.nondeterministic_seeded in op.tags and namespace not in ("shardcompile", "random_ops_of_tests"):
            found.append(op)
    return found


def call_of(op: Any) -> RandomOp:
    """The call of an op; raises KeyError if an argument is unknown."""
    attends = op._schema.name.startswith(("aten::scaled_dot", "aten::_scaled_dot"))
    falls = "rrelu" in op._schema.name  # draws for negative values only

    def values(rows: int) -> Tensor:
        shape = (2, 3, rows, COLUMNS) if attends else (rows, COLUMNS)
        drawn = 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        return -drawn if falls else drawn

    def draw(x: Any) -> list[Any]:
        args, kwargs, written = _arguments(op, x)
        out = op(*args, **kwargs)
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        return [*results, *(w for w in written if not any(w is r for r in results))]

    _arguments(op, values(7))
    return RandomOp(op, values, draw)


def _arguments(op: Any, x: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    written: list[Any] = []
    left_out = False
    for argument in op._schema.arguments:
        value = _argument(op, argument, x)
        if value is _LEFT_OUT:
            left_out = True
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(value)
        if argument.kwarg_only or left_out:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs, written


_LEFT_OUT = object()


def _argument(op: Any, argument: Any, x: Any) -> Any:
    kind, name = str(argument.type), argument.name
    if argument.is_out:
        if op._schema.name == "aten::multinomial":
            return x[..., :2].clone().to(torch.int64)
        if op._schema.name == "aten::randperm":
            return x[:, 0].clone().to(torch.int64)
        return x.clone() > 0 if (op._schema.name, name) == ("aten::native_dropout", "out1") else x.clone()
    if kind == "Tensor":
        if name == "high":
            return torch.tensor(9)
        return x if argument.alias_info is None and name not in ("noise", "count") else _operand(name, x)
    if kind.startswith("Optional[Tensor"):
        return _LEFT_OUT
    if kind == "Optional[Generator]":
        return None if not argument.has_default_value() else _LEFT_OUT
    if name == "size":
        return list(x.shape)
    if name == "n":
        return x.shape[0]
    if name in _SCALARS and not (name in _KEEP_DEFAULT and argument.has_default_value()):
        if name in ("to", "from") and argument.has_default_value():
            return _LEFT_OUT
        return _SCALARS[name]
    if argument.has_default_value():
        return _LEFT_OUT
    if name in ("mean", "std"):
        return {"mean": 0.5, "std": 1.5}[name]
    raise KeyError(f"{op}: no value is known for {kind} {name}")


def _operand(name: str, x: Any) -> Any:
    return x.new_zeros(x.shape) if name == "noise" else x * 0 + 12 if name == "count" else x.clone()
