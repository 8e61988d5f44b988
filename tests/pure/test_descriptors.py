"""Descriptors say what a collective is: what they say agrees with the ops, and passes ask nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardcompile import passes
from shardcompile.collectives import descriptor as descriptors_module
from shardcompile.collectives.arguments import Signature, map_arguments
from shardcompile.collectives.buckets import ALL_GATHER_BUCKET
from shardcompile.collectives.descriptor import Descriptor, Joins, descriptor_of, descriptors
from shardcompile.collectives.gathers import ALL_GATHER_V
from shardcompile.collectives.torch_collectives import SHARD_DIM_ALLTOALL
from shardcompile.collectives.traffic import Traffic, gathered, shards_to_all
from shardcompile.machines import H100
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import WAIT, Collective, collectives
from shardcompile.sharding import GroupPartition, IntLike
from tests.support import lockstep
from tests.support.sources import PACKAGE, SOURCES

OPS = [(d, op) for d in descriptors() for op in d.overloads]


@pytest.mark.parametrize(("descriptor", "op"), OPS, ids=lambda x: x.kind if isinstance(x, Descriptor) else x.name())
def test_names_are_those_of_the_op(descriptor: Descriptor[Any], op: Any) -> None:
    """A record that named torch's arguments in another order would read one for the other."""
    told = [argument.partition(" ")[2] for argument in descriptor.signature.schema.split(", ")]
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    assert names[1:] == told[1:] and names[-1] == "group_name"
    assert descriptor_of(op) is descriptor


def test_names_of_the_exchange_of_dtensor() -> None:
    schema = torch.ops._dtensor.shard_dim_alltoall.default._schema
    assert [a.name for a in schema.arguments] == list(SHARD_DIM_ALLTOALL.arguments._fields)


class _Two(NamedTuple):
    input: Tensor
    src: GroupPartition
    partitions: list[GroupPartition]
    group_name: str


def test_a_record_comes_back_from_the_arguments_that_it_is_written_as() -> None:
    partitions = [GroupPartition([1, 2], 0, []), GroupPartition([], 7, [2, 0, 3]), GroupPartition([], 0, [])]
    record = _Two(torch.ones(3), partitions[1], partitions, "g")
    signature = Signature(_Two)
    written = signature.write(record)
    assert written[1:] == ([], 7, [2, 0, 3], [1, 2], [0, 7, 0], [2, 0, 3], [2, 0, 0, 3, 0, 0], "g")
    assert signature.read(written)[1:] == record[1:]
    assert signature.schema.startswith(
        "Tensor input, SymInt[] src_sizes, SymInt src_key, SymInt[] src_grouping, SymInt[] sizes"
    )


def test_mapped_arguments_keep_their_names() -> None:
    record = _Two(torch.ones(3), GroupPartition(["a", "b"], "k", [1]), [GroupPartition([], "c", [])], "g")  # type: ignore[list-item, arg-type]
    mapped = map_arguments(lambda a: a.upper() if isinstance(a, str) else a, record)
    assert mapped.src == GroupPartition(["A", "B"], "K", [1])  # type: ignore[list-item, arg-type]
    assert mapped.partitions == [GroupPartition([], "C", [])]  # type: ignore[arg-type]


POSITIONS = re.compile(r"\b(c|m|b|back|start|last|first|taken)\.(node\.)?args\[|members\[-1\]\.node\.args")


def test_passes_read_no_argument_of_a_collective_by_its_position() -> None:
    modules = [p for p in SOURCES if PACKAGE / "passes" in p.parents]
    lines = [(p.name, line) for p in modules for line in p.read_text().splitlines()]
    assert len(lines) > 5000
    # What is no collective may be: `taken.args[0]` is what an op of any kind reads first.
    assert [found for found in lines if POSITIONS.search(found[1]) and "Any = taken.args[0]" not in found[1]] == []


def test_the_search_would_find_a_position() -> None:
    assert POSITIONS.search("    dim = c.node.args[1]") and POSITIONS.search("x = back.args[2]")
    assert not POSITIONS.search("source = node.args[0]")


class _Toy(NamedTuple):
    input: Tensor
    dim: int
    total: IntLike
    partition: GroupPartition
    group_name: str


@pytest.fixture(scope="module")
def toy() -> Iterator[Descriptor[_Toy]]:
    before = len(descriptors_module._ALL)
    yield Descriptor(
        "toy_gather",
        _Toy,
        lambda a: torch.cat([a.input.reshape(-1)] * 2),
        sizes=lambda a: {a.dim: a.total},
        members=lambda a, n: [gathered(a.input, a.dim, a.total, a.partition, n)],
        traffic=shards_to_all,
        source=lambda a: (a.total, a.partition),
        joins=Joins("all_gather_bucket", lambda a: [a.partition], uneven=True),
    )
    del descriptors_module._ALL[before:]


def _graph(toy: Descriptor[_Toy]) -> torch.fx.Graph:
    b = lockstep.Builder()
    waits = [b.done(toy.target, b.input(3, 2), 0, 5, [3, 2], 0, [], "g") for _ in range(3)]
    return b.output(*waits)


def test_passes_know_a_new_collective_by_its_descriptor_alone(toy: Descriptor[_Toy]) -> None:
    with lockstep.world_of(2):
        graph = _graph(toy)
        found = collectives(graph)
        assert [c.kind for c in found] == ["toy_gather"] * 3
        assert [c.sizes for c in found] == [(3, 2)] * 3
        gather = lockstep.Builder()
        twin = Collective.of(gather.call(ALL_GATHER_V.target, gather.input(3, 2), 0, 5, [3, 2], 0, [], "g"))
        assert twin is not None and CostModel(H100).price(found[0]) == CostModel(H100).price(twin)
        passes.BucketAllGathers(bucket_bytes=1 << 30, model=CostModel(H100))(graph)
        graph.lint()
        (bucket,) = collectives(graph)
        assert bucket.descriptor is ALL_GATHER_BUCKET
        assert bucket.arguments.partitions == [GroupPartition([3, 2], 0, [])] * 3
        assert bucket.global_bytes == 3 * 5 * 2 * 8


def test_a_collective_without_traffic_has_a_price_all_the_same() -> None:
    class _Plain(NamedTuple):
        input: Tensor
        group_name: str

    plain = Descriptor("toy_without_traffic", _Plain, lambda a: a.input, sizes=lambda a: {0: a.input.shape[0]})
    descriptors_module._ALL.remove(plain)
    b = lockstep.Builder()
    start = b.call(plain.target, b.input(4), "g")
    b.output(b.call(WAIT, start))
    with lockstep.world_of(2):
        c = Collective.of(start)
        assert c is not None and c.global_bytes == 32 and c.sizes is None
        assert CostModel(H100).price(c).seconds > 0


def test_shards_that_go_to_all_cost_what_the_largest_one_does() -> None:
    member = gathered(torch.empty(6, 2, device="meta"), 0, 8, GroupPartition([6, 1, 1], 0, []), 3)
    traffic = shards_to_all([member], 3)
    assert dataclasses.replace(traffic, ring=None) == Traffic(2 * 48.0, 2 * 64)


def test_or_a_ring_moves_an_even_division_of_them() -> None:
    """Of 8 rows of 16 bytes each of 4 ranks has a part of 2; the first one sends 4 of its 6 to others."""
    member = gathered(torch.empty(6, 4, device="meta"), 0, 8, GroupPartition([6, 1, 1, 0], 0, []), 4)
    assert shards_to_all([member], 4).ring == Traffic(3 * 32.0 + 64, 3 * 128, messages=True)
    even = gathered(torch.empty(2, 4, device="meta"), 0, 8, GroupPartition([2, 2, 2, 2], 0, []), 4)
    assert shards_to_all([even], 4).ring == Traffic(3 * 32.0, 3 * 128)
