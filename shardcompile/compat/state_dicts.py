"""Private names of torch that gather, copy and shard state dicts. Seen in torch 2.11 to 2.15.

The functions of ``torch.distributed.checkpoint.state_dict`` ask ``isinstance(x, DTensor)`` to tell sharded tensors
from plain ones. They would treat ours as plain.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import _state_dict_utils as _utils  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_for_good

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_Sharded = TypeVar("_Sharded", bound=Tensor)


def teach_state_dicts(sharded: type[_Sharded], shard_like: Callable[[Tensor, _Sharded], _Sharded]) -> None:
    """Have torch's state-dict functions treat a class as they treat DTensor.

    Args:
        sharded: the class. It has DTensor's `to`, `redistribute`, `to_local`, `device_mesh` and `placements`.
        shard_like: takes a full plain tensor and a sharded one. It returns the full values in the layout of the sharded
            one.

    The function is long because each patch states its reason.
    """
    iterate, distribute, broadcast = (
        _utils._iterate_state_dict,
        _utils._distribute_state_dict,
        _utils._broadcast_tensors,
    )

    def sharded_in_rows(of_plain: Callable[..., object], of_dtensor: Callable[..., Tensor]) -> Callable[..., object]:
        @functools.wraps(of_plain)
        def act(value: object, *args: object) -> object:
            if not isinstance(value, sharded):
                return of_plain(value, *args)
            found = of_dtensor(value, *args)
            # torch broadcasts the memory without regard to strides, into contiguous tensors of the other ranks.
            return found if isinstance(found, sharded) else found.contiguous()

        act.__shardcompile__ = True  # type: ignore[attr-defined]
        return act

    @functools.wraps(iterate)
    def iterate_state_dict(
        item: object,
        of_sharded_tensor: Callable[..., object],
        of_dtensor: Callable[..., Tensor],
        of_plain: Callable[..., object],
        *args: Any,
        **kwargs: Any,
    ) -> object:
        if not hasattr(of_plain, "__shardcompile__"):  # it calls itself
            of_plain = sharded_in_rows(of_plain, of_dtensor)
        return iterate(item, of_sharded_tensor, of_dtensor, of_plain, *args, **kwargs)

    def sharding_of(put_full_values: Callable[..., None]) -> Callable[..., None]:
        """Sharded the full values that torch's function puts into this rank's state dict."""

        @functools.wraps(put_full_values)
        def put(full: object, local: dict[str, object], *args: object, **kwargs: object) -> None:
            before = {key: value for key, value in local.items() if isinstance(value, sharded)}
            put_full_values(full, local, *args, **kwargs)
            for key, like in before.items():
                now = local.get(key)
                if isinstance(now, Tensor) and not isinstance(now, sharded) and now.ndim > 0:
                    local[key] = shard_like(now, like)

        return put

    put_in_for_good(
        Patch(
            "values_of_state_dicts",
            "torch.distributed._state_dict_utils._iterate_state_dict",
            "get_state_dict with full_state_dict or cpu_offload returns a shard as if it were a plain tensor.",
            "https://github.com/pytorch/pytorch/pull/112837 made it so: "
            "_iterate_state_dict recognises sharded tensors by isinstance of DTensor and ShardedTensor; it should ask "
            "for a protocol (full_tensor, to), as checkpoints do (__create_write_items__).",
            "2.11 - 2.15",
            _in_place_of(_iterate_state_dict=iterate_state_dict),
        ),
        Patch(
            "full_values_for_state_dicts",
            "torch.distributed._state_dict_utils._distribute_state_dict, _broadcast_tensors",
            "set_state_dict with full values puts the whole plain tensor where a shard was.",
            "_distribute_state_dict and _broadcast_tensors sharded full values for DTensor alone.",
            "2.11 - 2.15",
            _in_place_of(_distribute_state_dict=sharding_of(distribute), _broadcast_tensors=sharding_of(broadcast)),
        ),
    )


def _in_place_of(**functions: Callable[..., object]) -> Callable[[contextlib.ExitStack], None]:
    """A `put_in` that replaces torch's functions of these names."""

    def put_in(stack: contextlib.ExitStack) -> None:
        for name, function in functions.items():
            found = getattr(_utils, name)
            _exchange(name, found, function)
            stack.callback(_exchange, name, function, found)

    return put_in


def _exchange(name: str, old: object, new: object) -> None:
    """Replace a function in the module that defines it and in the module that imports it, if that is loaded."""
    for module in (_utils, sys.modules.get(_STATE_DICT)):
        if getattr(module, name, None) is old:
            setattr(module, name, new)
