"""Fake tensors whose values are known: small ones that follow from numbers alone. Private names of torch.

Models read such values while they are made: timm takes the rates of its layers from ``torch.linspace(...).tolist()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload  # 2.11 - 2.15
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 2.11 - 2.15
from torch.utils import _pytree as pytree  # 2.11 - 2.15
from torch.utils.weak import WeakTensorKeyDictionary  # 2.11 - 2.15

aten = torch.ops.aten

_NAMESPACES = {"aten", "prim", "prims"}
"""Of ops whose schemas say what they write. Collectives write to tensors that theirs do not mention."""

LIMIT = 1024
"""Elements of a tensor whose values are kept."""

_FACTORIES = {aten.linspace, aten.logspace, aten.arange, aten.full, aten.ones, aten.zeros, aten.eye, aten.scalar_tensor}
"""Ops that make a tensor of numbers."""


class KnowingFakeMode(FakeTensorMode):
    """A mode that answers ``item()`` and ``tolist()`` of tensors whose values follow from numbers alone."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._values: Any = WeakTensorKeyDictionary()

    def dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an op on fake tensors, as torch's mode does; small values are worked out beside it, on the CPU."""
        named = dict(kwargs or {})
        given = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
        known = all(self._value(t) is not None for t in given) and (given or func.overloadpacket in _FACTORIES)
        if func is aten._local_scalar_dense.default and known:
            return self._value(given[0]).item()  # type: ignore[union-attr]
        out = super().dispatch(func, types, args, named)
        if func._schema.is_mutable or func.namespace not in _NAMESPACES:
            self._forget(given)
        elif known and torch.Tag.nondeterministic_seeded not in func.tags:
            self._note(out, func, args, named)
        return out

    def _value(self, x: Tensor) -> Tensor | None:
        if isinstance(x, FakeTensor):
            return self._values.get(x)
        return x if type(x) is Tensor and x.device.type == "cpu" and x.numel() <= LIMIT else None

    def _note(self, out: object, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Keep what an op gives for known values, if it gives small fake tensors."""
        results = pytree.tree_leaves(out)
        if not all(isinstance(x, FakeTensor) and x.numel() <= LIMIT for x in results):
            return

        def real(x: object) -> object:
            if isinstance(x, Tensor):
                return self._value(x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        real_args, real_kwargs = pytree.tree_map(real, (tuple(args), dict(kwargs)))
        try:
            values = pytree.tree_leaves(func(*real_args, **real_kwargs))
        except (RuntimeError, NotImplementedError):  # an op that CPUs have not got
            return
        for x, value in zip(results, values, strict=True):
            self._values[x] = value.clone() if func.is_view else value

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Values of tensors that are written to, and of all that share their memory."""
        storages = {x.untyped_storage()._cdata for x in written if isinstance(x, FakeTensor)}
        for x in [x for x in self._values if x.untyped_storage()._cdata in storages]:
            del self._values[x]
            x.item_memo = None  # what torch's mode knows of tensors with one element
            if x.constant is not None:
                self.fake_tensor_converter.invalidate_constant_aliases(x.constant)
