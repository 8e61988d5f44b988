"""Example calls of ops: small tensors, and a value for each argument without a default."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.ops import OpRecord, record_of, state

aten = torch.ops.aten


@dataclass(frozen=True)
class Example:
    """A call of an op with full tensors.

    Attributes:
        names: the names of the arguments.
        args: the values of the arguments.
    """

    names: tuple[str, ...]
    args: tuple[object, ...]

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, also those in lists, with their names."""
        found: list[tuple[str, Tensor]] = []
        for name, a in zip(self.names, self.args, strict=True):
            if isinstance(a, Tensor):
                found.append((name, a))
            elif isinstance(a, list):
                found += [(f"{name}[{i}]", x) for i, x in enumerate(a) if isinstance(x, Tensor)]
        return found

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[object, ...]:
        """Returns the arguments with other tensors in place of the example's."""
        others = iter(tensors)

        def replace(a: object) -> object:
            if isinstance(a, list):
                return [replace(b) for b in a]
            return next(others) if isinstance(a, Tensor) else a

        return tuple(replace(a) for a in self.args)

    def __str__(self) -> str:
        return ", ".join(f"{n} {_text(a)}".strip() for n, a in zip(self.names, self.args, strict=True))


def _text(a: object) -> str:
    if isinstance(a, Tensor):
        return str(list(a.shape))
    if isinstance(a, list) and any(isinstance(b, Tensor) for b in a):
        return "[" + ", ".join(map(_text, a)) + "]"
    return f"= {a}"


_SHAPES = ((6, 4), (6, 4, 4), (6, 4, 8, 8), (6,), (6, 4, 4, 4, 4))

# Arguments of ops whose schema does not determine valid ones. ``6x4`` is a tensor of floats, ``4x`` a vector, ``i6x4``
# a tensor of integers, ``b6x4`` of bools, ``c6x4`` of complex numbers, ``.`` a tensor without dims, ``6x4+6x4`` a list
# of tensors; anything else is a Python literal.
state([aten.fill.Tensor, aten.fill_.Tensor], example="6x4 .")
state([aten.masked_fill.Tensor, aten.masked_fill_.Tensor], example="6x4 b6x4 .")
state([aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor], example="6x4 0 i3x .")
state([aten._conj.default, aten.view_as_real.default], example="c6x4")
state(aten.view.dtype, example="6x4 torch.float32")
state(aten.view_as_complex.default, example="6x4x2")
state(aten.slice_backward.default, example="3x4 [6,4] 0 1 4 1")
state(aten.select_backward.default, example="4x [6,4] 0 1")
state(aten.select_scatter.default, example="6x4 4x 0 1")
state(aten.upsample_linear1d_backward.default, example="6x4x8 [8] [6,4,4] False None")
state(aten.upsample_bilinear2d_backward.default, example="6x4x8x8 [8,8] [6,4,4,4] False None None")
state(
    [aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default],
    example="6x4x8 [8] [6,4,4] None",
)
state(
    [aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default],
    example="6x4x8x8 [8,8] [6,4,4,4] None None",
)
state(aten.convolution.default, example="2x3x8x8 4x3x3x3 None [1,1] [1,1] [1,1] False [0,0] 1")
state(
    aten.convolution_backward.default,
    example="2x4x8x8 2x3x8x8 4x3x3x3 None [1,1] [1,1] [1,1] False [0,0] 1 [True,True,False]",
)
state(aten.avg_pool2d.default, example="2x3x8x8 [2,2] [2,2]")
state(aten.max_pool2d_with_indices.default, example="2x3x8x8 [2,2] [2,2]")
state([aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default], example="2x3x8x8 [16,16]")
state([aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default], example="2x3x8x8 [16,16] False")
state(aten.embedding.default, example="6x4 i5x")
state(aten.embedding_dense_backward.default, example="5x4 i5x 6 -1 False")
state(aten.index.Tensor, example="6x4 i5x+")
state(aten.index_put.default, example="6x4 i5x+ 5x4")
state(aten.index_select.default, example="6x4 0 i5x")
state([aten.index_add.default, aten.index_copy.default], example="6x4 0 i6x 6x4")
state(aten.gather.default, example="6x4 0 i6x4")
state([aten.scatter.src, aten.scatter_add.default], example="6x4 0 i6x4 6x4")
state(aten.scatter.value, example="6x4 0 i6x4 1.5")
state(aten.scatter_reduce.two, example="6x4 0 i6x4 6x4 'amax'")
state(aten.bincount.default, example="i6x")
state(aten.mm.default, example="6x4 4x8")
state(aten.mv.default, example="6x4 4x")
state([aten.dot.default, aten.vdot.default], example="6x 6x")
state(aten.bmm.default, example="6x4x4 6x4x8")
state(aten.matmul.default, example="6x4 4x8")
state(aten.addmm.default, example="8x 6x4 4x8")
state(aten.baddbmm.default, example="6x4x8 6x4x4 6x4x8")
state(aten.addbmm.default, example="4x8 6x4x4 6x4x8")
state(aten.native_layer_norm.default, example="6x4x4 [4] 4x 4x 1e-05")
state(aten.native_group_norm.default, example="2x4x8x8 4x 4x 2 4 64 2 1e-05")
state([aten._softmax.default, aten._log_softmax.default], example="6x4 -1 False")
state(
    [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], example="6x4 6x4 -1 torch.float32"
)
state(aten.cat.default, example="6x4+6x4 0")
state(aten.stack.default, example="6x4+6x4 0")
state(aten.permute.default, example="6x4x4 [2,0,1]")
state([aten.view.default, aten.reshape.default], example="6x4 [24]")
state(aten.expand.default, example="6x1 [6,4]")
state(aten.repeat.default, example="6x4 [2,1]")
state(aten.roll.default, example="6x4 [1] [0]")
state(aten.flip.default, example="6x4 [0]")
state(aten.unfold.default, example="6x4 0 2 1")
state(aten.diagonal_scatter.default, example="6x6 6x")
state(aten._scaled_dot_product_flash_attention_for_cpu.default, example="2x4x6x8 2x4x6x8 2x4x6x8")
state(aten.nll_loss_forward.default, example="6x4 i6x None 1 -100")
state(aten.randint_like.default, example="6x4 10")
state(aten.native_dropout.default, example="6x4 0.5 True")
state(aten.multinomial.default, example="6x4 2")
state(aten._foreach_add.List, example="6x4+6x4 6x4+6x4")


def example_of(op: OpOverload) -> Example | None:
    """Returns an example call of an op, or None if there is none and its schema does not determine one."""
    names = [a.name for a in op._schema.arguments]
    record = record_of(op)
    if record.example:
        args = [_parse(word) for word in record.example.split()]
        return Example(tuple(names[: len(args)]), tuple(args))
    if record.becomes is not None or _is_opaque(record):
        return None
    for shape, fewer in itertools.product(_SHAPES, (False, True)):
        try:
            needed = [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
            args = [_from_schema(a.name, str(a.type), shape, fewer) for a in needed]
            op(*[_copy(a) for a in args])
        except (KeyError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
        return Example(tuple(a.name for a in needed), tuple(args))
    return None


def _is_opaque(record: OpRecord) -> bool:
    """Returns whether an op has only a kernel, which may crash the process if the arguments are invalid."""
    has_other_form = record.rule is not None or record.sharded is not None or record.op._can_decompose()
    name = record.op._schema.name
    takes_results = "backward" in name or "unpool" in name  # its arguments are results of another kernel
    return not has_other_form or takes_results or any(a.is_out for a in record.op._schema.arguments)


def _copy(a: object) -> object:
    if isinstance(a, list):
        return [_copy(b) for b in a]
    return a.clone() if isinstance(a, Tensor) else a


def _parse(word: str) -> object:
    if word.startswith("torch."):
        return getattr(torch, word.removeprefix("torch."))
    if word == ".":
        return torch.tensor(0.5)
    if "+" in word:
        return [_parse(part) for part in word.split("+") if part]
    if re.fullmatch(r"[bci]?\d+x(\d+(x\d+)*)?", word):
        kind = word[0] if word[0] in "bci" else ""
        return _tensor(kind, [int(n) for n in word.lstrip("bci").split("x") if n])
    return ast.literal_eval(word)


def _tensor(kind: str, shape: Sequence[int]) -> Tensor:
    count = torch.Size(shape).numel()
    if kind == "i":
        return torch.arange(count).reshape(shape) % 4
    if kind == "b":
        return torch.arange(count).reshape(shape) % 2 == 0
    x = torch.linspace(0.25, 0.75, count).reshape(shape)
    return torch.complex(x, x) if kind == "c" else x


_INTEGERS = {
    "dim": -1,
    "dim0": 0,
    "dim1": -1,
    "k": 1,
    "index": 0,
    "split_size": 2,
    "step": 1,
    "start": 0,
    "end": 2,
    "norm_type": 2,
    "groups": 1,
    "diagonal": 0,
    "reduction": 1,
}


def _from_schema(name: str, kind: str, shape: Sequence[int], fewer: bool) -> object:
    """Returns a valid argument for its name and type.

    Args:
        name: the name of the argument.
        kind: the type of the argument.
        shape: the shape of tensors.
        fewer: whether index tensors have one dim.

    Raises:
        KeyError: name and type do not determine an argument.
    """
    if kind == "Tensor":
        if name in ("index", "indices", "target"):
            return _tensor("i", shape[:1] if fewer else shape)
        return _tensor("b" if name in ("mask", "condition") else "", shape)
    spatial = max(len(shape) - 2, 1)
    lists = {
        "dim": [-1],
        "dims": [-1],
        "size": list(shape),
        "normalized_shape": [shape[-1]],
        "pad": [1, 1],
        "stride": [1] * spatial,
        "dilation": [1] * spatial,
        "kernel_size": [1] * spatial,
        "padding": [0] * spatial,
        "output_size": [4] * spatial,
        "split_sizes": [2, shape[-1] - 2],
    }
    if kind.startswith("Optional"):
        return None
    of_kind: dict[str, Mapping[str, object]] = {
        **dict.fromkeys(("int", "SymInt"), _INTEGERS),
        **dict.fromkeys(("List[int]", "List[SymInt]"), lists),
        "List[Tensor]": {name: [_tensor("", shape), _tensor("", shape)]},
        "float": {name: 0.5},
        "number": {name: 2.0},
        "bool": {name: False},
    }
    return of_kind[kind][name]
