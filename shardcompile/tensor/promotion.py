"""The promotion mode: silence, a warning or an error where an op mixes plain and sharded tensors, as in PhysicsNeMo."""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcompile.errors import UnsupportedOpError
from shardcompile.sharded import Sharded


class TensorPromotionMode(enum.Enum):
    """What happens where a torch function takes a plain tensor and a sharded one.

    In all modes the plain tensor counts as the same value on every rank. Tensors without dims, and compiled functions,
    are not reported.
    """

    DISABLED = "disabled"
    """An error names the function."""
    WARN = "warn"
    """A warning names the function."""
    SILENT = "silent"
    """No message: the default."""


class Promotion:
    """The mode of the process; every rank has to set the same."""

    mode = TensorPromotionMode.SILENT


def get_promotion_mode() -> TensorPromotionMode:
    """Returns the mode, see `TensorPromotionMode`."""
    return Promotion.mode


def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
    """Sets the mode, given as a member or by its value."""
    Promotion.mode = TensorPromotionMode(mode)


@contextlib.contextmanager
def promotion_mode(mode: TensorPromotionMode | str) -> Iterator[None]:
    """Sets the mode within a context."""
    before = Promotion.mode
    set_promotion_mode(mode)
    try:
        yield
    finally:
        Promotion.mode = before


def report_plain_tensors(func: Callable[..., object], args: object) -> None:
    """Warns of plain tensors among the arguments of a function, or raises an error, depending on the mode.

    Raises:
        UnsupportedOpError: there is a plain tensor, and the mode is DISABLED.
    """
    tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    plain = [x for x in tensors if x.ndim and not isinstance(x, (Sharded, DTensor))]
    if not plain:
        return
    name, shape = getattr(func, "__name__", str(func)), tuple(plain[0].shape)
    if Promotion.mode is TensorPromotionMode.DISABLED:
        raise UnsupportedOpError(
            f"{name} of a sharded tensor and a plain one of shape {shape}, which TensorPromotionMode.DISABLED refuses. "
            "Make it a ShardTensor by distribute_tensor or from_local, or set the mode to SILENT"
        )
    warnings.warn(
        f"{name}: auto-promoting a plain tensor of shape {shape} to a replicated one, the same value on every rank",
        stacklevel=4,
    )
