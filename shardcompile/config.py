"""Settings, as module attributes: ``shardcompile.config.fallback = "error"``."""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Literal

import torch

from shardcompile.compat.caches import set_in_cache_keys

fallback: Literal["replicate", "warn", "error"] = "replicate"
"""What happens to an op that no sharding rule or decomposition serves: its inputs are gathered, and it runs on full
tensors on every rank (``replicate``: logged once per op, and again where it gathers ten times as much; ``warn``: with a
Python warning; ``error``: refused)."""

attention: Literal["auto", "ring", "gather", "heads"] = "auto"
"""How `scaled_dot_product_attention` runs where the sequence is sharded. ``ring``: rows stay. Keys and values come a
shard at a time, the next one under way while one is computed, and again in the backward pass; a rank never holds
more than two shards of others. ``gather``: rows of the query stay, each rank gathers the keys and values. ``heads``:
each rank takes part of the heads for all rows. ``auto``: what sends the fewest bytes of all but a ring; or a ring of
at most `ring_steps` ranks where that is predicted to be faster, or the other way holds more than `attention_bytes`.
Where the way that is set is not possible, it is as if this were ``auto``. `explain` prints which way was taken, and
why. Set it on all ranks alike; compiled functions are compiled again if it has changed.
"""

ring_steps: int = 8
"""How many ranks a ring may have that ``attention = "auto"`` takes. A graph has the nodes of each step, and is compiled
for as long: about a second more for four ranks and each layer."""

attention_bytes: int = 1 << 30
"""How much ``attention = "auto"`` may hold on a rank for one attention besides its inputs, where a ring would hold
less: 1 GiB."""

verify: bool = os.environ.get("SHARDCOMPILE_VERIFY", "0") not in ("", "0")
"""Whether ranks compare their collectives before a graph that the passes have compiled runs for the first time, see
`shardcompile.passes.verify`. Off unless the environment variable SHARDCOMPILE_VERIFY is 1, as it is in the workers of
`shardcompile.testing`. Compiled code is kept in caches with a record of its collectives, so that a warm start is
compared, too; code that was cached while this was off is not used when it is on."""

verify_timeout: float = 300.0
"""Seconds that a rank waits for the others to come to the same graph. One that finds it in a cache waits for those that
compile it."""

watch: bool = os.environ.get("SHARDCOMPILE_WATCH", "1") not in ("", "0")
"""Whether a thread of each rank finds out why its rank waits for long, and ends waits that have no end, see
`shardcompile.diagnosis`. On unless the environment variable SHARDCOMPILE_WATCH is 0. Read when a process group is used
for the first time."""


@contextlib.contextmanager
def patch(**settings: object) -> Iterator[None]:
    """Change settings for as long as a context lasts: ``with sc.config.patch(attention="ring"):``, on all ranks alike.

    What is read when a backward pass is traced or, in eager mode, runs has to be set there, too: have ``backward()`` in
    the context.

    Raises:
        ValueError: there is no such setting, or it has no such value.
        RuntimeError: called inside of a compiled function.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("config.patch begins and ends outside of compiled functions; call them inside of it")
    module = sys.modules[__name__]
    before = {name: _value(name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _value(name: str) -> object:
    if name not in SETTINGS:
        raise ValueError(f"config has no setting {name!r}; it has {', '.join(SETTINGS)}")
    return getattr(sys.modules[__name__], name)


SETTINGS = ("fallback", "attention", "ring_steps", "attention_bytes", "verify", "verify_timeout", "watch")
"""What there is to set."""

_WAYS = ("auto", "ring", "gather", "heads")


def ways_of_attention() -> tuple[str, int, int]:
    """The settings that decide which way attention goes: `attention`, `ring_steps`, `attention_bytes`."""
    return attention, ring_steps, attention_bytes


class _Settings(types.ModuleType):
    """The module itself: settings that become part of what is compiled are part of the keys of compiler caches."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "attention" and value not in _WAYS:
            raise ValueError(f"config.attention is one of {', '.join(map(repr, _WAYS))}, not {value!r}")
        if name in ("ring_steps", "attention_bytes") and (not isinstance(value, int) or value < 0):
            raise ValueError(f"config.{name} is a number of at least 0, not {value!r}")
        before = ways_of_attention()
        super().__setattr__(name, value)
        set_in_cache_keys(_tag(before), False)
        set_in_cache_keys(_tag(ways_of_attention()), True)


def _tag(ways: tuple[str, int, int]) -> str:
    return "" if ways == _DEFAULTS else f"-attention by {ways}"


_DEFAULTS = ways_of_attention()
sys.modules[__name__].__class__ = _Settings
