"""Which way attention goes: by price or by a setting, the same on every rank, and told by `explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.collectives import Ring
from shardcompile.compat.testing import graphs_compiled
from shardcompile.inspect.report import Report
from shardcompile.testing import mesh

ROWS = Shard(2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def of_rows(rows: int, heads_of_keys: int = 8, placed: Any = ROWS) -> Callable[[DeviceMesh], Any]:
    def build(on: DeviceMesh) -> tuple[Any, tuple[Tensor, ...]]:
        shapes = [(1, h, rows, 64) for h in (8, heads_of_keys, heads_of_keys)]
        return causal, tuple(
            sc.rand(*s, device_mesh=on, placements=[placed], dtype=torch.bfloat16).requires_grad_() for s in shapes
        )

    return build


def explained(build: Any, ranks: int, device: str = "cuda") -> Report:
    return sc.explain(build, world_size=ranks, device=device, stages=())


def kinds(report: Report, side: str = "forward") -> set[str]:
    return {c.kind for g in report.graphs if g.side == side for c in g.traced}


# Keys with two heads: four ranks cannot share them, so that gathering is what a ring is compared with.


def test_few_rows_are_gathered_and_many_come_by_a_ring() -> None:
    few, many = (explained(of_rows(rows, 2), 4, "cpu") for rows in (64, 1024))
    assert kinds(few) == {"all_gather_v"}
    assert kinds(many) == {"fetch_shard"}
    assert kinds(many, "backward") == {"fetch_shard", "return_shard"}
    (way,) = few.graphs[0].attention_strategies
    assert way.startswith("with all keys and values gathered: 96 KiB sent, 32 KiB held, ")
    assert "little would be gained by a ring: 48 KiB sent, 16 KiB held, " in way
    forward, backward = (g.attention_strategies for g in many.graphs)
    assert len(forward) == len(backward) == 1
    assert "predicted to be faster than with all keys and values gathered: 1.5 MiB sent, 512 KiB held" in forward[0]
    assert f"attention goes {forward[0]}" in str(many)
    assert Report.from_json(many.to_json()).graphs[0].attention_strategies == forward
    assert forward[0] in many.to_html()


def test_a_ring_that_is_too_long_is_not_taken_and_told() -> None:
    found = explained(of_rows(1 << 19, 2), 16)
    assert kinds(found) == {"all_gather_v"}
    assert "a ring of 16 ranks is longer than config.ring_steps, 8" in found.graphs[0].attention_strategies[0]
    with sc.config.patch(ring_steps=3):
        assert kinds(explained(of_rows(1 << 17, 2), 4)) == {"all_gather_v"}


def test_a_ring_where_the_other_way_holds_too_much() -> None:
    build = of_rows(4096, 2)
    assert kinds(explained(build, 4)) == {"all_gather_v"}
    with sc.config.patch(attention_bytes=1 << 20):
        found = explained(build, 4)
    assert kinds(found) == {"fetch_shard"}
    assert (
        "config.attention_bytes is 1 MiB, less than with all keys and values gathered"
        in found.graphs[0].attention_strategies[0]
    )


def test_ways_that_are_set() -> None:
    wanted = {"ring": {"fetch_shard"}, "gather": {"all_gather_v"}, "heads": {"all_to_all_v"}}
    for attention, found in wanted.items():
        with sc.config.patch(attention=attention):
            report = explained(of_rows(64), 4, "cpu")
        assert kinds(report) == found
        assert report.graphs[0].attention_strategies[0].endswith(f"; config.attention is '{attention}'")
    with sc.config.patch(attention="heads"):
        (way,) = explained(of_rows(64, 2), 4, "cpu").graphs[0].attention_strategies
    assert "; config.attention is 'heads', which is not possible here; " in way


def test_nothing_is_told_where_nothing_is_sent() -> None:
    assert [g.attention_strategies for g in explained(of_rows(64, placed=Shard(1)), 4, "cpu").graphs] == [(), ()]
    assert explained(of_rows(64, placed=Replicate()), 4, "cpu").graphs[0].attention_strategies == ()


@pytest.mark.ranks(2)  # ranks that are threads would share the setting
def test_a_context_decides_and_compiled_functions_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = Ring.fetch

    def noted(self: Ring, shards: Any, dims: Any, by: int, after: Tensor | None = None) -> Any:
        fetched.append(by)
        return fetch(self, shards, dims, by, after)

    monkeypatch.setattr(Ring, "fetch", noted)
    torch.manual_seed(0)
    full = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]
    q, k, v = (sc.distribute_tensor(x, mesh(), [ROWS], sharding_shapes={0: [4, 5]}) for x in full)
    wanted = causal(*full)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        call = torch.compile(causal, fullgraph=True, backend=backend)
        before, rings = graphs_compiled(), []
        for attention in ("auto", "ring", "auto", "ring"):
            fetched.clear()
            with sc.config.patch(attention=attention):
                torch.testing.assert_close(call(q, k, v).full_tensor(), wanted)  # type: ignore[attr-defined]
            rings.append(bool(fetched))
        assert sc.config.attention == "auto"
        # A graph of `eager` runs the call as it is, the other one has been traced once for each setting.
        assert rings == ([False, True, False, True] if backend == "eager" else [False, True, False, False])
        assert graphs_compiled() - before == 2


def test_settings_that_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="no setting 'atention'; it has fallback, attention"),
        sc.config.patch(atention=1),
    ):
        pass
    with pytest.raises(ValueError, match="one of 'auto', 'ring', 'gather', 'heads', not 'circle'"):
        sc.config.attention = "circle"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="ring_steps is a number of at least 0, not -1"):
        sc.config.ring_steps = -1

    @torch.compile(fullgraph=True, backend="eager")
    def inside(x: Tensor) -> Tensor:
        with sc.config.patch(attention="ring"):
            return x + 1

    with pytest.raises(Exception, match="begins and ends outside of compiled functions"):
        inside(torch.ones(2))


def test_caches_are_told_of_every_setting() -> None:
    tag = torch.compiler.config.cache_key_tag
    for settings in ({"attention": "heads"}, {"ring_steps": 5}, {"attention_bytes": 7}):
        with sc.config.patch(**settings):
            assert torch.compiler.config.cache_key_tag != tag
    assert torch.compiler.config.cache_key_tag == tag
