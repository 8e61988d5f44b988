"""What holds for all tests of this project."""

from __future__ import annotations

import gc

# As in the ranks, see `shardcompile.testing.cleanup`: tracing makes millions of objects that stay.
gc.set_threshold(50_000, 50, 100)
