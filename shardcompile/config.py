"""Settings, as module attributes: ``shardcompile.config.fallback = "error"``."""

from typing import Literal

fallback: Literal["replicate", "warn", "error"] = "replicate"
"""What happens to an op that no rule knows: its inputs are gathered and it runs on full values on every rank
(``replicate``: logged once per op; ``warn``: with a Python warning; ``error``: refused)."""
