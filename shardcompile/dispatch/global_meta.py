"""What an op gives on tensors of the global shapes."""

# The class of sharded tensors arrives as an argument, so that its attributes are unknown here.
# mypy: disable-error-code="attr-defined, union-attr"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload

_EAGER_FAKE_MODE: Any = None


def global_meta(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op gives on tensors of the global shapes, without computing it.

    Errors that plain PyTorch raises for these shapes are raised here, on all ranks alike.
    """
    global _EAGER_FAKE_MODE
    mode = compat.detect_fake_mode([_inner(cls, x) for x in tensors_of([*args, *kwargs.values()])])
    if mode is None:
        if _EAGER_FAKE_MODE is None:
            _EAGER_FAKE_MODE = compat.FakeTensorMode()
        mode = _EAGER_FAKE_MODE

    def fake(a: Any) -> Any:
        if isinstance(a, Tensor):
            inner = _inner(cls, a)
            return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=inner.device)
        if isinstance(a, (list, tuple)):
            return [fake(b) for b in a]
        return a

    known = compat.refusing_unknown_shapes(mode, op)
    with compat.untraced(), mode, known, torch._C.DisableTorchFunctionSubclass():
        return op(*[fake(a) for a in args], **{k: fake(a) for k, a in kwargs.items()})


def _inner(cls: type, x: Tensor) -> Tensor:
    return x._local_tensor if type(x) is cls else x


def tensors_of(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, those in lists included, in order."""
    for a in values:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_of(a)
