"""Settings, as module attributes: ``shardcompile.config.fallback = "error"``."""

import os
from typing import Literal

fallback: Literal["replicate", "warn", "error"] = "replicate"
"""What happens to an op that no rule knows: its inputs are gathered and it runs on full values on every rank
(``replicate``: logged once per op; ``warn``: with a Python warning; ``error``: refused)."""

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
