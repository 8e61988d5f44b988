"""Small programs on sharded tensors, drawn at random, and what every step of a run gave on this rank, bit for bit.

For comparing two ways to run the same ranks, or two states of the library: records are equal if layouts, shards,
strides, collectives, errors and gradients are. A program is drawn from a seed alone, by running it on plain full
tensors. What it is on a mesh (layouts, sizes) is drawn from the seed and the mesh's shape. Nothing depends on the rank
but the values of shards, so that a rank that stops, or takes another way, is a fault of the library.

    ranks = LocalRanks(3)
    by_rank = ranks(records, range(200))                # by rank, then seed, then step
    by_rank = LocalRanks(4)(records_on_square, range(200))
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile import ShardTensor
from shardcompile.sharding import chunk_sizes
from shardcompile.testing.arrange import seed_of
from shardcompile.testing.watch import CollectiveWatch

MOST_ELEMENTS = 3000
SHARE_OF_MISTAKES = 0.1

# Records


@dataclass(frozen=True)
class Held:
    """A tensor as this rank holds it.

    Attributes:
        layout: the layout, or that it is plain.
        dtype: of the elements.
        shape: of the shard, or of the plain tensor.
        stride: of it.
        data: its elements in order, as bytes.
    """

    layout: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes = field(repr=False)

    @staticmethod
    def of(x: Tensor) -> Held:
        """What this rank holds of a tensor."""
        shard: Tensor = x._local_tensor if isinstance(x, ShardTensor) else x
        shard = shard.detach()
        data = shard.numpy().tobytes()
        layout = x._spec.layout.describe() if isinstance(x, ShardTensor) else "plain"
        return Held(layout, str(shard.dtype), tuple(shard.shape), shard.stride(), data)


@dataclass(frozen=True)
class Record:
    """What a step gave on this rank.

    Attributes:
        step: its text.
        results: of an op its results, of the backward pass the gradients, of the end all values of the program once
            more, since writes may have changed them; None where there is no gradient.
        collectives: in order: the name, and dtype, shape and bytes of each tensor that this rank put in.
        error: type and text of what it raised.
    """

    step: str
    results: tuple[Held | None, ...] = ()
    collectives: tuple[tuple[str, tuple[tuple[str, tuple[int, ...], int], ...]], ...] = ()
    error: tuple[str, str] | None = None


BACKWARD, END = "backward", "end"


def outcome(program: Sequence[Record]) -> str:
    """How a program ended: in an ``error``, after a ``backward`` pass, or ``forward`` only."""
    if program[-1].error is not None:
        return "error"
    return "backward" if any(r.step.startswith(BACKWARD) for r in program) else "forward"


class _Watch(CollectiveWatch):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[str, tuple[int, ...], int], ...]]] = []

    def saw(self, name: str, x: Any, out: Any) -> None:
        tensors = [t for t in (x if isinstance(x, (list, tuple)) else [x]) if isinstance(t, Tensor)]
        self.seen.append((name, tuple((str(t.dtype), tuple(t.shape), t.nbytes) for t in tensors)))


# Programs


@dataclass(frozen=True)
class Here:
    """Where a step runs.

    Attributes:
        mesh: None where the program runs on plain tensors.
        key: from which, with the shape of the mesh, the step draws what depends on the mesh.
    """

    mesh: DeviceMesh | None
    key: int

    @property
    def rng(self) -> random.Random:
        """The same on every rank."""
        return random.Random(seed_of(self.key, None if self.mesh is None else tuple(self.mesh.shape)))


Run = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """An op of a program.

    Attributes:
        text: what it does, for people.
        run: called with a `Here` and the operands; gives one tensor or several.
        operands: places of its operands among the values of the program.
    """

    text: str
    run: Run
    operands: tuple[int, ...]

    def __call__(self, here: Here, values: Sequence[Tensor]) -> list[Tensor]:
        """Its results."""
        out = self.run(here, *[values[n] for n in self.operands])
        return list(out) if isinstance(out, (list, tuple)) else [out]


@dataclass(frozen=True)
class Source:
    """An input: a sharded tensor, or a plain parameter.

    Attributes:
        shape: global shape.
        dtype: of the elements.
        grad: whether it wants a gradient.
        sharded: whether it is laid out over the mesh, in a layout that follows from `key`.
        key: from which values and layouts follow.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    sharded: bool
    key: int

    def values(self, term: tuple[int, ...] = ()) -> Tensor:
        """The full value, or a term of a pending reduction."""
        generator = torch.Generator().manual_seed(seed_of(self.key, term))
        if self.dtype is torch.int64:
            return torch.randint(-9, 10, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def plain(self) -> Tensor:
        """The tensor as a leaf, for a run on plain tensors."""
        return self.values().requires_grad_(self.grad)

    def make(self, mesh: DeviceMesh) -> Tensor:
        """The tensor as a leaf, laid out on a mesh. Does not communicate."""
        if not self.sharded:
            return self.plain()
        rng = Here(mesh, self.key).rng
        placements = draw_placements(rng, mesh, len(self.shape), self.dtype)
        sizes = draw_sizes(rng, mesh, self.shape, placements)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        shard = self.values(tuple(c for c, p in zip(coordinate, placements, strict=True) if isinstance(p, Partial)))
        for dim in range(len(self.shape)):
            mesh_dims = [m for m, p in enumerate(placements) if p == Shard(dim)]
            if mesh_dims:
                along, place = sizes[mesh_dims[-1]], 0
                for m in mesh_dims:
                    place = place * mesh.shape[m] + coordinate[m]
                shard = shard.narrow(dim, sum(along[:place]), along[place])
        x = ShardTensor.from_local(shard.clone(), mesh, placements, sizes)
        return x.detach().requires_grad_(self.grad)

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), str(list(self.shape))]
        words += ["with gradient"] if self.grad else []
        return " ".join(words + ([] if self.sharded else ["plain"]))


@dataclass(frozen=True)
class Program:
    """Inputs and steps, drawn from a seed.

    Attributes:
        seed: the seed.
        sources: its inputs.
        steps: in order.
        goal: place of the value from which the backward pass starts; None if no value wants a gradient.
    """

    seed: int
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    goal: int | None

    def __str__(self) -> str:
        return "\n".join([f"program {self.seed}", *map(str, self.sources), *[s.text for s in self.steps]])

    def run(self, mesh: DeviceMesh) -> list[Record]:
        """Run it on this rank.

        Args:
            mesh: of one dim, or of several.

        Returns:
            One record for the inputs, one for each step, one for the backward pass if there is one, and one for the
            end. The first that raised is the last.
        """
        torch.manual_seed(self.seed)
        leaves = [s.make(mesh) for s in self.sources]
        values = list(leaves)
        found = [Record("inputs", tuple(map(Held.of, leaves)))]

        def take(text: str, run: Callable[[], Sequence[Tensor | None]]) -> bool:
            watch = _Watch()
            try:
                with watch:
                    results = run()
            except Exception as error:
                found.append(Record(text, (), tuple(watch.seen), (type(error).__name__, str(error))))
                return False
            held = tuple(None if x is None else Held.of(x) for x in results)
            found.append(Record(text, held, tuple(watch.seen)))
            return True

        for n, step in enumerate(self.steps):
            here = Here(mesh, seed_of(self.seed, "step", n))

            def add(step: Step = step, here: Here = here) -> list[Tensor]:
                results = step(here, values)
                values.extend(results)
                return results

            if not take(step.text, add):
                return found
        goal = self.goal
        if goal is not None and not take(f"{BACKWARD} from {name(goal)}", lambda: self.gradients(leaves, values[goal])):
            return found
        take(END, lambda: values)
        return found

    def gradients(self, leaves: Sequence[Tensor], value: Tensor) -> list[Tensor | None]:
        """Of the inputs, from a weighted sum of a value."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "weights"))
        weights = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        (value * weights).sum().backward()
        return [x.grad for x in leaves]


def name(place: int) -> str:
    """What the value in a place is called in texts."""
    return f"v{place}"


def records(mesh: DeviceMesh, seeds: Sequence[int]) -> list[list[Record]]:
    """Run the programs of some seeds on this rank.

    Args:
        mesh: the mesh; the first argument, as `LocalRanks` hands it over.
        seeds: of the programs.

    Returns:
        For each seed what its steps gave.
    """
    return [program(seed).run(mesh) for seed in seeds]


def records_on_square(mesh: DeviceMesh, seeds: Sequence[int]) -> list[list[Record]]:
    """As `records`, with four ranks as a mesh of two by two."""
    return records(init_device_mesh(mesh.device_type, (2, 2)), seeds)


# Layouts


def draw_placements(rng: random.Random, mesh: DeviceMesh, ndim: int, dtype: torch.dtype | None) -> list[Placement]:
    """Placements for a tensor.

    Args:
        rng: the same on every rank.
        mesh: the mesh.
        ndim: dims of the tensor.
        dtype: of the tensor; None if there is to be no pending reduction.
    """
    # One reduction for the whole tensor: two that do not commute are refused.
    reduction = rng.choice(["sum", "sum", "max", "avg"]) if dtype is not torch.int64 else rng.choice(["sum", "max"])

    def one() -> Placement:
        number = rng.random()
        if number < 0.65 and ndim:
            return Shard(rng.randrange(ndim))
        return Partial(reduction) if number > 0.82 and dtype not in (None, torch.bool) else Replicate()

    return [one() for _ in range(mesh.ndim)]


def draw_sizes(
    rng: random.Random, mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]
) -> dict[int, list[int]]:
    """Shard sizes of every sharded dim by mesh dim, as ``sharding_shapes`` takes them."""
    sizes: dict[int, list[int]] = {}
    for dim, size in enumerate(shape):
        mesh_dims = [m for m, p in enumerate(placements) if p == Shard(dim)]
        if mesh_dims:
            sizes[mesh_dims[-1]] = _parts(rng, size, math.prod(mesh.shape[m] for m in mesh_dims))
    return sizes


def _parts(rng: random.Random, size: int, parts: int) -> list[int]:
    """A way to shard a size: anywhere, torch.chunk's, all in one shard, or with shards of one and empty ones."""
    style = rng.randrange(6)
    return list(chunk_sizes(size, parts)) if style == 0 else parts_in_style(rng, size, parts, style - 1)


def parts_in_style(rng: random.Random, size: int, parts: int, style: int) -> list[int]:
    """A way to shard a size: all in one shard (style 0), shards of one and empty ones (1), or anywhere."""
    if style == 0:
        sizes = [0] * parts
        sizes[rng.randrange(parts)] = size
        return sizes
    if style == 1:
        sizes = []
        for _ in range(parts - 1):
            sizes.append(min(rng.randrange(2), size - sum(sizes)))
        sizes.append(size - sum(sizes))
        rng.shuffle(sizes)
        return sizes
    ends = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]


# Drawing


class NoFit(Exception):
    """An op has no operands among the values that there are."""


class Draw:
    """A program in the making: its plain values so far, and choices among them.

    Attributes:
        rng: of the seed.
        values: plain, full.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.values: list[Tensor] = []

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True) -> int:
        """Place of a value that fits, the last ones more often.

        Raises:
            NoFit: there is none.
        """
        places = [n for n, x in enumerate(self.values) if fits(x)]
        if not places:
            raise NoFit
        return places[-1] if self.rng.random() < 0.45 else self.rng.choice(places)

    def number(self, ndim: int = 0, fits: Callable[[Tensor], bool] = lambda x: True) -> int:
        """Place of a floating-point value of at least `ndim` dims."""
        return self.pick(lambda x: x.is_floating_point() and x.ndim >= ndim and fits(x))

    def other(self, x: int, fits: Callable[[Tensor, Tensor], bool] | None = None) -> int:
        """Place of another floating-point value, one that can be broadcast with that in place `x` by default."""
        fits = fits or (lambda a, b: _broadcasts(a.shape, b.shape))
        found = [n for n, y in enumerate(self.values) if n != x and y.is_floating_point() and fits(self.values[x], y)]
        return self.rng.choice(found) if found else self.number(0, lambda y: fits(self.values[x], y))

    def dim(self, x: int, fits: Callable[[int], bool] = lambda size: True) -> int:
        """A dim of the value in place `x` whose size fits, counted from the first or from the last."""
        value = self.values[x]
        dims = [d for d in range(value.ndim) if fits(value.shape[d])]
        if not dims:
            raise NoFit
        dim = self.rng.choice(dims)
        return dim - value.ndim if self.rng.random() < 0.3 else dim

    def dims(self, x: int) -> list[int]:
        """Some dims."""
        ndim = self.values[x].ndim
        return sorted(self.rng.sample(range(ndim), self.rng.randint(1, ndim)))

    def index(self) -> tuple[str, tuple[int, ...], Callable[[Sequence[Tensor], int], Tensor]]:
        """Text, operands and value of a vector of places: out of an integer value, or a plain one.

        The last takes the operands and how many places there are.
        """
        ints = [n for n, x in enumerate(self.values) if x.dtype is torch.int64 and 0 < x.numel() <= 60]
        if ints and self.rng.random() < 0.7:
            place = self.rng.choice(ints)
            return name(place), (place,), lambda given, count: given[0].reshape(-1).remainder(count)
        numbers = [self.rng.randrange(1 << 16) for _ in range(self.rng.randint(0, 6))]
        return str(numbers), (), lambda given, count: torch.tensor(numbers, dtype=torch.int64) % count


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def step(text: str, run: Run, *operands: int) -> Step:
    """A step that does not ask where it runs."""
    return Step(text, lambda here, *tensors: run(*tensors), operands)


Maker = Callable[[Draw], Step]


def _unary(label: str, run: Run) -> Maker:
    def make(d: Draw) -> Step:
        x = d.number()
        return step(f"{label}({name(x)})", run, x)

    return make


def _binary(label: str, run: Run) -> Maker:
    def make(d: Draw) -> Step:
        x = d.number()
        y = d.other(x)
        return step(f"{label}({name(x)}, {name(y)})", run, x, y)

    return make


def _along(label: str, run: Callable[[Tensor, int], Any], least: int = 0) -> Maker:
    """An op with a dim whose size is at least `least`."""

    def make(d: Draw) -> Step:
        x = d.number(1)
        dim = d.dim(x, lambda size: size >= least)
        return step(f"{label}({name(x)}, {dim})", lambda t: run(t, dim), x)

    return make


def _reduction(label: str, run: Callable[[Tensor, list[int], bool], Tensor]) -> Maker:
    def make(d: Draw) -> Step:
        x = d.number(1)
        dims, keep = d.dims(x), d.rng.random() < 0.5
        return step(f"{label}({name(x)}, {dims}, keepdim={keep})", lambda t: run(t, dims, keep), x)

    return make


# Products


def _matmul(d: Draw) -> Step:
    x = d.number(1)
    y = d.other(x, lambda a, b: b.ndim > 0 and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0] and a.dtype is b.dtype)
    return step(f"{name(x)} @ {name(y)}", torch.matmul, x, y)


def _gram(d: Draw) -> Step:
    x = d.number(2)
    return step(f"{name(x)} @ {name(x)}.mT", lambda t: t @ t.mT, x)


def _linear(d: Draw) -> Step:
    x = d.number(1)
    key, features, out = d.rng.random(), d.values[x].shape[-1], d.rng.randint(1, 5)

    def run(t: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(key))
        weight = torch.randn(out, features, generator=generator, dtype=torch.float64).to(t.dtype)
        return nnf.linear(t, weight, weight.sum(1))

    return step(f"linear({name(x)}, plain [{out}, {features}])", run, x)


def _outer(d: Draw) -> Step:
    x = d.number(1, lambda t: t.ndim <= 2)
    y = d.other(x, lambda a, b: 1 <= b.ndim <= 2 and a.dtype is b.dtype)
    a, b = "ab"[: d.values[x].ndim], "cd"[: d.values[y].ndim]
    return step(
        f"einsum({a},{b}->{a}{b}, {name(x)}, {name(y)})", lambda s, t: torch.einsum(f"{a},{b}->{a}{b}", s, t), x, y
    )


# Views


def _flatten(d: Draw) -> Step:
    x = d.number(2)
    first = d.rng.randrange(d.values[x].ndim - 1)
    return step(f"flatten({name(x)}, {first}, {first + 1})", lambda t: t.flatten(first, first + 1), x)


def _split_dim(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x, lambda size: size > 3 and any(size % n == 0 for n in range(2, size)))
    size = d.values[x].shape[dim]
    factor = d.rng.choice([n for n in range(2, size) if size % n == 0])
    return step(f"unflatten({name(x)}, {dim}, [{factor}, -1])", lambda t: t.unflatten(dim, [factor, -1]), x)


def _reshape(d: Draw) -> Step:
    x = d.number(1)
    count = d.values[x].numel()
    shape = d.rng.choice([[-1], *[[n, count // n] for n in range(1, 10) if count and count % n == 0]])
    return step(f"reshape({name(x)}, {shape})", lambda t: t.reshape(shape), x)


def _permute(d: Draw) -> Step:
    x = d.number(2)
    order = list(range(d.values[x].ndim))
    d.rng.shuffle(order)
    return step(f"permute({name(x)}, {order})", lambda t: t.permute(order), x)


def _unsqueeze(d: Draw) -> Step:
    x = d.number(0, lambda t: t.ndim < 4)
    dim = d.rng.randint(0, d.values[x].ndim)
    return step(f"unsqueeze({name(x)}, {dim})", lambda t: t.unsqueeze(dim), x)


def _expand(d: Draw) -> Step:
    x = d.number(1, lambda t: 1 in t.shape)
    shape = [d.rng.randint(2, 4) if e == 1 else -1 for e in d.values[x].shape]
    return step(f"expand({name(x)}, {shape})", lambda t: t.expand(shape), x)


def _slice(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x)
    size = d.values[x].shape[dim]
    start, by = d.rng.randint(0, size), d.rng.choice([1, 1, 1, 2, 3])
    stop = d.rng.randint(start, size)
    where = (slice(None),) * (dim % d.values[x].ndim) + (slice(start, stop, by),)
    return step(f"{name(x)}, slice {start}:{stop}:{by} of {dim}", lambda t: t[where], x)


def _select(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x, bool)
    place = d.rng.randrange(-d.values[x].shape[dim], d.values[x].shape[dim])
    return step(f"select({name(x)}, {dim}, {place})", lambda t: t.select(dim, place), x)


def _split(d: Draw) -> Step:
    x = d.number(1)
    dim, size = d.dim(x, lambda dim_size: dim_size > 1), d.rng.randint(1, 4)
    return step(f"split({name(x)}, {size}, {dim})", lambda t: t.split(size, dim)[:3], x)


# Joins, padding, rows by index


def joins_along(dim: int) -> Callable[[Tensor, Tensor], bool]:
    """Whether two tensors can be joined along a dim."""

    def fits(a: Tensor, b: Tensor) -> bool:
        return a.ndim == b.ndim and all(
            m == n for k, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if k != dim % a.ndim
        )

    return fits


def _cat(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x)

    y = d.other(x, joins_along(dim))
    return step(f"cat({name(x)}, {name(y)}, {dim})", lambda s, t: torch.cat([s, t, s], dim), x, y)


def _stack(d: Draw) -> Step:
    x = d.number(0, lambda t: t.ndim < 4)
    y = d.other(x, lambda a, b: a.shape == b.shape)
    dim = d.rng.randint(0, d.values[x].ndim)
    return step(f"stack({name(x)}, {name(y)}, {dim})", lambda s, t: torch.stack([s, t], dim), x, y)


def _pad(d: Draw) -> Step:
    x = d.number(1)
    amounts = [d.rng.randint(-1, 2) for _ in range(2 * d.rng.randint(1, d.values[x].ndim))]
    return step(f"pad({name(x)}, {amounts})", lambda t: nnf.pad(t, amounts, value=0.5), x)


def _index_select(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x, bool)
    size = d.values[x].shape[dim]
    text, ints, index = d.index()
    return step(f"index_select({name(x)}, {dim}, {text})", lambda t, *i: t.index_select(dim, index(i, size)), x, *ints)


def _rows(d: Draw) -> Step:
    x = d.number(1, lambda t: t.shape[0] > 0)
    size = d.values[x].shape[0]
    text, ints, index = d.index()
    return step(f"{name(x)}[{text}]", lambda t, *i: t[index(i, size)], x, *ints)


def _embedding(d: Draw) -> Step:
    x = d.number(2, lambda t: t.ndim == 2 and t.shape[0] > 0)
    size = d.values[x].shape[0]
    text, ints, index = d.index()
    return step(f"embedding({text}, {name(x)})", lambda t, *i: nnf.embedding(index(i, size), t), x, *ints)


def _gather(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x, bool)
    size = d.values[x].shape[dim]
    # An index that depends on values would turn on the order of additions, so it is one of places.
    factor, shift = d.rng.randint(1, 7), d.rng.randint(0, 9)

    def run(t: Tensor) -> Tensor:
        index = torch.ones_like(t, dtype=torch.int64).cumsum(dim)
        return t.gather(dim, (index * factor + shift).remainder(size))

    return step(f"gather({name(x)}, {dim}, places * {factor} + {shift})", run, x)


def _index_add(d: Draw) -> Step:
    x = d.number(1, lambda t: t.shape[0] > 0)
    size = d.values[x].shape[0]
    y = d.other(x, lambda a, b: b.ndim > 0 and a.shape[1:] == b.shape[1:] and a.dtype is b.dtype)
    factor, count = d.rng.randint(1, 7), d.values[y].shape[0]

    def run(t: Tensor, rows: Tensor) -> Tensor:
        return t.index_add(0, (torch.arange(count) * factor).remainder(size), rows)

    return step(f"index_add({name(x)}, 0, places * {factor}, {name(y)})", run, x, y)


def _topk(d: Draw) -> Step:
    x = d.number(1)
    dim = d.dim(x, bool)
    count = d.rng.randint(1, d.values[x].shape[dim])
    return step(f"topk({name(x)}, {count}, {dim})", lambda t: tuple(t.topk(count, dim)), x)


def _where(d: Draw) -> Step:
    x = d.number()
    y = d.other(x)
    return step(f"where({name(x)} > {name(y)}, ...)", lambda s, t: torch.where(s > t, s, 2 * t), x, y)


def _where_bool(d: Draw) -> Step:
    x = d.number()
    m = d.pick(lambda t: t.dtype is torch.bool and _broadcasts(t.shape, d.values[x].shape))
    return step(f"masked_fill({name(x)}, {name(m)})", lambda t, mask: t.masked_fill(mask, -0.5), x, m)


# Writes


def _target(d: Draw, ndim: int = 0) -> int:
    """Something that may be written to: torch refuses leaves that want a gradient."""
    return d.number(ndim, lambda t: not (t.is_leaf and t.requires_grad))


def _write_number(d: Draw) -> Step:
    x = _target(d)
    label, change = d.rng.choice(
        [
            ("mul_(1.5)", lambda t: t.mul_(1.5)),
            ("add_(0.25)", lambda t: t.add_(0.25)),
            ("clamp_(-1, 1)", lambda t: t.clamp_(-1, 1)),
            ("fill_(0.75)", lambda t: t.fill_(0.75)),
        ]
    )
    return step(f"{name(x)}.{label}", change, x)


def _write(d: Draw) -> Step:
    x = _target(d)
    y = d.other(x, lambda a, b: _broadcasts(a.shape, b.shape) and torch.broadcast_shapes(a.shape, b.shape) == a.shape)
    label = d.rng.choice(["add_", "mul_", "sub_", "copy_"])
    return step(f"{name(x)}.{label}({name(y)})", lambda t, other: getattr(t, label)(other), x, y)


def _write_slice(d: Draw) -> Step:
    x = _target(d, 1)
    dim = d.dim(x) % d.values[x].ndim
    size = d.values[x].shape[dim]
    start = d.rng.randint(0, size)
    where = (slice(None),) * dim + (slice(start, d.rng.randint(start, size)),)

    def run(t: Tensor) -> Tensor:
        t[where] = 1.25
        return t

    return step(f"{name(x)}[{where}] = 1.25", run, x)


def _write_view(d: Draw) -> Step:
    x = _target(d, 2)

    def run(t: Tensor) -> Tensor:
        t.transpose(0, -1).mul_(-2)
        return t

    return step(f"{name(x)}.transpose(0, -1).mul_(-2)", run, x)


# Layouts as ops


def _redistribute(d: Draw) -> Step:
    x = d.pick()

    def run(here: Here, t: Tensor) -> Tensor:
        if here.mesh is None or not isinstance(t, ShardTensor):
            return t.clone()
        rng = here.rng
        placements = draw_placements(rng, here.mesh, t.ndim, None)
        shape = tuple(t.shape)
        return t.redistribute(placements=placements, sharding_shapes=draw_sizes(rng, here.mesh, shape, placements))

    return Step(f"redistribute({name(x)})", run, (x,))


def _redistribute_without_sizes(d: Draw) -> Step:
    x = d.pick()

    def run(here: Here, t: Tensor) -> Tensor:
        if here.mesh is None or not isinstance(t, ShardTensor):
            return t.clone()
        return t.redistribute(placements=draw_placements(here.rng, here.mesh, t.ndim, None))

    return Step(f"redistribute({name(x)}), without sizes", run, (x,))


def _full_tensor(d: Draw) -> Step:
    x = d.pick()
    return step(f"full_tensor({name(x)})", lambda t: t.full_tensor() if isinstance(t, ShardTensor) else t.clone(), x)


def _block_and_back(d: Draw) -> Step:
    """The shard, and a tensor that is put together from what became of it."""
    x, stated = d.number(), d.rng.random() < 0.4

    def run(here: Here, t: Tensor) -> Tensor:
        if here.mesh is None or not isinstance(t, ShardTensor):
            return t * 1.5
        t = t.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in t.placements])
        layout, shard = t.sharding, t.to_local() * 1.5
        if not stated:
            return ShardTensor.from_local(shard, here.mesh, t.placements, "infer")
        sizes = {c.mesh_dims[-1]: list(c.sizes) for c in layout.partitions if c is not None}
        return ShardTensor.from_local(shard, here.mesh, t.placements, sizes)

    return Step(f"from_local({name(x)}.to_local() * 1.5, {'stated' if stated else 'infer'})", run, (x,))


def _terms(d: Draw) -> Step:
    """Shards of a replicated tensor as terms of a pending sum."""
    x = d.number()

    def run(here: Here, t: Tensor) -> Tensor:
        if here.mesh is None or not isinstance(t, ShardTensor):
            return t * 1.0
        terms = [Partial()] * here.mesh.ndim
        whole = t.full_tensor(grad_placements=terms)  # what follows differs in meaning by rank: gradients add up
        return ShardTensor.from_local(whole / here.mesh.size(), here.mesh, terms, "infer")

    return Step(f"terms of {name(x)}", run, (x,))


# Random


def _random(label: str, run: Run) -> Maker:
    def make(d: Draw) -> Step:
        x, seed = d.number(), d.rng.randrange(1000)

        def seeded(t: Tensor) -> Tensor:
            torch.manual_seed(seed)
            return run(t)

        return step(f"{label}({name(x)}) after seed {seed}", seeded, x)

    return make


OPS: dict[str, Maker] = {
    **{
        label: _unary(label, run)
        for label, run in {
            "neg": torch.neg, "sin": torch.sin, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu,
            "gelu": nnf.gelu, "exp": lambda t: t.clamp(max=3).exp(), "square": torch.square, "abs": torch.abs,
            "log": lambda t: t.abs().add(0.5).log(), "clamp": lambda t: t.clamp(-0.5, 0.8),
            "affine": lambda t: 2 - t / 3,
            "float32": lambda t: t.float(), "clone": torch.clone, "contiguous": lambda t: t.contiguous(),
            "detach": lambda t: t.detach() * t, "sum of all": torch.sum, "mean of all": torch.mean,
            "max of all": torch.max, "norm of all": torch.linalg.vector_norm, "mT": lambda t: t.mT,
            "squeeze": lambda t: t.squeeze(), "view as vector": lambda t: t.view(-1), "tril": torch.tril,
            "to int": lambda t: (t * 3).to(torch.int64),
        }.items()
    },
    **{
        label: _binary(label, run)
        for label, run in {
            "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": lambda s, t: s / (t.abs() + 0.5),
            "maximum": torch.maximum, "gt": torch.gt, "atan2": torch.atan2,
            "addcmul": lambda s, t: torch.addcmul(s, s, t, value=0.5), "lerp": lambda s, t: torch.lerp(s, t.to(s), 0.3),
        }.items()
    },
    **{
        label: _reduction(label, run)
        for label, run in {
            "sum": lambda t, dims, keep: t.sum(dims, keep), "mean": lambda t, dims, keep: t.mean(dims, keep),
            "amax": lambda t, dims, keep: t.amax(dims, keep), "amin": lambda t, dims, keep: t.amin(dims, keep),
            "var": lambda t, dims, keep: t.var(dims, keepdim=keep, correction=0),
            "norm": lambda t, dims, keep: torch.linalg.vector_norm(t, 2, dims, keep),
            "logsumexp": lambda t, dims, keep: t.logsumexp(dims, keep),
        }.items()
    },
    **{
        label: _along(label, run, least)
        for label, run, least in [
            ("softmax", torch.softmax, 0), ("log_softmax", torch.log_softmax, 0), ("cumsum", torch.cumsum, 0),
            ("cumprod", torch.cumprod, 0), ("cummax", lambda t, dim: tuple(t.cummax(dim)), 1),
            ("flip", lambda t, dim: t.flip(dim), 0), ("roll", lambda t, dim: t.roll(2, dim), 0),
            ("argmax", torch.argmax, 1), ("max", lambda t, dim: tuple(t.max(dim)), 1), ("prod", torch.prod, 0),
            ("sort", lambda t, dim: tuple(t.sort(dim, stable=True)), 0), ("diff", lambda t, dim: t.diff(dim=dim), 1),
        ]
    },
    "layer_norm": _unary("layer_norm", lambda t: nnf.layer_norm(t, t.shape[-1:])),
    "matmul": _matmul, "gram": _gram, "linear": _linear, "outer": _outer,
    "flatten": _flatten, "unflatten": _split_dim, "reshape": _reshape, "permute": _permute, "unsqueeze": _unsqueeze,
    "expand": _expand, "slice": _slice, "select": _select, "split": _split,
    "cat": _cat, "stack": _stack, "pad": _pad, "index_select": _index_select, "rows": _rows, "embedding": _embedding,
    "gather": _gather, "index_add": _index_add, "topk": _topk, "where": _where, "masked_fill": _where_bool,
    "write number": _write_number, "write": _write, "write slice": _write_slice, "write view": _write_view,
    "redistribute": _redistribute, "redistribute again": _redistribute, "without sizes": _redistribute_without_sizes,
    "full_tensor": _full_tensor, "shard and back": _block_and_back, "terms": _terms,
    "rand_like": _random("rand_like", torch.rand_like), "randn_like": _random("randn_like", torch.randn_like),
    "dropout": _random("dropout", lambda t: nnf.dropout(t, 0.3)),
}  # fmt: skip
"""How to draw each op. An op that needs operands of its own kind is tried, and another one taken if there are none."""


# Mistakes, which every rank makes alike


def _mistake(label: str, run: Callable[..., Any], ndim: int = 0) -> Maker:
    def make(d: Draw) -> Step:
        x = d.number(ndim)
        return Step(f"mistake: {label} of {name(x)}", run, (x,))

    return make


def _as_sharded(here: Here, t: Tensor) -> ShardTensor:
    """A plain value as a replicated one: mistakes are about layouts."""
    if isinstance(t, ShardTensor):
        return t
    assert here.mesh is not None
    return ShardTensor.from_local(t, here.mesh, [Replicate()] * here.mesh.ndim, {})


def _redistributed(
    placements: Callable[[Here, Any], Any], sizes: Callable[[Here, Any], Any] = lambda h, t: None
) -> Run:
    return lambda here, t: _as_sharded(here, t).redistribute(
        placements=placements(here, t), sharding_shapes=sizes(here, t)
    )


def _rows_of(here: Here, t: Any) -> list[Placement]:
    assert here.mesh is not None
    return [Shard(0)] + [Replicate()] * (here.mesh.ndim - 1)


def _unsharded_sizes(here: Here, t: Any) -> Any:
    assert here.mesh is not None
    return {here.mesh.ndim - 1: [1] * here.mesh.size()}


MISTAKES: dict[str, Maker] = {
    "shapes": _mistake("add of another shape", lambda h, t: _as_sharded(h, t) + torch.ones(*t.shape, 13), 1),
    "product": _mistake("product of another shape", lambda h, t: _as_sharded(h, t) @ torch.ones(17, 2).to(t), 1),
    "view": _mistake("view of another size", lambda h, t: _as_sharded(h, t).view(t.numel() + 1)),
    "dim": _mistake("sum over no dim", lambda h, t: _as_sharded(h, t).sum(7)),
    "index": _mistake("select of no row", lambda h, t: _as_sharded(h, t)[t.shape[0] + 3], 1),
    "cat": _mistake(
        "cat of other shapes", lambda h, t: torch.cat([_as_sharded(h, t), torch.ones(2, 2, 2, 2, 2).to(t)])
    ),
    "in place": _mistake(
        "write of a larger one", lambda h, t: _as_sharded(h, t).detach().add_(torch.ones(3, *t.shape))
    ),
    "dtype": _mistake(
        "product of other dtypes", lambda h, t: _as_sharded(h, t).flatten() @ torch.ones(t.numel()).to(torch.int32)
    ),
    "too few sizes": _mistake("too few sizes", _redistributed(_rows_of, lambda h, t: {0: [t.shape[0]]}), 1),
    "sum of sizes": _mistake(
        "sizes of another sum",
        _redistributed(_rows_of, lambda h, t: {0: [t.shape[0] + 1] + [0] * (h.mesh.shape[0] - 1)}),
        1,
    ),
    "negative size": _mistake(
        "a negative size",
        _redistributed(_rows_of, lambda h, t: {0: [t.shape[0] + 1, -1] + [0] * (h.mesh.shape[0] - 2)}),
        1,
    ),
    "sizes of what": _mistake(
        "sizes without a partition", _redistributed(lambda h, t: [Replicate()] * h.mesh.ndim, _unsharded_sizes)
    ),
    "too many placements": _mistake(
        "too many placements", _redistributed(lambda h, t: [Replicate()] * (h.mesh.ndim + 1))
    ),
    "no such dim": _mistake("a partition of no dim", _redistributed(lambda h, t: [Shard(t.ndim)] * h.mesh.ndim)),
    "to partial": _mistake("a sum as target", _redistributed(lambda h, t: [Partial("product")] * h.mesh.ndim)),
    "shard of a term": _mistake(
        "the shard of a term",
        lambda h, t: ShardTensor.from_local(t.detach().sum() * 0, h.mesh, [Partial()] * h.mesh.ndim, {}).to_local(),
    ),
    # Every rank states one row more than it has, so that no rank finds its local shard right.
    "other sizes": _mistake(
        "shards that are not as stated",
        lambda h, t: ShardTensor.from_local(torch.ones(2, 2), h.mesh, _rows_of(h, t), {0: [3] * h.mesh.shape[0]}),
    ),
    "other shapes": _mistake(
        "shards that do not fit together",
        lambda h, t: ShardTensor.from_local(torch.ones(2, 2 + h.mesh.get_rank()), h.mesh, _rows_of(h, t), "infer"),
    ),
    "memory": _mistake("an op on memory", lambda h, t: _as_sharded(h, t).detach().set_(torch.ones(3).to(t))),
    "strided": _mistake("as_strided", lambda h, t: _as_sharded(h, t).as_strided((2, 2), (1, 1), 1000)),
    "own op": _mistake("a decomposition of no square", lambda h, t: torch.linalg.cholesky(_as_sharded(h, t).flatten())),
}
"""Steps that raise, on all ranks alike, with the error that the library, or torch, has for them."""


def program(seed: int) -> Program:
    """The program of a seed."""
    for attempt in range(50):
        found = _drawn(seed, random.Random(seed_of(seed, attempt)))
        if found is not None:
            return found
    raise AssertionError(f"no program for seed {seed}")


def _drawn(seed: int, rng: random.Random) -> Program | None:
    sources = tuple(_sources(rng, seed))
    draw = Draw(rng)
    leaves = [s.plain() for s in sources]
    draw.values.extend(leaves)
    count = rng.randint(3, 8)
    mistake_at = rng.randrange(1, count) if rng.random() < SHARE_OF_MISTAKES else None
    steps: list[Step] = []
    torch_state = torch.get_rng_state()
    try:
        while len(steps) < count:
            if len(steps) == mistake_at:
                try:
                    steps.append(rng.choice(list(MISTAKES.values()))(draw))
                except NoFit:
                    continue
                return Program(seed, sources, tuple(steps), None)
            new = _step(draw, len(draw.values))
            if new is None:
                return None
            steps.append(new)
        goals = [n for n, x in enumerate(draw.values) if x.requires_grad and n >= len(sources)]
        found = Program(seed, sources, tuple(steps), goals[-1] if goals else None)
        if found.goal is not None:
            try:
                found.gradients(leaves, draw.values[found.goal])
            except RuntimeError:
                return None  # a value that the backward pass needs has been written to
        return found
    finally:
        torch.set_rng_state(torch_state)


def _step(draw: Draw, place: int) -> Step | None:
    """A step that works on plain tensors; its results are added to the values."""
    for _ in range(60):
        label = draw.rng.choice(list(OPS))
        try:
            new = OPS[label](draw)
            results = new(Here(None, 0), draw.values)
        except (NoFit, RuntimeError, IndexError, ValueError, TypeError):
            continue  # plain PyTorch does not know it for these operands
        if all(x.numel() <= MOST_ELEMENTS and x.ndim <= 4 for x in results) and all(map(_tame, results)):
            draw.values.extend(results)
            return Step(
                f"{', '.join(name(place + n) for n in range(len(results)))} = {new.text}", new.run, new.operands
            )
    return None


def _tame(x: Tensor) -> bool:
    """Whether numbers still say something: bits of a NaN do not."""
    return not x.is_floating_point() or bool((x.detach().abs() < 1e6).all())


def _sources(rng: random.Random, seed: int) -> Iterator[Source]:
    def size() -> int:
        return rng.choice([0, 1, *range(2, 10), *range(2, 10)])

    shape = tuple(size() for _ in range(rng.randint(1, 3)))
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    yield Source(shape, dtype, rng.random() < 0.75, True, seed_of(seed, rng.random()))
    for _ in range(rng.randint(0, 2)):
        number = rng.random()
        if number < 0.25:
            high = tuple(size() for _ in range(rng.randint(1, 2)))
            yield Source(high, torch.int64, False, True, seed_of(seed, rng.random()))
            continue
        # Shapes that go together: the same, broadcast, a factor of a product, or anything.
        like = rng.choice(
            [
                shape,
                shape[rng.randrange(len(shape)) :],
                tuple(1 if rng.random() < 0.4 else e for e in shape),
                (shape[-1], rng.randint(1, 6)),
                tuple(size() for _ in range(rng.randint(1, 3))),
            ]
        )
        kind = dtype if rng.random() < 0.8 else rng.choice([torch.float64, torch.float32])
        yield Source(like, kind, rng.random() < 0.7, rng.random() < 0.8, seed_of(seed, rng.random()))
