"""Models that take steps in single precision, whatever their dtype is, have them taken in double precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

IN_DOUBLE = {
    "diffusers-dit",
    "diffusers-unet",
    "diffusers-unet-text",
    "hf-bloom",
    "hf-esm",
    "hf-falcon",
    "hf-gpt-neox",
    "hf-llama",
    "hf-mistral",
    "hf-olmo2",
    "hf-phi3",
    "hf-qwen2",
    "hf-qwen3",
    "hf-t5",
    "hf-t5-encoder",
    "pn-fno",
    "pn-song-unet",
    "pn-song-unet-attention",
    "x-decoder",
    "x-encoder",
    "x-rotary",
}
"""Those that are so compared by our backend, by name.

Inductor rounds steps in single precision otherwise than eager kernels do, for plain tensors too, and by more than the
tolerance of a model in double precision. By `aot_eager` the same models are compared as they are.
"""

_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _StepsInDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_doubled, args), **{name: _doubled(x) for name, x in (kwargs or {}).items()})


def _doubled(x: Any) -> Any:
    return _DOUBLE.get(x, x) if isinstance(x, torch.dtype) else x


def steps_in_double(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Within it, whoever asks for single precision gets double precision.

    Args:
        wanted: or nothing changes.
    """
    return _StepsInDouble() if wanted else contextlib.nullcontext()
