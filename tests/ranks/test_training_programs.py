"""Random training programs on sharded inputs: losses, gradients, what hooks see and parameters as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import compat
from shardcompile.testing import once
from tests.support.tiers import often
from tests.support.training_programs import Program


def noted(seed: int, compiled: bool) -> list[tuple[str, Tensor | None]]:
    """What a program computes in plain PyTorch."""
    program = Program(seed, lambda full, dim, sizes: full, (lambda model: model) if compiled else None)
    program.run()
    return program.noted


def compare(seed: int, compile_: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None) -> None:
    """Runs a program on sharded inputs, and compares what it computes with plain PyTorch."""
    mesh = init_device_mesh("cpu", (3,))
    expected = once(lambda: noted(seed, compile_ is not None))
    program = Program(
        seed,
        lambda full, dim, sizes: sc.distribute_tensor(full, mesh, [Shard(dim)], sharding_shapes={0: sizes}),
        compile_,
    )
    program.run()
    assert [name for name, _ in program.noted] == [name for name, _ in expected], f"program {seed}"
    for (name, got), (_, want) in zip(program.noted, expected, strict=True):
        if want is None:
            assert got is None, f"program {seed}: {name} is not None"
            continue
        assert got is not None, f"program {seed}: {name} is None"
        if name.startswith(("step", "parameter", "a hook")):
            assert type(got) is Tensor, f"program {seed}: {name} is not plain"
        value = got.full_tensor() if isinstance(got, sc.ShardTensor) else got
        torch.testing.assert_close(value, want, msg=lambda text, name=name: f"program {seed}: {name}: {text}")


@pytest.fixture(autouse=True)
def without_fully_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that other tests of this process have used `fully_shard`, after which gradients do not wait."""
    monkeypatch.setattr(compat, "gradients_are_read_while_backward_runs", lambda: False)


@pytest.fixture(autouse=True)
def bucket_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each gradient alone, several buckets, or one; set here, since ranks that are threads share the setting."""
    first = request.node.callspec.params["first"]
    with sc.config.patch(gradient_bucket_bytes=(25 << 20, 200, 0)[first // 20 % 3]):
        yield


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("first", often(list(range(0, 200, 20)), 1))
def test_eager(first: int) -> None:
    for seed in range(first, first + 20):
        compare(seed)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("first", often(list(range(1000, 1030)), 1))
def test_with_a_compiled_model(first: int) -> None:
    once(torch.compiler.reset)
    compare(first, lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"))
