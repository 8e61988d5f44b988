"""What `precompile` records for several numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompile.artifacts import Artifacts
from shardcompile.inspect.offline import OfflineError, precompile
from shardcompile.inspect.offline.trace import Build
from tests.support import precompiled
from tests.support.tiers import needs_compiler


@needs_compiler
@pytest.mark.nightly
def test_only_a_graph_with_the_number_of_ranks_is_compiled_for_each(tmp_path: Path) -> None:
    def graphs(build: Build) -> int:
        precompile(build, tmp_path / "out", world_size=[2, 3])
        return len(Artifacts.of_bytes((tmp_path / "out").read_bytes()).graphs)

    assert graphs(precompiled.build) == 2  # forward and backward
    assert graphs(precompiled.build_softmax) == 2  # a forward graph for each


def test_a_function_without_ops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="nothing to compile"):
        precompile(lambda mesh: (lambda: None, ()), tmp_path / "out", world_size=2)
    assert not list(tmp_path.iterdir())
