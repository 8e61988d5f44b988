"""Settings, as module attributes: ``shardcompile.config.fallback = "error"``."""

import os
import sys
import types
from typing import Literal

from shardcompile.compat.caches import put_into_keys

fallback: Literal["replicate", "warn", "error"] = "replicate"
"""What happens to an op that no rule knows: its inputs are gathered and it runs on full values on every rank
(``replicate``: logged once per op; ``warn``: with a Python warning; ``error``: refused)."""

attention: Literal["auto", "ring"] = "auto"
"""How `scaled_dot_product_attention` runs where the sequence is cut. ``auto``: whatever moves the fewest bytes: each
rank gathers the keys and values, or takes part of the heads or of the batch for all rows. ``ring``: rows stay, and keys
and values come a block at a time, the next one under way while one is computed, and again in the backward pass; a rank
never holds more than two blocks of others. The graph of a ring has as many steps as there are ranks along the cut. Read
when a call runs or is traced: set it before the first one, on all ranks."""

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
`shardcompile.watch`. On unless the environment variable SHARDCOMPILE_WATCH is 0. Read when a process group is used for
the first time."""


class _Settings(types.ModuleType):
    """The module itself: settings that become part of what is compiled are part of the keys of compiler caches."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "attention":
            if value not in ("auto", "ring"):
                raise ValueError(f"config.attention is 'auto' or 'ring', not {value!r}")
            put_into_keys(_RING_TAG, value == "ring")
        super().__setattr__(name, value)


_RING_TAG = "-attention by ring"
sys.modules[__name__].__class__ = _Settings
