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
"""What happens to an op that no sharding rule or decomposition serves. ``replicate``: its inputs are gathered and it
runs on full tensors on every rank; this is logged once per op, and again if it gathers ten times as much. ``warn``: the
same with a Python warning. ``error``: an error is raised."""

attention: Literal["auto", "ring", "gather", "heads"] = "auto"
"""The strategy of `scaled_dot_product_attention` over a sharded sequence dim. ``ring``: ring attention. The query stays
sharded, and the shards of keys and values circulate, the next one in flight while one is computed, and once more in the
backward pass; a rank never holds more than two shards of other ranks. ``gather``: the query stays sharded, and each
rank gathers the keys and values. ``heads``: an all-to-all shards the heads instead of the sequence. ``auto``: the
strategy other than a ring that sends the fewest bytes; or a ring of at most `ring_steps` ranks where that is predicted
to be faster, or where the other strategy holds more than `attention_bytes`. Where the strategy that is set is not
possible, ``auto`` applies. `explain` prints the strategy that was chosen, and why. The setting must be the same on all
ranks; compiled functions are recompiled if it has changed.
"""

ring_steps: int = 8
"""The largest number of ranks for which ``attention = "auto"`` chooses a ring. The steps of a ring are unrolled in the
graph, so compile time grows with them: by about a second per layer for four ranks."""

attention_bytes: int = 1 << 30
"""The most bytes that ``attention = "auto"`` lets a rank hold for one attention besides its inputs before it prefers a
ring, which holds less: 1 GiB."""

gradient_bucket_bytes: int = 25 << 20
"""In eager mode, gradients of plain leaf tensors are summed over ranks in buckets, as by `DistributedDataParallel`. A
bucket of this many bytes, 25 MiB, is reduced while the backward pass goes on, all others at its end; then hooks of the
leaves run. 0: each gradient is reduced, and hooks of its leaf run, as soon as it is computed, as code needs that reads
``param.grad`` while the backward pass goes on. This is so, too, where `fully_shard` is used. The setting must be the
same on all ranks."""

verify: bool = os.environ.get("SHARDCOMPILE_VERIFY", "0") not in ("", "0")
"""Whether ranks compare their collectives before a graph that the passes have compiled runs for the first time; see
`shardcompile.passes.verify`. Off unless the environment variable SHARDCOMPILE_VERIFY is 1, as it is in the workers of
`shardcompile.testing`. Compiled code is cached with a record of its collectives, so that a warm start is compared as
well; code that was cached while this was off is not used while it is on."""

verify_timeout: float = 300.0
"""Seconds that a rank waits for the others to reach the same graph. A rank that finds the graph in a cache waits for
those that compile it."""

compile_on: Literal["one", "all"] = "one"
"""Which ranks of a job compile a graph with Inductor. ``one``: the first rank that needs it; the others take its code,
from Inductor's cache or over the store of the default process group. Graphs with other keys in that cache, such as
those of other devices, are compiled apart. A rank that fails, dies or does not answer for seconds is named in a
warning, and other ranks compile. ``all``: every rank for itself, as where Inductor's cache is off."""

watch: bool = os.environ.get("SHARDCOMPILE_WATCH", "1") not in ("", "0")
"""Whether a watchdog thread of each rank diagnoses long waits, and aborts those that would hang; see
`shardcompile.diagnosis`. On unless the environment variable SHARDCOMPILE_WATCH is 0. Read when a process group is used
for the first time."""


@contextlib.contextmanager
def patch(**settings: object) -> Iterator[None]:
    """Context manager that changes settings: ``with sc.config.patch(attention="ring"):``, on all ranks.

    Settings that matter for a backward pass are read when it is traced or, in eager mode, when it runs, so call
    ``backward()`` inside of the context.

    Raises:
        ValueError: there is no such setting, or the value is not allowed for it.
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


SETTINGS = (
    "fallback",
    "attention",
    "ring_steps",
    "attention_bytes",
    "gradient_bucket_bytes",
    "verify",
    "verify_timeout",
    "compile_on",
    "watch",
)
"""The names of all settings."""

_COUNTS = ("ring_steps", "attention_bytes", "gradient_bucket_bytes")
_ATTENTION_STRATEGIES = ("auto", "ring", "gather", "heads")


def attention_settings() -> tuple[str, int, int]:
    """Returns the settings that choose the strategy of attention: `attention`, `ring_steps`, `attention_bytes`."""
    return attention, ring_steps, attention_bytes


class _Settings(types.ModuleType):
    """The class of this module, which adds the settings that affect compiled code to the keys of compiler caches."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "attention" and value not in _ATTENTION_STRATEGIES:
            raise ValueError(f"config.attention is one of {', '.join(map(repr, _ATTENTION_STRATEGIES))}, not {value!r}")
        if name == "compile_on" and value not in ("one", "all"):
            raise ValueError(f"config.compile_on is 'one' or 'all', not {value!r}")
        if name in _COUNTS and (not isinstance(value, int) or value < 0):
            raise ValueError(f"config.{name} is a number of at least 0, not {value!r}")
        before = attention_settings()
        super().__setattr__(name, value)
        set_in_cache_keys(_tag(before), False)
        set_in_cache_keys(_tag(attention_settings()), True)


def _tag(settings: tuple[str, int, int]) -> str:
    return "" if settings == _DEFAULTS else f"-attention by {settings}"


_DEFAULTS = attention_settings()
sys.modules[__name__].__class__ = _Settings
