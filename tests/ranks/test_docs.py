"""The code of docs/testing.md runs: its tests are tests of this file."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from shardcompile.testing import assert_matches_single_device
from tests.support.pages import DOCS, code_blocks

BLOCKS = code_blocks(DOCS / "testing.md")

# Ranks import this file as well, and find the tests by their names. Line numbers are those of the guide.
for block in BLOCKS:
    if block.language == "python":
        exec(block.compiled())


def test_the_guide_has_tests() -> None:
    assert sum(name.startswith("test_") for name in globals()) >= 8


@pytest.mark.ranks(2)
def test_the_failure_reads_as_the_guide_says() -> None:
    (told,) = [block.source for block in BLOCKS if block.language == "text"]
    mean_of_means = globals()["mean_of_means"]
    with pytest.raises(AssertionError) as raised:
        assert_matches_single_device(mean_of_means, [torch.arange(14.0).reshape(7, 2)], [Shard(0)], backward=False)
    assert str(raised.value) == told.strip()
