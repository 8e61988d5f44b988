"""Settings, as module attributes: ``shardcompile.config.fallback = "error"``."""

import os
from typing import Literal

fallback: Literal["replicate", "warn", "error"] = "replicate"
"""What happens to an op that no rule knows: its inputs are gathered and it runs on full values on every rank
(``replicate``: logged once per op; ``warn``: with a Python warning; ``error``: refused)."""

verify: bool = os.environ.get("SHARDCOMPILE_VERIFY", "0") not in ("", "0")
"""Whether ranks compare their collectives when the passes have compiled a graph, see `shardcompile.passes.verify`. Off
unless the environment variable SHARDCOMPILE_VERIFY is 1, as it is in the workers of `shardcompile.testing`: compiled
code is then not taken from caches, because a rank that finds it there compiles nothing that could be compared."""

verify_timeout: float = 300.0
"""Seconds that a rank waits for what the others have compiled."""
