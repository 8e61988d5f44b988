"""PyTorch's operator database as cases: every op with its samples, to be laid out in every way."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from shardcompile.testing.arrange import with_bits_to_spare
from tests.support.op_check import Case, Input

DEVICE = os.environ.get("OP_DB_DEVICE", "cpu")
"""Where all tensors are: "cpu" or "cuda"."""

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
"""By preference."""

LARGEST = 4096
"""Elements of the largest tensor of a sample that is tried."""

_NOT_COMPARABLE = {
    "random": (
        "bernoulli cauchy exponential geometric log_normal multinomial normal nn.functional.dropout "
        "nn.functional.alpha_dropout nn.functional.dropout2d nn.functional.dropout3d "
        "nn.functional.feature_alpha_dropout nn.functional.rrelu nn.functional.fractional_max_pool2d "
        "nn.functional.fractional_max_pool3d rand_like randint randint_like randn randn_like uniform svd_lowrank "
        "pca_lowrank torch.ops.aten._flash_attention_forward torch.ops.aten._efficient_attention_forward"
    ),
    "uninitialised": "empty empty_like empty_strided empty_permuted new_empty new_empty_strided",
    "needs a GPU": (
        "jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref "
        "jiterator_unary nn.functional.batch_norm.without_cudnn"
    ),
    "its samples come out of a set of strings, in another order in every process": (
        "meshgrid.list_of_tensors meshgrid.variadic_tensors"
    ),
    "takes no tensor": (
        "arange eye full linspace logspace ones zeros scalar_tensor tril_indices triu_indices signal.windows.*"
    ),
}
"""Ops whose result cannot be compared, by reason."""

EXCLUDED = {name: reason for reason, names in _NOT_COMPARABLE.items() for name in names.split()}


_DROPOUT = 10
"""Which of the leaves of multi_head_attention_forward's sample is its dropout probability."""


def name_of(op: OpInfo) -> str:
    """A name that is unique in the database."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def excluded(op: OpInfo) -> str | None:
    """Why an op is left out, or None."""
    if op.name.startswith("signal.windows."):
        return EXCLUDED["signal.windows.*"]
    return EXCLUDED.get(op.name) or EXCLUDED.get(name_of(op))


OPS: dict[str, OpInfo] = {name_of(op): op for op in op_db if excluded(op) is None}


def dtype_of(op: OpInfo) -> torch.dtype:
    """The dtype an op is tried with."""
    known = op.supported_dtypes(DEVICE)
    return next((d for d in DTYPES if d in known), next(iter(known)))


def samples(name: str, count: int) -> Iterator[tuple[Case, list[Tensor]]]:
    """Cases of an op with their full values, the same on every rank: samples of different shapes.

    Args:
        name: as `name_of` gives it.
        count: how many at most.
    """
    op = OPS[name]
    dtype = dtype_of(op)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    wants_grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    by_shapes: dict[Any, tuple[int, SampleInput, list[Any], Any]] = {}
    for number, sample in enumerate(itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=wants_grad), 64)):
        leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if tensors and not any(_is_unusual(x) for x in tensors):
            by_shapes.setdefault(tuple(tuple(x.shape) for x in tensors), (number, sample, leaves, structure))
    # One of those that have nothing to shard, and those that have.
    ordered = sorted(by_shapes, key=lambda shapes: max(math.prod(s) for s in shapes) <= 1)
    degenerate = [s for s in ordered if max(math.prod(x) for x in s) <= 1][:1]
    for shapes in [*ordered[: count - len(degenerate)], *degenerate]:
        number, sample, leaves, structure = by_shapes[shapes]
        full = [with_bits_to_spare(x.detach()) for x in leaves if isinstance(x, Tensor)]
        yield _case(f"{name} #{number}", op, sample, leaves, structure), full


def _is_unusual(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.numel() > LARGEST or x.is_quantized


def _case(name: str, op: OpInfo, sample: SampleInput, leaves: list[Any], structure: Any) -> Case:
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    if op.name == "nn.functional.multi_head_attention_forward":
        leaves = [0.0 if i == _DROPOUT else x for i, x in enumerate(leaves)]
    inputs = tuple(Input(tuple(x.shape), grad=x.requires_grad, dtype=x.dtype) for x in leaves if isinstance(x, Tensor))

    def run(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for i, x in zip(where, tensors, strict=True):
            filled[i] = x
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        return sample.output_process_fn_grad(op(first, *args, **kwargs))

    return Case(name, run, inputs)
