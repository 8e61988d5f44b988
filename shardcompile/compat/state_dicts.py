"""Private names of torch that gather, copy and load state dicts. Seen in torch 2.11 to 2.15.

The functions of ``torch.distributed.checkpoint.state_dict`` ask ``isinstance(x, DTensor)`` to tell sharded tensors
from plain ones. They would treat ours as plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed import _state_dict_utils as _utils  # 2.11 - 2.15
from torch.distributed.checkpoint import state_dict as _state_dict
from torch.optim import Optimizer

from shardcompile.compat.patch import Patch, put_in_once, replace

Function = Callable[..., Any]
_Sharded = TypeVar("_Sharded", bound=Tensor)


@dataclass
class _Class:
    """The class of sharded tensors, and what gives full values the layout of another sharded tensor."""

    sharded: type[Tensor]
    shard_like: Callable[[Tensor, Any], Tensor]


_CLASS: list[_Class] = []


def teach_state_dicts(sharded: type[_Sharded], shard_like: Callable[[Tensor, _Sharded], _Sharded]) -> None:
    """Have torch's state-dict functions treat a class as they treat DTensor.

    Args:
        sharded: the class. It has DTensor's `to`, `redistribute`, `to_local`, `device_mesh` and `placements`.
        shard_like: takes a full plain tensor and a sharded one. It returns the full values in the layout of the sharded
            one.
    """
    _CLASS[:] = [_Class(sharded, shard_like)]
    for patch in OF_STATE_DICTS:
        put_in_once(patch)


def _iterating(iterate: Function) -> Function:
    """Have sharded values gathered as DTensors are."""

    @functools.wraps(iterate)
    def over(
        item: object,
        of_sharded_tensor: Function,
        of_dtensor: Function,
        of_plain: Function,
        *args: object,
        **kwargs: object,
    ) -> object:
        if not hasattr(of_plain, "__shardcompile__"):  # it calls itself
            of_plain = _gathering(of_plain, of_dtensor)
        return iterate(item, of_sharded_tensor, of_dtensor, of_plain, *args, **kwargs)

    return over


def _gathering(of_plain: Function, of_dtensor: Function) -> Function:
    @functools.wraps(of_plain)
    def act(value: object, *args: object) -> object:
        if not isinstance(value, _CLASS[0].sharded):
            return of_plain(value, *args)
        found = of_dtensor(value, *args)
        # torch broadcasts the memory without regard to strides, into contiguous tensors of the other ranks.
        return found if isinstance(found, _CLASS[0].sharded) else found.contiguous()

    act.__shardcompile__ = True  # type: ignore[attr-defined]
    return act


def _loading(function_of: Function) -> Function:
    """Have full values sharded that are loaded where a shard was."""

    @functools.wraps(function_of)
    def function(of: nn.Module | Optimizer, api: str) -> Function:
        call: Function = function_of(of, api)
        if api != "load_state_dict":
            return call

        @functools.wraps(call)
        def load(state_dict: dict[str, object], **options: object) -> object:
            if isinstance(of, nn.Module):
                return call({**state_dict, **_of_full_values(of.state_dict(), state_dict)}, **options)
            before = {parameter: dict(state) for parameter, state in of.state.items()}
            call(state_dict, **options)
            for parameter, state in before.items():
                of.state[parameter].update(_of_full_values(state, of.state[parameter]))
            return None

        return load

    return function


def _of_full_values(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, Tensor]:
    """The entries of a state that were sharded and are full plain tensors now, sharded."""
    sharded, shard_like = _CLASS[0].sharded, _CLASS[0].shard_like
    return {
        name: shard_like(value, like)
        for name, like in before.items()
        if isinstance(like, sharded)
        and isinstance(value := now.get(name), Tensor)
        and not isinstance(value, sharded)
        and value.ndim > 0
    }


OF_STATE_DICTS = (
    Patch(
        "values_of_state_dicts",
        "torch.distributed._state_dict_utils._iterate_state_dict",
        "get_state_dict with full_state_dict or cpu_offload returns shards where full values are asked for.",
        "https://github.com/pytorch/pytorch/pull/112837 made it so: "
        "_iterate_state_dict recognises sharded tensors by isinstance of DTensor and ShardedTensor; it should ask "
        "for a protocol (full_tensor, to), as checkpoints do (__create_write_items__).",
        "2.11 - 2.15",
        lambda stack: replace(stack, _utils, "_iterate_state_dict", _iterating),
    ),
    Patch(
        "full_values_for_state_dicts",
        "torch.distributed.checkpoint.state_dict._state_dict_fn",
        "set_state_dict with full values puts the whole plain tensor where a shard was.",
        "_distribute_state_dict and _broadcast_tensors shard full values for DTensor alone.",
        "2.11 - 2.15",
        lambda stack: replace(stack, _state_dict, "_state_dict_fn", _loading),
    ),
)
"""Put in with the first sharded tensor."""
