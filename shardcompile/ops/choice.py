"""Choosing among the strategies of a rule: the cheapest legal one by what the busiest rank receives and computes.

Pure: works on layouts only, so that every rank chooses alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from shardcompile.compat import is_one, size_hint
from shardcompile.ops import Strategy, replicate_all
from shardcompile.planning import RedistributionPlan, find_plan
from shardcompile.sharding import IntLike, Layout, Partition

_MAX_COMBINATIONS = 256
_STAYING = ("fetch_ranges", "regroup_rows", "take_shard")
"""Steps after which a tensor is sharded along the same dims as before, or that send nothing."""

_LEAVING = 4
"""Weight of bytes that take a tensor away from the dims by which it is sharded: a gather or a change of dim is mostly
followed by the way back, forward and backward. Chosen so that a network whose points are sharded stays so."""

MAX_IMBALANCE = 1.5
"""How many times the mean the largest shard of a dim may be that an op newly shards."""


@dataclass(frozen=True)
class OutputPlan:
    """How one output is laid out.

    Attributes:
        placements: one for each mesh dim.
        partitions: by tensor dim.
        left: the mesh dims that shard an input, and along which the output follows no input's partition: it is
            replicated there, or newly sharded.
    """

    placements: tuple[Placement, ...]
    partitions: dict[int, Partition]
    left: tuple[int, ...] = ()

    def layout(self, like: Layout, shape: Sequence[IntLike], dtype: object) -> Layout:
        """The output's layout, once its global shape and dtype are known."""
        partitions = [self.partitions.get(d) for d in range(len(shape))]
        return Layout.of(like.mesh, self.placements, shape, dtype, partitions)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Choice:
    """A chosen way to run an op.

    Attributes:
        plans: how each tensor input gets to the layout that is needed.
        outputs: how each output is laid out.
        nbytes: what the plans move.
        cost: the same, weighted by what it will entail.
        imbalance: how many times the mean the largest shard is of a dim that the op newly shards; 1 if it shards none.
    """

    plans: tuple[RedistributionPlan, ...]
    outputs: tuple[OutputPlan, ...]
    nbytes: int
    cost: int
    imbalance: float

    @property
    def communicates(self) -> bool:
        """Whether any input has to be exchanged between ranks."""
        return any(p.communicates for p in self.plans)

    @property
    def leaves_dims(self) -> bool:
        """Whether more is sent than what brings tensors to other shards along the dims that they are sharded along."""
        return any(s.kind not in _STAYING for p in self.plans for s in p.steps)

    @property
    def sharded_mesh_dims(self) -> list[int]:
        """The mesh dims along which ranks compute different things: an input or an output is sharded by them."""
        placements = [p.dst.placements for p in self.plans] + [o.placements for o in self.outputs]
        return [
            m for m, of_dim in enumerate(zip(*placements, strict=True)) if any(isinstance(p, Shard) for p in of_dim)
        ]


def choose(
    layouts: Sequence[Layout],
    strategies: Iterable[Strategy],
    outputs: int,
    in_place: bool = False,
    produced: Callable[[], Sequence[int]] | None = None,
) -> Choice | None:
    """The cheapest legal way to run an op, or None if there is none (only possible in place).

    Args:
        layouts: of the tensor inputs, all on one mesh.
        strategies: the legal ways along one mesh dim; replicating everything is added.
        outputs: number of outputs.
        in_place: whether the first input is written to, so that it must stay as it is.
        produced: gives the bytes of each output, if they can be known.
    """
    table = [*strategies, replicate_all(len(layouts), outputs)]
    world = len(layouts[0].placements)
    candidates = [_usable(layouts, table, m) for m in range(world)]
    natural = tuple(next((s for s in c if _is_natural(layouts, s, m)), None) for m, c in enumerate(candidates))
    if all(s is not None for s in natural):
        found = _cheapest(layouts, [natural], in_place)  # type: ignore[list-item]
        if found is not None and found.nbytes == 0 and not any(p.steps for p in found.plans):
            return _settled(found)
    found = _cheapest(layouts, itertools.product(*_few_enough(layouts, candidates)), in_place, produced)
    return None if found is None else _settled(found)


def _settled(priced: Choice) -> Choice:
    """A choice whose plans a trace may ask about partitions for, which a price must not."""
    if not any(p.src.is_traced or p.dst.is_traced for p in priced.plans):
        return priced
    return replace(priced, plans=tuple(find_plan(p.src, p.dst) for p in priced.plans))


def _is_natural(layouts: Sequence[Layout], strategy: Strategy, mesh_dim: int) -> bool:
    return _count_fitting(layouts, strategy, mesh_dim) == len(layouts)


def _count_fitting(layouts: Sequence[Layout], strategy: Strategy, mesh_dim: int) -> int:
    return sum(x.placements[mesh_dim] == p for x, p in zip(layouts, strategy.inputs, strict=True))


def _few_enough(layouts: Sequence[Layout], candidates: list[list[Strategy]]) -> list[list[Strategy]]:
    """Limit the combinations to price: keep, on each mesh dim, those that fit most inputs, and replicating."""
    if math.prod(map(len, candidates)) <= _MAX_COMBINATIONS:
        return candidates
    keep = max(int(_MAX_COMBINATIONS ** (1 / len(candidates))), 2)
    return [
        [*sorted(c[:-1], key=lambda s, m=m: -_count_fitting(layouts, s, m))[: keep - 1], c[-1]]  # type: ignore[misc]
        for m, c in enumerate(candidates)
    ]


def _usable(layouts: Sequence[Layout], table: Sequence[Strategy], mesh_dim: int) -> list[Strategy]:
    """Strategies worth pricing: no new sharding unless some input is sharded over this mesh dim already.

    Whole tensors stay whole even where sharding_of them would be free: results are then where a reader expects them.
    """
    now = [x.placements[mesh_dim] for x in layouts]
    any_sharded = any(isinstance(p, Shard) for p in now)
    usable = []
    for strategy in table:
        if any(isinstance(w, Partial) and h != w for h, w in zip(now, strategy.inputs, strict=True)):
            continue
        if any(isinstance(w, Shard) for w in strategy.inputs) and not any_sharded:
            continue
        usable.append(strategy)
    return usable


def _cheapest(
    layouts: Sequence[Layout],
    combinations: Iterable[Sequence[Strategy]],
    in_place: bool,
    produced: Callable[[], Sequence[int]] | None = None,
) -> Choice | None:
    best: tuple[tuple[int, int], Choice] | None = None
    sizes = None if produced is None else functools.cache(produced)
    for combination in combinations:
        for choice in _assemble(layouts, combination):
            if in_place and not _keeps_first(layouts[0], choice):
                continue
            ends = _reduction_cost(choice, sizes) + _return_cost(choice, sizes)
            cost = (choice.cost + ends, sum(len(p.steps) for p in choice.plans))
            if best is None or cost < best[0]:
                best = (cost, choice)
    return None if best is None else best[1]


def _keeps_first(layout: Layout, choice: Choice) -> bool:
    if choice.plans[0].steps or not choice.outputs:
        return not choice.plans[0].steps
    return choice.outputs[0].placements == layout.placements and all(
        partition is None or partition.same_shards(choice.outputs[0].partitions.get(d))
        for d, partition in enumerate(layout.partitions)
    )


def _assemble(layouts: Sequence[Layout], combination: Sequence[Strategy]) -> Iterator[Choice]:
    """The choices that one strategy for each mesh dim leads to: one for each partition that could be taken over."""
    groups: dict[int, tuple[Strategy, list[int]]] = {}
    for mesh_dim, strategy in enumerate(combination):
        groups.setdefault(id(strategy), (strategy, []))[1].append(mesh_dim)
    sharding = [(s, dims) for s, dims in groups.values() if any(isinstance(p, Shard) for p in s.inputs)]
    options = [_partition_options(layouts, s, tuple(dims)) for s, dims in sharding]
    for partitions in itertools.product(*options):
        chosen = {id(s): partition for (s, _), partition in zip(sharding, partitions, strict=True)}
        choice = _with_partitions(layouts, combination, chosen)
        if choice is not None:
            yield choice


def _partition_options(layouts: Sequence[Layout], strategy: Strategy, mesh_dims: tuple[int, ...]) -> list[Partition]:
    """The partitions that inputs have along the axis; torch.chunk's if none has one over just these mesh dims.

    A dim is newly sharded only if it has rows for all ranks, and no rank gets more than `MAX_IMBALANCE` times the mean:
    otherwise rows would pile up, as a batch of 1 would on one rank.
    """
    options: list[Partition] = []
    size: IntLike = 0
    parts = [layouts[0].mesh.shape[m] for m in mesh_dims]
    for layout, placement in zip(layouts, strategy.inputs, strict=True):
        if not isinstance(placement, Shard):
            continue
        size = layout.shape[placement.dim]
        partition = layout.partitions[placement.dim]
        if (
            partition is not None
            and set(partition.mesh_dims) == set(mesh_dims)
            and not any(partition is o for o in options)
        ):
            options.append(partition)
    if strategy.other_partition is not None:
        options += [c for c in map(strategy.other_partition, options) if c is not None]
    if options:  # of choices that cost the same the first is taken; what was flattened may come apart again
        return sorted(options, key=lambda c: (c.makeshift, c.rows is None, is_one(c.runs)))
    chunked = Partition.chunk(mesh_dims, parts, size)
    if size_hint(size) < math.prod(parts) or chunked.imbalance > MAX_IMBALANCE:
        return []
    if any(map(_is_of_trace, layouts)) and chunked.shards is not None and not chunked.is_even:
        chunked = replace(chunked, shards=None)  # shards of known, different sizes would give every rank its own graph
    return [chunked]


def _is_of_trace(layout: Layout) -> bool:
    symbolic = any(not isinstance(size, int) for size in layout.shape)
    return symbolic or any(c is not None and c.shard is not None for c in layout.partitions)


def _with_partitions(
    layouts: Sequence[Layout], combination: Sequence[Strategy], chosen: dict[int, Partition]
) -> Choice | None:
    plans = []
    for index, layout in enumerate(layouts):
        placements = tuple(s.inputs[index] for s in combination)
        partitions = _collect(placements, combination, chosen, {})
        if partitions is None:
            return None
        partition_by_dim = [partitions.get(d) for d in range(layout.ndim)]
        target = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, partition_by_dim)
        plans.append(find_plan(layout, target, ask_chunked=False))
    outputs = []
    for index in range(len(combination[0].outputs)):
        placements = tuple(s.outputs[index] for s in combination)
        partitions = _collect(placements, combination, chosen, {id(s): s for s in combination})
        if partitions is None:
            return None
        outputs.append(OutputPlan(placements, partitions, _left(layouts, placements, combination, chosen)))
    busiest = max((c.imbalance for c in chosen.values() if _is_new(c, layouts)), default=1.0)
    cost = math.ceil(busiest * sum(map(_cost, plans)))
    return Choice(tuple(plans), tuple(outputs), sum(p.nbytes for p in plans), cost, busiest)


def _is_new(partition: Partition, layouts: Sequence[Layout]) -> bool:
    """Whether it is the partition that torch.chunk makes of a dim that no input is sharded along."""
    return partition.kind == "chunk" and not any(partition is c for layout in layouts for c in layout.partitions)


def _left(
    layouts: Sequence[Layout],
    placements: Sequence[Placement],
    combination: Sequence[Strategy],
    chosen: dict[int, Partition],
) -> tuple[int, ...]:
    """The mesh dims of `OutputPlan.left`."""

    def follows(m: int, placement: Placement) -> bool:
        if isinstance(placement, Shard):
            return not _is_new(chosen[id(combination[m])], layouts)
        return isinstance(placement, Partial)

    sharded = (m for m in range(len(placements)) if any(isinstance(x.placements[m], Shard) for x in layouts))
    return tuple(m for m in sharded if not follows(m, placements[m]))


def _cost(plan: RedistributionPlan) -> int:
    """Bytes, as if all shards were of one size: eager code chooses as compiled code does, which knows no sizes."""
    leaves = any(isinstance(a, Shard) and a != b for a, b in zip(plan.src.placements, plan.dst.placements, strict=True))
    return plan.nominal_nbytes * (_LEAVING if leaves else 1)


def _reduction_cost(choice: Choice, produced: Callable[[], Sequence[int]] | None) -> int:
    """Bytes of reducing what a choice leaves as terms, where inputs have to be moved to get there.

    Without it, moving two small factors so that their products are sharded along the dim that is summed over looks
    cheap, however large the product: scores of an attention over a sharded sequence would be terms of full size on
    every rank. Where nothing moves, terms are what the inputs' layouts lead to, and may never have to be reduced.
    """
    partial = [[m for m, p in enumerate(o.placements) if isinstance(p, Partial)] for o in choice.outputs]
    if produced is None or not any(partial) or not choice.communicates:
        return 0
    mesh = choice.plans[0].src.mesh
    return sum(
        nbytes * (math.prod(mesh.shape[m] for m in dims) - 1) for nbytes, dims in zip(produced(), partial, strict=False)
    )


def _return_cost(choice: Choice, produced: Callable[[], Sequence[int]] | None) -> int:
    """Bytes of bringing outputs back to the rows that inputs were sharded by, where inputs were moved away from them.

    Without it, moving two small factors to a dim of the batch looks cheap, however large the product: scores of an
    attention over a sharded sequence would go to the heads and come back. A replicated output pays the same: every rank
    computes all of it.
    """
    if produced is None or not choice.communicates or not any(o.left for o in choice.outputs):
        return 0
    shape = choice.plans[0].src.mesh.shape
    shares = [sum(1 - 1 / shape[m] for m in o.left) for o in choice.outputs]
    return math.ceil(_LEAVING * sum(nbytes * share for nbytes, share in zip(produced(), shares, strict=False)))


def _collect(
    placements: Sequence[Placement],
    combination: Sequence[Strategy],
    chosen: dict[int, Partition],
    transforms: dict[int, Strategy],
) -> dict[int, Partition] | None:
    """Partitions by tensor dim; None if two strategies sharded one dim, or a partition cannot be expressed."""
    partitions: dict[int, Partition] = {}
    owner: dict[int, int] = {}
    for placement, strategy in zip(placements, combination, strict=True):
        if not isinstance(placement, Shard):
            continue
        if owner.setdefault(placement.dim, id(strategy)) != id(strategy):
            return None
        partition: Partition | None = chosen[id(strategy)]
        if id(strategy) in transforms and strategy.on_partition is not None:
            assert partition is not None
            partition = strategy.on_partition(partition)
        if partition is None:
            return None
        partitions[placement.dim] = partition
    return partitions


def whole_plan(layout: Layout) -> RedistributionPlan:
    """How a tensor gets to every rank whole."""
    return find_plan(layout, layout.replicated())
