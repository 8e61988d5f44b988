"""Describes the difference of two values: at which index of the global tensor, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardcompile.compat.testing import default_tolerances

Tolerances = Callable[[torch.dtype], tuple[float, float]]
"""Returns the relative and the absolute tolerance for a dtype."""


def tolerances(rtol: float | None = None, atol: float | None = None) -> Tolerances:
    """Returns the stated tolerances, or those of `torch.testing.assert_close` for each dtype."""

    def by_dtype(dtype: torch.dtype) -> tuple[float, float]:
        default = default_tolerances(dtype)
        return default[0] if rtol is None else rtol, default[1] if atol is None else atol

    return by_dtype


def difference(got: object, want: object, allowed: Tolerances) -> str | None:
    """Describes the difference between a value and the expected one; returns None if they agree.

    Args:
        got: a plain tensor, a number, or any object. Objects are compared by ``==``.
        want: the expected value. Tensors must have the same shape and dtype.
        allowed: the tolerances for numbers. Two NaNs are equal.
    """
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return None if _is_close(got, want, allowed) else f"expected {_name(want)}, got {_name(got)}"
    if got.shape != want.shape:
        return f"expected global shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if got.dtype != want.dtype:
        return f"expected dtype {_short(want.dtype)}, got {_short(got.dtype)}"
    rtol, atol = allowed(want.dtype)
    wrong = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    return _describe_wrong(got, want, wrong, rtol, atol) if wrong.any() else None


def _is_close(got: object, want: object, allowed: Tolerances) -> bool:
    if type(got) is not type(want) or isinstance(got, Tensor):
        return False
    if isinstance(want, float) and isinstance(got, float):
        rtol, atol = allowed(torch.float64)
        return math.isclose(got, want, rel_tol=rtol, abs_tol=atol) or (math.isnan(got) and math.isnan(want))
    return bool(got == want)


def _name(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {_short(value.dtype)} {tuple(value.shape)}"
    return f"{value!r}"[:200]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_wrong(got: Tensor, want: Tensor, wrong: Tensor, rtol: float, atol: float) -> str:
    lines = [
        f"{int(wrong.sum())} of {wrong.numel()} elements differ by more than atol={atol:g} plus rtol={rtol:g} times "
        "the expected value"
    ]
    absolute = _distance(got, want)
    magnitude = _distance(want, torch.zeros_like(want))
    for name, measure in (("absolute", absolute), ("relative", absolute / magnitude)):
        measure = torch.where(wrong, measure.nan_to_num(torch.inf, posinf=torch.inf), -1.0)
        at = tuple(int(i) for i in torch.unravel_index(measure.argmax(), measure.shape))
        lines.append(
            f"largest {name} difference {measure[at].item():.3g} at index {at}: "
            f"expected {want[at].item()!r}, got {got[at].item()!r}"
        )
    return "\n".join(lines)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.to(wide) - b.to(wide)).abs()
