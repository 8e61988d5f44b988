"""The private names of torch that compat stands for exist in the installed version, and are named nowhere else."""

from __future__ import annotations

import inspect
import re

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardcompile import compat
from tests.support.sources import PACKAGE, SOURCES

PRIVATE = re.compile(r"^\s*(from|import) torch\._|from torch\.[\w.]+ import _\w+", re.MULTILINE)


def test_all_names_exist() -> None:
    assert callable(torch._functionalize_unsafe_set)
    assert callable(compat.kernel_of(torch.ops.aten.add.Tensor))
    assert compat.functional_variant(torch.ops.aten.add_.Tensor) is torch.ops.aten.add.Tensor
    assert compat.functional_variant(torch.ops.aten.add.out) is torch.ops.aten.add.Tensor
    assert compat.decomposition_of(torch.ops.aten.mse_loss.default) is not None


def test_a_compiled_graph_is_made_and_finished_as_notes_beside_it_need() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    assert list(inspect.signature(CompiledFxGraph.__init__).parameters)[2:4] == ["graph", "gm"]
    assert callable(CompiledFxGraph.post_compile)


def test_private_modules_are_imported_in_one_place() -> None:
    library = [p for p in SOURCES if not {"launch.py", "testing"} & set(p.relative_to(PACKAGE).parts)]
    outside = [p for p in library if p.parent != PACKAGE / "compat"]
    offenders = [str(p.relative_to(PACKAGE)) for p in outside if PRIVATE.search(p.read_text())]
    assert offenders == []


def test_the_search_would_find_a_private_import() -> None:
    assert PRIVATE.search("import torch._guards")
    assert PRIVATE.search("    from torch._inductor import ir")
    assert PRIVATE.search("from torch.distributed.distributed_c10d import _resolve_process_group")
    assert not PRIVATE.search("from torch.distributed.tensor import DTensor")


def test_sizes_are_reckoned_with_whatever_is_known_of_them() -> None:
    env = ShapeEnv()
    unknown = env.create_unbacked_symint()
    with FakeTensorMode(shape_env=env) as mode:
        known = mode.from_tensor(torch.empty(5, 3), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2))
    assert (compat.size_hint(7), compat.size_hint(unknown), compat.size_hint(6 * unknown)) == (7, 64, 384)
    assert compat.size_hint(known.shape[0] * unknown, default=10) == 50
    assert compat.size_hint(6 * torch.sym_max(1, unknown)) == 384
