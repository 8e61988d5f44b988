"""Private names of torch through which state dicts are gathered, copied and cut. Seen in torch 2.11 to 2.15.

The functions of ``torch.distributed.checkpoint.state_dict`` tell tensors in blocks from plain ones by ``isinstance`` of
DTensor, and so would hand on ours as if they were plain.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import _state_dict_utils as _utils  # 2.11 - 2.15

_STATE_DICT = "torch.distributed.checkpoint.state_dict"


def teach_state_dicts(sharded: type[Tensor], cut_like: Callable[[Tensor, Any], Any]) -> None:
    """Have torch's state-dict functions treat a class as they treat DTensor.

    Args:
        sharded: the class; it has DTensor's `to`, `redistribute`, `to_local`, `device_mesh` and `placements`.
        cut_like: of a full plain tensor and a sharded one: the full values in the layout of the sharded one.
    """
    iterate, distribute, broadcast = (
        _utils._iterate_state_dict,
        _utils._distribute_state_dict,
        _utils._broadcast_tensors,
    )

    def in_blocks(of_plain: Callable[..., Any], of_dtensor: Callable[..., Any]) -> Callable[..., object]:
        @functools.wraps(of_plain)
        def act(value: object, *args: object) -> object:
            if not isinstance(value, sharded):
                return of_plain(value, *args)
            found = of_dtensor(value, *args)
            # torch broadcasts memory as it lies, into contiguous tensors of the other ranks.
            return found if isinstance(found, sharded) else found.contiguous()

        act.__shardcompile__ = True  # type: ignore[attr-defined]
        return act

    @functools.wraps(iterate)
    def iterate_state_dict(
        item: Any, of_sharded_tensor: Any, of_dtensor: Any, of_plain: Any, *args: Any, **kwargs: Any
    ) -> object:
        if not hasattr(of_plain, "__shardcompile__"):  # it calls itself
            of_plain = in_blocks(of_plain, of_dtensor)
        return iterate(item, of_sharded_tensor, of_dtensor, of_plain, *args, **kwargs)

    def cutting(put_full_values: Callable[..., None]) -> Callable[..., None]:
        """A function of full values and of this rank's state dict, which it fills with them."""

        @functools.wraps(put_full_values)
        def put(full: object, local: dict[str, object], *args: object, **kwargs: object) -> None:
            before = {key: value for key, value in local.items() if isinstance(value, sharded)}
            put_full_values(full, local, *args, **kwargs)
            for key, like in before.items():
                now = local.get(key)
                if isinstance(now, Tensor) and not isinstance(now, sharded) and now.ndim > 0:
                    local[key] = cut_like(now, like)

        return put

    _replace("_iterate_state_dict", iterate_state_dict)
    _replace("_distribute_state_dict", cutting(distribute))
    _replace("_broadcast_tensors", cutting(broadcast))


def _replace(name: str, function: Callable[..., object]) -> None:
    known = getattr(_utils, name)
    for module in (_utils, sys.modules.get(_STATE_DICT)):
        if getattr(module, name, None) is known:
            setattr(module, name, function)
