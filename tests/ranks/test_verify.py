"""Ranks that would communicate differently are found when they compile."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.fx import Graph

import shardcompile as sc
from shardcompile.compat.observe import cache_counts
from shardcompile.errors import PassError
from shardcompile.passes import Pipeline, compile_with_passes, verify
from shardcompile.passes.graph.collective import WAIT, collectives
from shardcompile.testing import LocalRanks, rank, world_size
from tests.support.tiers import often
from tools.fuzz import Input, Program, run_compiled_on_rank


class ReduceTwiceOnRankOne:
    """A decision that only one rank takes."""

    name = "reduce_twice_on_rank_one"

    def __call__(self, graph: Graph) -> None:
        if rank() != 1:
            return
        first = collectives(graph)[0]
        wait = first.waits[0]
        with graph.inserting_after(wait):
            again = graph.call_function(first.node.target, (wait, *first.node.args[1:]))
        again.meta = dict(first.node.meta)
        with graph.inserting_after(again):
            graph.call_function(WAIT, (again,)).meta = dict(wait.meta)


class FailOnRankOne:
    name = "fail_on_rank_one"

    def __call__(self, graph: Graph) -> None:
        if rank() == 1:
            node = next(iter(graph.nodes))
            raise ValueError(f"no way with {node.name}")


def inputs() -> Tensor:
    mesh = init_device_mesh("cpu", (world_size(),))
    sizes = [5, 0, 2][: world_size()]
    return sc.distribute_tensor(torch.arange(float(sum(sizes))), mesh, [Shard(0)], sharding_shapes={0: sizes})


def gathered(x: Tensor) -> Tensor:
    return x.full_tensor().square().sum()  # type: ignore[attr-defined]


def compiled(*passes: Any, of: Callable[..., Any] = gathered) -> Any:
    torch._dynamo.reset()
    return torch.compile(of, fullgraph=True, backend=backend(*passes))


def backend(*passes: Any) -> Any:
    options = {"post_grad_custom_post_pass": Pipeline(list(passes))}
    return lambda model, example: compile_with_passes(model, example, options=options)


@pytest.mark.ranks(2, 3, timeout=100)
def test_a_decision_of_one_rank_raises_on_all_and_the_next_graph_compiles() -> None:
    x = inputs()
    with pytest.raises(Exception, match="different collectives") as raised:
        compiled(ReduceTwiceOnRankOne())(x)
    text = str(raised.value)
    assert "ranks 0 and 1" in text and "number 1 on (of 1 and 2)" in text and "all_gather_v" in text, text
    whole = x.full_tensor()
    torch.testing.assert_close(compiled()(x), whole.square().sum())


@pytest.mark.ranks(3, timeout=100)
def test_a_rank_that_fails_to_compile_does_not_leave_the_others_waiting() -> None:
    x = inputs()
    start = time.monotonic()
    with pytest.raises(Exception, match="no way with") as raised:
        compiled(FailOnRankOne())(x)
    assert time.monotonic() - start < 60
    text = str(raised.value)
    assert "pass fail_on_rank_one failed at node" in text and "off=['fail_on_rank_one']" in text, text
    assert ("rank 1 failed to compile" in text) == (rank() != 1)
    torch.testing.assert_close(compiled()(x), x.full_tensor().square().sum())


@pytest.mark.ranks(2, timeout=100)
def test_a_rank_that_compiles_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc.config, "verify_timeout", 2.0)
    x = inputs()
    if rank() == 0:
        with pytest.raises(Exception, match="rank 1 did not compile this graph within 2 s"):
            compiled()(x)
    dist.barrier()


@pytest.mark.nightly
@pytest.mark.ranks(4, timeout=100)
def test_groups_of_a_mesh_are_compared_among_their_own_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(7, 5, dtype=torch.float64)
    x = sc.distribute_tensor(full, mesh, [Shard(0), Shard(1)], sharding_shapes={0: [6, 1], 1: [2, 3]})
    torch.testing.assert_close(compiled()(x), full.square().sum())


class RepeatIfTold:
    """Has a setting that its `repr` hides, so that ranks find different code under one key of their caches."""

    name = "repeat_if_told"
    side = ""
    """In which graph the first collective is repeated: forward or backward."""

    def __repr__(self) -> str:
        return "RepeatIfTold()"

    def __call__(self, graph: Graph) -> None:
        side = "backward" if any("tangents" in node.name for node in graph.nodes) else "forward"
        if self.side != side:
            return
        first = collectives(graph)[0]
        with graph.inserting_after(first.waits[0]):
            again = graph.call_function(first.node.target, first.node.args)
        again.meta = dict(first.node.meta)
        with graph.inserting_after(again):
            graph.call_function(WAIT, (again,)).meta = dict(first.waits[0].meta)


def loss_of(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh((x @ weight).full_tensor()).square().sum()  # type: ignore[attr-defined]


def loss_without_sizes(x: Tensor, weight: Tensor) -> Tensor:
    """Its backward graph reads no sizes, so that AOTAutograd compiles it no sooner than in the first backward pass."""
    y = x @ weight
    return (y.mT @ y).full_tensor().square().sum()  # type: ignore[attr-defined]


def trained(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """A loss and its gradient."""
    weight = torch.full((1, 3), 0.5, requires_grad=True)
    result = loss(x, weight)
    result.backward()
    assert weight.grad is not None
    return [result.detach(), weight.grad]


def matches() -> bool:
    """Whether `loss_of`, compiled anew or out of a cache, gives what it gives on the full tensor."""
    x = inputs().unsqueeze(1)
    whole = trained(lambda x, weight: torch.tanh(x @ weight).square().sum(), x.full_tensor())  # type: ignore[attr-defined]
    return all(
        torch.allclose(a, b) for a, b in zip(trained(compiled(RepeatIfTold(), of=loss_of), x), whole, strict=True)
    )


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Has no rank find what another one left, or take it from another one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / str(rank())))
    monkeypatch.setattr(sc.config, "compile_on", "all")


@contextlib.contextmanager
def using(cache: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """Has the cache of FX graphs ("inductor") answer alone, or behind AOTAutograd's. Gives its hits and misses."""
    with torch._functorch.config.patch(enable_autograd_cache=cache == "aot_autograd"):
        yield lambda: (cache_counts()[f"{cache} hits"], cache_counts()[f"{cache} misses"])


def note_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """What this rank compares with others from now on, graph by graph."""
    noted: list[Sequence[str]] = []
    compare = verify._compare

    def noticed(group_name: str, ranks: Sequence[int], lines: Sequence[str]) -> None:
        noted.append(lines)
        compare(group_name, ranks, lines)

    monkeypatch.setattr(verify, "_compare", noticed)
    return noted


CACHES = pytest.mark.parametrize("cache", often(["aot_autograd", "inductor"], 1))


@CACHES
@pytest.mark.ranks(2, timeout=300)
def test_a_warm_start_is_compared_as_a_cold_one(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path)
    with using(cache) as counts:
        noted = note_comparisons(monkeypatch)
        assert matches()
        cold, before = list(noted), counts()
        assert len(cold) == 2 and "all_gather_v" in cold[0][0] and "all_reduce" in cold[1][0], cold
        noted.clear()
        assert matches()
        after = counts()
        assert after[0] > before[0] and after[1] == before[1], (before, after)
        assert noted == cold


@pytest.mark.nightly
def test_without_verification_ranks_of_other_groups_hear_of_a_difference_at_once() -> None:
    """Not only when their time to wait for the ranks that found it is over."""
    lines = [
        *("v0 = torch.atan2(a0, a1.square() + 1)", "v1 = torch.hypot(a1, a0 + 3)  # if away(a0, -3)"),
        *("v2 = torch.cat([v1, a3, v1], 2)", "v3 = torch.tanh(v1)"),
        *(
            "v4 = torch.logaddexp(v1, a3)",
            "v5 = v4 - v1",
            "v6 = v3[2:2]",
            "v7 = v4[1:4]",
            "v8 = torch.logaddexp(a0, v4)",
        ),
        *("v9 = v7.amin([-1], False)  # if apart(v7)", "v10 = torch.linalg.vector_norm(v2, 2, [1], False)"),
        "v11 = v9.trace()",
    ]
    inputs = [
        Input("a0", (2, 2, 3), "R S(2)", {1: [2, 1]}, grad=True, seed=890925),
        Input("a1", (2, 2, 3), "S(0) S(0)", {1: [0, 0, 0, 2]}, grad=True, seed=335158, inferred=True),
        Input("a3", (2, 2, 3), seed=679586),
    ]
    program = Program((2, 2), inputs, lines)
    with sc.config.patch(verify=False), LocalRanks(4, processes=False) as ranks:
        expected = program.expect(True)
        ends = ranks(run_compiled_on_rank, [program] * 3, [expected] * 3, "shardcompile", timeout=200)
    assert all("different collectives" in end.text for end in ends), ends
    assert any("failed to compile: PassError" in end.text for end in ends), ends


@CACHES
@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.ranks(2, timeout=300)
def test_a_difference_between_warm_ranks_is_named(
    cache: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(cache) as counts:
        for name in ("", side):
            monkeypatch.setattr(RepeatIfTold, "side", name)
            use_cache(monkeypatch, tmp_path / f"once{name}")
            assert matches()
        use_cache(monkeypatch, tmp_path / ("once" + (side if rank() == 1 else "")))
        before = counts()
        with pytest.raises(PassError, match="ranks 0 and 1 have compiled different collectives") as raised:
            matches()
        after = counts()
        assert after[0] > before[0] and after[1] == before[1], (before, after)
        kind = "all_gather_v" if side == "forward" else "all_reduce"
        assert "number 1 on (of 1 and 2)" in str(raised.value) and f"rank 1 has {kind}" in str(raised.value)
        use_cache(monkeypatch, tmp_path / "once")
        assert matches()


@pytest.mark.nightly
@pytest.mark.parametrize("cache", ["aot_autograd", "inductor"])
@pytest.mark.ranks(3, timeout=300)
def test_warm_and_cold_ranks_agree_in_whatever_order_they_compile(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(cache) as counts:
        noted = note_comparisons(monkeypatch)

        def both() -> tuple[list[Tensor], int]:
            """Two functions, of which the second goes back first; and how many graphs a backward pass compiled."""
            first = compiled(RepeatIfTold(), of=loss_without_sizes)
            second = torch.compile(loss_of, fullgraph=True, backend=backend(RepeatIfTold()))
            x = inputs().unsqueeze(1)
            weights = [torch.full((1, 3), 0.5, requires_grad=True) for _ in range(2)]
            losses = [first(x, weights[0]), second(x, weights[1])]
            forward = cache_counts()["inductor misses"]
            for loss in reversed(losses):
                loss.backward()
            return [w.grad for w in weights if w.grad is not None], cache_counts()["inductor misses"] - forward

        use_cache(monkeypatch, tmp_path / "warm")
        cold, late = both()
        assert late in (0, 1)  # torch 2.15 compiles this backward graph with the forward one, 2.13 when it is needed
        before, compared = counts(), list(noted)
        noted.clear()
        use_cache(monkeypatch, tmp_path / ("warm" if rank() == 1 else "cold"))
        again, compiled_late = both()
        assert compiled_late == (late if rank() != 1 else 0)
        for a, b in zip(again, cold, strict=True):
            torch.testing.assert_close(a, b)
        after = counts()
        assert (after[0] > before[0], after[1] > before[1]) == (rank() == 1, rank() != 1), (before, after)
        assert noted == compared and len(compared) == 4


@CACHES
@pytest.mark.parametrize("damaged", [None, pytest.param(("all_gather_v", 7), marks=pytest.mark.nightly)])
@pytest.mark.ranks(2, timeout=300)
def test_a_lost_record_is_an_error(
    cache: str, damaged: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(cache):
        use_cache(monkeypatch, tmp_path)
        assert matches()
        if rank() == 1:
            entries = [path for path in (tmp_path / "1" / "fxgraph").rglob("*") if path.is_file()]
            assert len(entries) == 2
            for path in entries:
                graph = pickle.loads(path.read_bytes())
                assert graph.__dict__.pop("_shardcompile_notes")
                if damaged is not None:
                    graph._shardcompile_notes = damaged
                path.write_bytes(pickle.dumps(graph))
        with pytest.raises(Exception, match="lost the record of its collectives") as raised:
            matches()
        text = str(raised.value)
        assert "Delete the cache" in text and ("rank 1 failed to compile" in text) == (rank() == 0), text
        use_cache(monkeypatch, tmp_path / "anew")
        assert matches()


@CACHES
@pytest.mark.ranks(2, timeout=300)
def test_code_without_a_record_is_not_used_where_ranks_compare(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(cache) as counts:
        noted = note_comparisons(monkeypatch)
        use_cache(monkeypatch, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(sc.config, "verify", False)
            assert matches() and not noted
        before = counts()
        assert matches() and len(noted) == 2
        after = counts()
        assert after[0] == before[0] and after[1] > before[1], (before, after)
