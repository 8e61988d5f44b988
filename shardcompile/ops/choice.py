"""Chooses among the strategies of a rule: the legal one with the lowest cost on the busiest rank.

The choice is a pure function of layouts, so that it is rank-invariant.
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
_SAME_DIM_STEPS = ("fetch_ranges", "regroup_rows", "take_shard")
"""Steps that send nothing, or after which a tensor is sharded along the same dims as before."""

_DIM_CHANGE_WEIGHT = 4
"""Weight of the bytes of redistributions that change the sharded dims: a gather or a change of dim is usually followed
by the inverse redistribution, in the forward and in the backward pass. The value is chosen so that a network whose
points are sharded keeps this sharding."""

MAX_IMBALANCE = 1.5
"""Largest permitted ratio of the largest shard to the mean shard where an op newly shards a dim."""


@dataclass(frozen=True)
class OutputPlan:
    """The layout of one output, before its shape and dtype are known.

    Attributes:
        placements: one for each mesh dim.
        partitions: the partition of each sharded tensor dim.
        left: the mesh dims that shard an input, but along which the output does not have the partition of an input: it
            is replicated there, or newly sharded.
    """

    placements: tuple[Placement, ...]
    partitions: dict[int, Partition]
    left: tuple[int, ...] = ()

    def layout(self, like: Layout, shape: Sequence[IntLike], dtype: object) -> Layout:
        """Returns the layout of the output for a global shape and dtype."""
        partitions = [self.partitions.get(d) for d in range(len(shape))]
        return Layout.of(like.mesh, self.placements, shape, dtype, partitions)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Choice:
    """A chosen strategy for each mesh dim, and the redistributions that it requires.

    Attributes:
        plans: the redistribution of each tensor input to the required layout.
        outputs: the layout of each output.
        nbytes: bytes that the plans send.
        cost: bytes that the plans send, weighted by the communication that they entail later.
        imbalance: ratio of the largest shard to the mean shard of a dim that the op newly shards; 1 if it shards none.
    """

    plans: tuple[RedistributionPlan, ...]
    outputs: tuple[OutputPlan, ...]
    nbytes: int
    cost: int
    imbalance: float

    @property
    def communicates(self) -> bool:
        """Whether any input is communicated between ranks."""
        return any(p.communicates for p in self.plans)

    @property
    def changes_sharded_dims(self) -> bool:
        """Whether the plans communicate for more than to change shard sizes of dims that are sharded already."""
        return any(s.kind not in _SAME_DIM_STEPS for p in self.plans for s in p.steps)

    @property
    def sharded_mesh_dims(self) -> list[int]:
        """The mesh dims along which ranks compute different values: those that shard an input or an output."""
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
    """Returns the cheapest legal choice for an op, or None if there is none (only possible in place).

    Args:
        layouts: layouts of the tensor inputs, all on one mesh.
        strategies: the legal strategies along one mesh dim; replicating everything is added.
        outputs: number of outputs.
        in_place: whether the first input is written to, so that its layout must not change.
        produced: returns the bytes of each output, if they can be inferred.
    """
    table = [*strategies, replicate_all(len(layouts), outputs)]
    mesh_ndim = len(layouts[0].placements)
    candidates = [_usable(layouts, table, m) for m in range(mesh_ndim)]
    matching = tuple(next((s for s in c if _matches_all(layouts, s, m)), None) for m, c in enumerate(candidates))
    if all(s is not None for s in matching):
        found = _cheapest(layouts, [matching], in_place)  # type: ignore[list-item]
        if found is not None and found.nbytes == 0 and not any(p.steps for p in found.plans):
            return _finalized(found)
    found = _cheapest(layouts, itertools.product(*_prune(layouts, candidates)), in_place, produced)
    return None if found is None else _finalized(found)


def _finalized(choice: Choice) -> Choice:
    """Replaces the plans of a traced choice, made for their costs without guards, by ones that may install guards."""
    if not any(p.src.has_symbols or p.dst.has_symbols for p in choice.plans):
        return choice
    return replace(choice, plans=tuple(find_plan(p.src, p.dst) for p in choice.plans))


def _matches_all(layouts: Sequence[Layout], strategy: Strategy, mesh_dim: int) -> bool:
    return _count_matching(layouts, strategy, mesh_dim) == len(layouts)


def _count_matching(layouts: Sequence[Layout], strategy: Strategy, mesh_dim: int) -> int:
    return sum(x.placements[mesh_dim] == p for x, p in zip(layouts, strategy.inputs, strict=True))


def _prune(layouts: Sequence[Layout], candidates: list[list[Strategy]]) -> list[list[Strategy]]:
    """Limits the number of combinations to evaluate.

    Keeps, for each mesh dim, the strategies that match most inputs, and replicating.
    """
    if math.prod(map(len, candidates)) <= _MAX_COMBINATIONS:
        return candidates
    keep = max(int(_MAX_COMBINATIONS ** (1 / len(candidates))), 2)
    return [
        [*sorted(c[:-1], key=lambda s, m=m: -_count_matching(layouts, s, m))[: keep - 1], c[-1]]  # type: ignore[misc]
        for m, c in enumerate(candidates)
    ]


def _usable(layouts: Sequence[Layout], table: Sequence[Strategy], mesh_dim: int) -> list[Strategy]:
    """Returns the strategies to consider: none that shards unless some input is sharded over this mesh dim already.

    Replicated tensors stay replicated even where sharding them would be free, so that results have the layouts that a
    reader expects.
    """
    current = [x.placements[mesh_dim] for x in layouts]
    any_sharded = any(isinstance(p, Shard) for p in current)
    usable = []
    for strategy in table:
        if any(isinstance(w, Partial) and h != w for h, w in zip(current, strategy.inputs, strict=True)):
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
            if in_place and not _keeps_first_layout(layouts[0], choice):
                continue
            output_cost = _reduction_cost(choice, sizes) + _return_cost(choice, sizes)
            cost = (choice.cost + output_cost, sum(len(p.steps) for p in choice.plans))
            if best is None or cost < best[0]:
                best = (cost, choice)
    return None if best is None else best[1]


def _keeps_first_layout(layout: Layout, choice: Choice) -> bool:
    if choice.plans[0].steps or not choice.outputs:
        return not choice.plans[0].steps
    return choice.outputs[0].placements == layout.placements and all(
        partition is None or partition.guard_same_shards(choice.outputs[0].partitions.get(d))
        for d, partition in enumerate(layout.partitions)
    )


def _assemble(layouts: Sequence[Layout], combination: Sequence[Strategy]) -> Iterator[Choice]:
    """Yields the choices for one strategy per mesh dim: one for each partition that the inputs could be brought to."""
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
    """Returns the partitions that inputs have along the axis; the chunked one if none is over exactly these mesh dims.

    A dim is newly sharded only if it has rows for all ranks and no rank gets more than `MAX_IMBALANCE` times the mean.
    Otherwise rows would pile up, as a batch of 1 would on one rank.
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
    if options:  # the first of equally cheap ones is chosen; a flattened dim precedes, as it may be unflattened again
        return sorted(options, key=_preference)
    chunked = Partition.chunk(mesh_dims, parts, size)
    if size_hint(size) < math.prod(parts) or chunked.imbalance > MAX_IMBALANCE:
        return []
    if any(map(_is_traced, layouts)) and chunked.known_sizes is not None and not chunked.is_even:
        chunked = replace(
            chunked, known_sizes=None
        )  # static, different shard sizes would give every rank its own graph
    return [chunked]


def _preference(partition: Partition) -> tuple[bool, bool, bool]:
    """The sort key of equally cheap partitions: a smaller one is preferred."""
    provenance = partition.provenance
    return provenance.provisional, provenance.indexed_rows is None, is_one(partition.num_segments)


def _is_traced(layout: Layout) -> bool:
    symbolic = any(not isinstance(size, int) for size in layout.shape)
    return symbolic or any(c is not None and c.trace.local_size is not None for c in layout.partitions)


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
        plans.append(find_plan(layout, target, guard_chunk=False))
    outputs = []
    for index in range(len(combination[0].outputs)):
        placements = tuple(s.outputs[index] for s in combination)
        partitions = _collect(placements, combination, chosen, {id(s): s for s in combination})
        if partitions is None:
            return None
        outputs.append(OutputPlan(placements, partitions, _left_mesh_dims(layouts, placements, combination, chosen)))
    busiest = max((c.imbalance for c in chosen.values() if _is_new(c, layouts)), default=1.0)
    cost = math.ceil(busiest * sum(map(_cost, plans)))
    return Choice(tuple(plans), tuple(outputs), sum(p.nbytes for p in plans), cost, busiest)


def _is_new(partition: Partition, layouts: Sequence[Layout]) -> bool:
    """Whether a partition is the chunked one of a dim along which no input is sharded."""
    return partition.kind == "chunk" and not any(partition is c for layout in layouts for c in layout.partitions)


def _left_mesh_dims(
    layouts: Sequence[Layout],
    placements: Sequence[Placement],
    combination: Sequence[Strategy],
    chosen: dict[int, Partition],
) -> tuple[int, ...]:
    """Returns the mesh dims of `OutputPlan.left`."""

    def follows(m: int, placement: Placement) -> bool:
        if isinstance(placement, Shard):
            return not _is_new(chosen[id(combination[m])], layouts)
        return isinstance(placement, Partial)

    sharded = (m for m in range(len(placements)) if any(isinstance(x.placements[m], Shard) for x in layouts))
    return tuple(m for m in sharded if not follows(m, placements[m]))


def _cost(plan: RedistributionPlan) -> int:
    """Returns the bytes of a plan as if all shards had the same size.

    Compiled code does not know the shard sizes, and eager code has to choose the same strategy.
    """
    changes_dims = any(
        isinstance(a, Shard) and a != b for a, b in zip(plan.src.placements, plan.dst.placements, strict=True)
    )
    return plan.nominal_nbytes * (_DIM_CHANGE_WEIGHT if changes_dims else 1)


def _reduction_cost(choice: Choice, produced: Callable[[], Sequence[int]] | None) -> int:
    """Returns the bytes of reducing the Partial outputs of a choice that redistributes inputs.

    Without this cost, redistributing two small factors so that they are sharded along the contracted dim looks cheap,
    however large the product is: the scores of attention over a sharded sequence would be partial sums of full size on
    every rank. Where no input is redistributed, Partial outputs follow from the layouts of the inputs, and may never
    have to be reduced.
    """
    partial = [[m for m, p in enumerate(o.placements) if isinstance(p, Partial)] for o in choice.outputs]
    if produced is None or not any(partial) or not choice.communicates:
        return 0
    mesh = choice.plans[0].src.mesh
    return sum(
        nbytes * (math.prod(mesh.shape[m] for m in dims) - 1) for nbytes, dims in zip(produced(), partial, strict=False)
    )


def _return_cost(choice: Choice, produced: Callable[[], Sequence[int]] | None) -> int:
    """Returns the bytes of redistributing outputs to the sharding that inputs had before they were redistributed.

    Without this cost, resharding two small factors along a batch dim looks cheap, however large the product is: the
    scores of attention over a sharded sequence would be sharded over heads and back. A replicated output has the same
    cost, as every rank computes all of it.
    """
    if produced is None or not choice.communicates or not any(o.left for o in choice.outputs):
        return 0
    shape = choice.plans[0].src.mesh.shape
    fractions = [sum(1 - 1 / shape[m] for m in o.left) for o in choice.outputs]
    return math.ceil(
        _DIM_CHANGE_WEIGHT * sum(nbytes * sent for nbytes, sent in zip(produced(), fractions, strict=False))
    )


def _collect(
    placements: Sequence[Placement],
    combination: Sequence[Strategy],
    chosen: dict[int, Partition],
    transforms: dict[int, Strategy],
) -> dict[int, Partition] | None:
    """Returns partitions by tensor dim; None if two strategies shard one dim, or a partition cannot be expressed."""
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
    """Returns the plan that replicates a tensor."""
    return find_plan(layout, layout.replicated())
