"""What is said where a plain tensor meets a sharded one: nothing, a warning, or an error, as in PhysicsNeMo."""

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
    """What happens where a plain tensor meets a sharded one in a function of torch.

    It counts as the same value on every rank, in all modes. Tensors without dims, and what compiled functions do, are
    not told of.
    """

    DISABLED = "disabled"
    """An error says which function."""
    WARN = "warn"
    """A warning says which function."""
    SILENT = "silent"
    """Nothing is said: the default."""


class Promotion:
    """The mode of the process; every rank has to set the same."""

    mode = TensorPromotionMode.SILENT


def get_promotion_mode() -> TensorPromotionMode:
    """The mode, see `TensorPromotionMode`."""
    return Promotion.mode


def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
    """Sets the mode; by its name or as a member."""
    Promotion.mode = TensorPromotionMode(mode)


@contextlib.contextmanager
def promotion_mode(mode: TensorPromotionMode | str) -> Iterator[None]:
    """Sets the mode for as long as a context lasts."""
    before = Promotion.mode
    set_promotion_mode(mode)
    try:
        yield
    finally:
        Promotion.mode = before


def tell_of_plain(func: Callable[..., object], args: object) -> None:
    """Warns of plain tensors among the arguments of a function, or raises, as the mode says.

    Raises:
        UnsupportedOpError: there is one, and the mode is DISABLED.
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
