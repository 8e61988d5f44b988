"""What holds for all tests of this project."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.versions import skip_what_torch_lacks

# As in the ranks, see `shardcompile.testing.cleanup`: tracing makes millions of objects that stay.
gc.set_threshold(200_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the installed torch lacks."""
    skip_what_torch_lacks(items)


def pytest_collection_finish() -> None:
    """Have the collector leave alone what was imported: it stays, and is most of what there is."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder of sweeps alone unless sweeps are asked for: to list its cases takes longer than most tests."""
    return True if collection_path.name == "sweeps" and "not sweep" in config.option.markexpr else None
