"""What holds for all tests of this project."""

from __future__ import annotations

import gc

# As in the ranks, see `shardcompile.testing.cleanup`: tracing makes millions of objects that stay.
gc.set_threshold(200_000, 50, 100)


def pytest_collection_finish() -> None:
    """Have the collector leave alone what was imported: it stays, and is most of what there is."""
    gc.collect()
    gc.freeze()
