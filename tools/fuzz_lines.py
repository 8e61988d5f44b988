"""Lines of random programs: an op as Python text, drawn so that plain PyTorch knows it for the values that there are.

A line names its operands and results (``v3, v4 = v1.sort(0)``), or is a write without results (``v1[1:].mul_(2)``).
Where an op jumps (a comparison, a maximum, a rounding) the line ends in a comment ``# if CONDITION``: only where it
holds for the plain values does a rounding error stay one. Comparisons are calls: of ``plain > sharded`` Python asks the
subclass first, with the operands the other way round, which shows in the strides of the result.
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shardcompile import ShardTensor
from tests.support.programs import joins_along, parts_in_style

DEVICE: Literal["cpu", "cuda"] = "cpu" if os.environ.get("FUZZ_DEVICE", "cpu") == "cpu" else "cuda"
"""Where all tensors are: "cpu" or "cuda"."""

MOST_ELEMENTS = 400
MOST_DIMS = 4

_RESULTS = re.compile(r"^(v\d+(?:, v\d+)*) = ")
_NAMES = re.compile(r"\b[av]\d+\b")
_THERE = "" if DEVICE == "cpu" else f", device={DEVICE!r}"


# What lines may call


def apart(x: Tensor, dim: int | None = None) -> bool:
    """Whether no two values along a dim, or anywhere, are so near that rounding could exchange them."""
    if x.numel() == 0:
        return True
    x = x.detach().double()
    ordered = x.reshape(-1).sort()[0] if dim is None else x.sort(dim)[0]
    return bool((ordered.diff(dim=-1 if dim is None else dim) > _near(x)).all())


def away(x: Tensor, *points: float) -> bool:
    """Whether no value is near one of the points."""
    return all(bool(((x.detach() - p).abs() > _near(x)).all()) for p in points)


def _near(x: Tensor) -> float:
    return {torch.bfloat16: 0.25, torch.float32: 1e-2}.get(x.dtype, 1e-5)


def to(x: Tensor, placements: str, sizes: Any = None) -> Tensor:
    """A copy in another layout; of a plain tensor a copy."""
    if not isinstance(x, ShardTensor):
        return x.clone()
    return x.redistribute(placements=placements_of(placements), sharding_shapes=sizes).clone()


def whole(x: Tensor) -> Tensor:
    """The full value as a plain tensor; an expanded one row by row, since shards that are gathered are not expanded.

    One with a size of 1 is stored row by row as well. What is gathered has other strides along it, which mean nothing,
    but kernels read them to order the dims of their results.
    """
    rows = any(isinstance(n, int) and n == 1 for n in x.shape)
    if isinstance(x, ShardTensor):
        x = x.full_tensor()
    if 0 in x.stride():
        x = x.contiguous()
    return x.clone(memory_format=torch.contiguous_format if rows else torch.preserve_format)


def rounds_alike(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding to a dtype gives the same for all values that are about those of a tensor, and no NaN."""
    x = x.detach().double()
    near = [(x + f * _near(x) * x.abs()).to(dtype).double() for f in (-1, 0, 1)]
    return all(torch.equal(n, near[1]) for n in near)


def weight(*shape: int) -> Tensor:
    """A plain tensor of fixed values."""
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float64, device=DEVICE) * 0.7 + 0.3).sin().reshape(shape)


def placements_of(text: str) -> list[Any]:
    """Placements by their short names, such as ``"S(0) P(sum) R"``."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    def one(word: str) -> Any:
        if word == "R":
            return Replicate()
        return Shard(int(word[2:-1])) if word[0] == "S" else Partial(word[2:-1])

    return [one(word) for word in text.split()]


CALLS = {"torch": torch, "F": nnf, "to": to, "whole": whole, "weight": weight, "apart": apart, "away": away,
         "rounds_alike": rounds_alike}  # fmt: skip


# A line


def results_of(line: str) -> list[str]:
    """Names of a line's results; none of a write."""
    found = _RESULTS.match(line)
    return found[1].split(", ") if found else []


def names_in(line: str) -> set[str]:
    """All names of a line."""
    return set(_NAMES.findall(line))


def holds(line: str, values: Mapping[str, Any]) -> bool:
    """Whether the condition of a line holds for plain values."""
    _, _, condition = line.partition("  # if ")
    return not condition or bool(eval(condition, {**CALLS, **values}))


@functools.lru_cache(maxsize=100_000)
def _code(line: str) -> Any:
    return compile(line, "<line>", "exec")


def run_line(line: str, values: dict[str, Any]) -> None:
    """Run a line on values by name, and add its results."""
    scope = {**CALLS, **values}
    exec(_code(line), scope)
    values.update({name: scope[name] for name in results_of(line)})


# Drawing


class NoFit(Exception):
    """There is no operand for this op."""


class Draw:
    """A program in the making.

    Attributes:
        rng: of the seed.
        values: plain and full, by name.
        mesh: sizes of the mesh.
        stated: whether redistributions may state sizes, which ties the program to its sizes.
    """

    def __init__(self, rng: random.Random, values: dict[str, Tensor], mesh: tuple[int, ...], stated: bool) -> None:
        self.rng, self.values, self.mesh, self.stated = rng, values, mesh, stated

    def pick(self, fits: Callable[[Tensor], bool] = lambda x: True) -> str:
        """Name of a value that fits, the last ones more often."""
        names = [n for n, x in self.values.items() if fits(x)]
        if not names:
            raise NoFit
        return self.rng.choice(names[-3:]) if self.rng.random() < 0.5 else self.rng.choice(names)

    def x(self, ndim: int = 0, fits: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A floating-point value of at least some dims."""
        return self.pick(lambda x: x.is_floating_point() and x.ndim >= ndim and fits(x))

    def like(self, x: str, fits: Callable[[Tensor, Tensor], bool] | None = None) -> str:
        """Another floating-point value, by default one that is broadcast with the first."""
        fits, value = fits or (lambda a, b: _broadcasts(a, b)), self.values[x]
        names = [n for n, y in self.values.items() if n != x and y.is_floating_point() and fits(value, y)]
        if names:
            return self.rng.choice(names)
        if fits(value, value):
            return x
        raise NoFit

    def dim(self, x: str, least: int = 0) -> int:
        """A dim whose size is at least `least`, counted from the first or from the last."""
        value = self.values[x]
        dims = [d for d in range(value.ndim) if value.shape[d] >= least]
        if not dims:
            raise NoFit
        dim = self.rng.choice(dims)
        return dim - value.ndim if self.rng.random() < 0.3 else dim

    def number(self, low: int, high: int) -> int:
        """A number, both ends included."""
        return self.rng.randint(low, max(low, high))

    def slice(self, size: int) -> str:
        """A slice, often one that counts from the end or reaches beyond it."""
        rng = self.rng
        ends = ["", "", *map(str, (rng.randint(0, size), -rng.randint(1, size + 2), size + 2))]
        step = rng.choice(["", "", "", ":2", ":3"])
        return f"{rng.choice(ends)}:{rng.choice(ends)}{step}"

    def index(self, size: int) -> str:
        """Places along a dim as a plain tensor, or out of a value."""
        if size == 0:
            raise NoFit
        ints = [n for n, x in self.values.items() if x.dtype is torch.int64 and x.ndim >= 1]
        if ints and self.rng.random() < 0.5:
            return f"{self.rng.choice(ints)}.reshape(-1).remainder({size})"
        return f"torch.tensor({[self.rng.randrange(size) for _ in range(self.rng.randint(0, 5))]}, dtype=torch.int64{_THERE})"


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


Maker = Callable[[Draw], str]

NUMBERS = sorted(
    str(d)
    for d in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    if not re.search("bits|q[ui]*nt|int[1-7]$|x2$|complex", str(d)) and not (DEVICE != "cpu" and "fnuz" in str(d))
)
"""The dtypes of real numbers: torch casts to them and back."""


def _cast(d: Draw) -> str:
    """A value through another dtype, perhaps moved as one."""
    x, dtype = d.x(), d.rng.choice(NUMBERS)
    whole = "" if getattr(torch, dtype.removeprefix("torch.")).is_floating_point else ".abs().clamp(max=100)"
    moved = d.rng.choice(["", "", ".clone()", "[1:]"]) if d.values[x].ndim else ""
    return f"{x}{whole}.to({dtype}){moved}.to(torch.float64)  # if rounds_alike({x}{whole}, {dtype})"


def _unary(text: str) -> Maker:
    """An op on one value, ``X`` in the text."""
    return lambda d: text.replace("X", d.x())


def _binary(text: str) -> Maker:
    def make(d: Draw) -> str:
        x = d.x()
        return text.replace("X", x).replace("Y", d.like(x))

    return make


def _along(text: str, least: int = 0, ndim: int = 1) -> Maker:
    """An op with a dim, ``D``, and perhaps a number from 1 to its size, ``N``."""

    def make(d: Draw) -> str:
        x = d.x(ndim)
        dim = d.dim(x, least)
        number = d.number(1, d.values[x].shape[dim])
        return text.replace("X", x).replace("D", str(dim)).replace("N", str(number))

    return make


def _over(text: str) -> Maker:
    """A reduction over some dims, ``D``, kept or not, ``K``."""

    def make(d: Draw) -> str:
        x = d.x(1)
        ndim = d.values[x].ndim
        dims = [n - ndim if d.rng.random() < 0.3 else n for n in d.rng.sample(range(ndim), d.number(1, ndim))]
        return text.replace("X", x).replace("D", str(dims)).replace("K", str(d.rng.random() < 0.5))

    return make


# Views


def _sliced(d: Draw) -> str:
    x = d.x(1)
    parts: list[str] = []
    for size in d.values[x].shape[: d.number(1, d.values[x].ndim)]:
        kind = d.rng.random()
        if kind < 0.15 and size:
            parts.append(str(d.rng.randrange(-size, size)))
        else:
            parts.append(":" if kind < 0.4 else d.slice(size))
        if d.rng.random() < 0.08:
            parts.append("None")
    if d.rng.random() < 0.1:
        parts.insert(0, "...")
        parts = parts[:2]
    return f"{x}[{', '.join(parts)}]"


def _sliced_by_formula(d: Draw) -> str:
    """A slice whose bound is a formula of the size, of which a trace may not know the sign."""
    x = d.x(1)
    dim = d.number(0, d.values[x].ndim - 1)
    n = f"{x}.shape[{dim}]"
    bound = d.rng.choice([f"{n} - {n} // 2", f"-({n} // 3)", f"{n} // 2 - {n}", f"{n} // 3"])
    return f"{x}[{':, ' * dim}{d.rng.choice([f'{bound}:', f':{bound}', f'{bound}::2'])}]"


def _permuted(d: Draw) -> str:
    x = d.x(2)
    ndim = d.values[x].ndim
    return d.rng.choice([f"{x}.permute({d.rng.sample(range(ndim), ndim)})", f"{x}.mT", f"{x}.movedim(0, -1)",
                         f"{x}.transpose({d.dim(x)}, {d.dim(x)})"])  # fmt: skip


def _factors(d: Draw, count: int) -> list[int]:
    for first in d.rng.sample(range(1, 13), 12):
        if count and count % first == 0:
            rest = count // first
            second = next((n for n in d.rng.sample(range(1, 7), 6) if rest % n == 0), 1)
            return d.rng.choice([[first, -1], [first, second, -1], [-1, first], [rest, first]])
    return [-1] if count else [0, d.number(0, 3)]


def _reshaped(d: Draw) -> str:
    x = d.x()
    shape = d.rng.choice([[-1], _factors(d, d.values[x].numel())])
    return f"{x}.{d.rng.choice(['reshape', 'view'])}({shape})"


def _dims_joined(d: Draw) -> str:
    x = d.x(2)
    first = d.rng.randrange(d.values[x].ndim - 1)
    return f"{x}.flatten({first}, {d.number(first + 1, d.values[x].ndim - 1)})"


def _dim_split(d: Draw) -> str:
    x = d.x(1, lambda t: t.ndim < MOST_DIMS)
    dim = d.dim(x, 1)
    size = d.values[x].shape[dim]
    factor = d.rng.choice([n for n in range(1, size + 1) if size % n == 0])
    return f"{x}.unflatten({dim}, {[factor, size // factor]})"


def _small_view(d: Draw) -> str:
    x = d.x(1)
    dim, ndim = d.dim(x), d.values[x].ndim
    dim_size = d.values[x].shape[dim]
    choices = [f"{x}.squeeze()", f"{x}.squeeze({dim})", f"{x}.detach()", f"{x}.chunk({d.number(1, 4)}, {dim})[-1]"]
    if ndim < MOST_DIMS:
        choices.append(f"{x}.unsqueeze({d.number(-1, ndim)})")
    if ndim > 1:
        choices.append(
            f"{x}.diagonal({d.number(-2, 2)}, {dim}, {d.rng.choice([e for e in range(ndim) if e != dim % ndim])})"
        )
    if dim_size:
        size = d.number(1, dim_size)
        choices += [f"{x}.unfold({dim}, {size}, {d.number(1, 3)})", f"{x}.select({dim}, {d.rng.randrange(-size, size)})",
                    f"{x}.narrow({dim}, {size - size}, {size})", f"{x}.unbind({dim})[-1]",
                    f"{x}.tensor_split({d.number(1, 3)}, {dim})[0]"]  # fmt: skip
    return d.rng.choice(choices)


def _as_pairs(d: Draw) -> str:
    """A view of with_one_segment numbers as complex ones, and back."""
    x = d.x(1, lambda t: t.dtype is torch.float64 and t.shape[-1] % 2 == 0)
    pairs = x if d.values[x].shape[-1] == 2 and d.rng.random() < 0.5 else f"{x}.view(-1, 2)"
    return d.rng.choice([f"{x}.view(torch.complex128).view(torch.float64)",
                         f"torch.view_as_real(torch.view_as_complex({pairs}))"])  # fmt: skip


def _parted(d: Draw) -> str:
    x = d.x(1)
    return f"{x}.split({d.number(1, 4)}, {d.dim(x, 1)})[:2]"


def _expanded(d: Draw) -> str:
    x = d.x(1, lambda t: 1 in t.shape)
    shape = [d.number(1, 4) if e == 1 else d.rng.choice([-1, e]) for e in d.values[x].shape]
    shape = [d.number(1, 3), *shape] if len(shape) < 3 and d.rng.random() < 0.3 else shape
    return f"{x}.expand({shape})"


VIEWS: list[Maker] = [
    _sliced,
    _sliced,
    _sliced_by_formula,
    _permuted,
    _reshaped,
    _dims_joined,
    _dim_split,
    _small_view,
    _small_view,
    _as_pairs,
]


# Joins, rows by index


def _cat(d: Draw) -> str:
    x = d.x(1)
    dim = d.dim(x)

    return f"torch.cat([{x}, {d.like(x, joins_along(dim))}{d.rng.choice(['', ', ' + x])}], {dim})"


def _stack(d: Draw) -> str:
    x = d.x(0, lambda t: t.ndim < MOST_DIMS)
    return f"torch.stack([{x}, {d.like(x, lambda a, b: a.shape == b.shape)}], {d.number(0, d.values[x].ndim)})"


def _pad(d: Draw) -> str:
    x = d.x(1)
    amounts = [d.number(-1, 2) for _ in range(2 * d.number(1, d.values[x].ndim))]
    return f"F.pad({x}, {amounts}, value=0.5)"


def _rows(d: Draw) -> str:
    x = d.x(1)
    dim = d.dim(x, 1)
    size, ndim = d.values[x].shape[dim], d.values[x].ndim
    index = d.index(size)
    colons = ":, " * (dim % ndim)
    return d.rng.choice([f"{x}.index_select({dim}, {index})", f"{x}[{colons}{index}]", f"{x}[{colons}{index}]",
                         f"{x}.index_fill({dim}, {index}, 0.5)"])  # fmt: skip


def _embedding(d: Draw) -> str:
    # Torch's kernel for GPUs reads foreign memory if the table has no columns.
    x = d.x(2, lambda t: t.ndim == 2 and t.shape[0] > 0 and (t.shape[1] > 0 or DEVICE == "cpu"))
    return f"F.embedding({d.index(d.values[x].shape[0])}, {x})"


def _gather(d: Draw) -> str:
    x = d.x(1)
    dim = d.dim(x, 1)
    index = f"torch.ones_like({x}, dtype=torch.int64).cumsum({dim}).mul({d.number(1, 5)}).remainder({d.values[x].shape[dim]})"
    return d.rng.choice([f"{x}.gather({dim}, {index})", f"torch.take_along_dim({x}, {index}, {dim})",
                         f"{x}.scatter_add({dim}, {index}, {x}.cos())"])  # fmt: skip


def _index_add(d: Draw) -> str:
    x = d.x(1, lambda t: t.shape[0] > 0)
    y = d.like(x, lambda a, b: b.ndim > 0 and a.shape[1:] == b.shape[1:] and a.dtype is b.dtype)
    count, size = d.values[y].shape[0], d.values[x].shape[0]
    places = f"torch.arange({count}{_THERE}).mul({d.number(1, 5)}).remainder({size})"
    return f"{x}.index_add(0, {places}, {y})"


def _where(d: Draw) -> str:
    x = d.x()
    y = d.like(x)
    return f"torch.where(torch.gt({x}, {y}), {x}, 2 * {y})  # if away({x} - {y}, 0)"


def _mask(d: Draw) -> str:
    x = d.x()
    m = d.pick(lambda t: t.dtype is torch.bool and _broadcasts(t, d.values[x]))
    return f"{x}.masked_fill({m}, -0.5)"


# Masks


def _mask_of(d: Draw, x: str) -> tuple[str, str, str]:
    """An index with a mask of some with_one_segment dims of a value, the mask alone, and the condition that keeps it exact."""
    value = d.values[x]
    first = d.rng.randrange(value.ndim)
    shape = tuple(value.shape[first : d.number(first + 1, value.ndim)])
    others = [n for n in range(value.ndim) if not first <= n < first + len(shape)]
    known = [n for n, y in d.values.items() if y.dtype is torch.bool and tuple(y.shape) == shape]
    condition = ""
    if known and d.rng.random() < 0.5:
        mask = d.rng.choice(known)
    elif d.rng.random() < 0.4:
        mask = f"(weight{shape if len(shape) > 1 else f'({shape[0]})'} > {d.rng.choice([-2, 0, 0.2, 2])})"
    else:
        of = f"{x}.detach().amax({others})" if others else f"{x}.detach()"
        mask, condition = f"({of} > 0.1)", f"  # if away({of}, 0.1)"
    front = [str(d.rng.randrange(-n, n)) if n and d.rng.random() < 0.2 else ":" for n in value.shape[:first]]
    if d.rng.random() < 0.1:
        front.insert(0, "None")
    behind = value.shape[first + len(shape) :]
    back = [d.rng.choice([":", "0", "1:"])] if behind and behind[0] and d.rng.random() < 0.3 else []
    if front and len(behind) == len(back) and d.rng.random() < 0.2 and "None" not in front:
        front = ["..."] if all(item == ":" for item in front) else front
    return ", ".join([*front, mask, *back]), mask, condition


def _kept(d: Draw) -> str:
    x = d.x(1)
    index, mask, condition = _mask_of(d, x)
    choices = [f"{x}[{index}]", f"{x}[{index}].mul(2)"]
    shape = d.values[x].shape
    if tuple(eval(mask, {**CALLS, **d.values}).shape) == tuple(shape[-1:]):
        choices += [f"{x}.masked_select({mask})"]
    if "[" not in mask:
        choices += [f"{mask}.nonzero()", f"torch.where({mask})[0] + 1", f"torch.argwhere({mask})"]
    return d.rng.choice(choices) + condition


def _scattered(d: Draw) -> str:
    x = d.x(1)
    y = d.like(x, lambda a, b: b.numel() > 0 and a.dtype is b.dtype)
    _, mask, condition = _mask_of(d, x)
    value, kept = d.values[x], eval(mask, {**CALLS, **d.values})
    places = [n for n in range(value.ndim) if tuple(value.shape[n : n + kept.ndim]) == tuple(kept.shape)]
    if not places:
        raise NoFit
    wide = f"{mask}[(..., *[None] * {value.ndim - kept.ndim - places[0]})]"
    return f"{x}.masked_scatter({wide}, {y}.repeat({value.numel() // max(d.values[y].numel(), 1) + 1}, *[1] * {d.values[y].ndim - 1}) if {y}.ndim else {x}){condition}"


def _write_kept(d: Draw) -> str:
    x = _target(d, 1)
    index, _, condition = _mask_of(d, x)
    return d.rng.choice([f"{x}[{index}] = 0.75", f"{x}[{index}] = {x}.cos()[{index}]", f"{x}[{index}] += 1.5",
                         f"{x}[{index}] += weight(1).to({x}.dtype)"]) + condition  # fmt: skip


# Products


def _matmul(d: Draw) -> str:
    x = d.x(1)
    y = d.like(x, lambda a, b: b.ndim > 0 and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0] and a.dtype is b.dtype)
    return f"{x} @ {y}"


def _linear(d: Draw) -> str:
    x = d.x(1)
    features, out = d.values[x].shape[-1], d.number(1, 4)
    bias = d.rng.choice(["", f", weight({out}).to({x}.dtype)"])
    return f"F.linear({x}, weight({out}, {features}).to({x}.dtype){bias})"


def _attention(d: Draw) -> str:
    x = d.x(3, lambda t: t.dtype is torch.float64 and 0 not in t.shape)
    return f"F.scaled_dot_product_attention({x}, {x}.sin(), {x}, is_causal={d.rng.random() < 0.4})"


def _outer(d: Draw) -> str:
    x = d.x(1, lambda t: t.ndim <= 2)
    y = d.like(x, lambda a, b: 1 <= b.ndim <= 2 and a.dtype is b.dtype)
    a, b = "ab"[: d.values[x].ndim], "cd"[: d.values[y].ndim]
    return f'torch.einsum("{a},{b}->{d.rng.choice([a + b, b + a])}", {x}, {y})'


def _conv(d: Draw) -> str:
    x = d.x(3, lambda t: t.ndim == 3 and t.shape[1] > 0 and t.shape[2] > 2 and t.dtype is torch.float64)
    channels = d.values[x].shape[1]
    return f"F.conv1d({x}, weight(2, {channels}, 3), padding={d.number(0, 1)})"


def _columns_of_windows(d: Draw) -> str:
    x = d.x(3, lambda t: t.ndim == 3 and 0 not in t.shape and t.dtype is torch.float64)
    windows = f"F.unfold({x}, ({d.number(1, 3)}, {d.number(1, 2)}), padding={d.number(0, 1)}, stride={d.number(1, 2)})"
    fold = f"F.fold({x}.flatten(0, 1).repeat_interleave(6, 0)[:, :1].expand(-1, 2), (3, 3), (3, 2))"
    return d.rng.choice([windows, windows, windows, fold])


def _fourier(d: Draw) -> str:
    """Real transforms of one or several dims, longer or shorter than the value; the result has real numbers."""
    x = d.x(1, lambda t: t.dtype is torch.float64 and 0 not in t.shape)
    shape = d.values[x].shape
    dim, norm = d.dim(x), f"norm={d.rng.choice([None, 'ortho', 'forward'])!r}"
    n = d.rng.choice([shape[dim], shape[dim], d.number(1, shape[dim] + 3)])
    dims = d.rng.sample(range(len(shape)), d.number(1, min(len(shape), 3)))
    sizes = [d.rng.choice([shape[i], shape[i], d.number(1, shape[i] + 2)]) for i in dims]
    one, several = f"dim={dim}, {norm}", f"dim={dims}, {norm}"
    modes = f"torch.fft.rfft({x}, n={n}, {one})"
    kept = f"{modes}.narrow({dim}, 0, {d.number(1, n // 2 + 1)})"
    choices = [
        *(f"torch.fft.irfft({z}, n={n}, {one})" for z in (modes, kept, x)),
        *(f"torch.fft.irfftn(torch.fft.rfftn({x}, {s}{several}), s={[shape[i] for i in dims]}, {several})"
          for s in ("", f"s={sizes}, ")),
        f"torch.fft.hfft({x}, n={n}, {one})", f"torch.fft.ihfft({x}, n={n}, {one}).real * 2",
        f"torch.fft.ifft({x}, n={n}, {one}).imag * 2", f"torch.fft.fftn({x}, s={sizes}, {several}).real * 2",
        f"torch.fft.fftshift(torch.fft.fft({x}, {one})).imag * 2",
    ]  # fmt: skip
    if len(shape) < MOST_DIMS:
        choices += [f"torch.view_as_real({modes})", f"torch.view_as_real(torch.fft.rfftn({x}, s={sizes}, {several}))"]
    return d.rng.choice(choices)


# Writes


def _target(d: Draw, ndim: int = 0) -> str:
    return d.x(ndim, lambda t: not (t.is_leaf and t.requires_grad))


def _write_number(d: Draw) -> str:
    x = _target(d)
    return d.rng.choice([f"{x}.mul_(1.5)", f"{x}.add_(0.25)", f"{x}.fill_(0.75)", f"{x}.zero_()", f"{x}.sin_()",
                         f"{x}.neg_()", f"{x}.clamp_(-1, 1)  # if away({x}, -1, 1)", f"{x} += 1"])  # fmt: skip


def _write_other(d: Draw) -> str:
    x = _target(d)
    y = d.like(x, lambda a, b: _broadcasts(a, b) and torch.broadcast_shapes(a.shape, b.shape) == a.shape)
    op = d.rng.choice(["add_", "mul_", "sub_", "copy_"])
    return f"{x}.{op}({y})"


def _write_view(d: Draw) -> str:
    """Writes through a view, or a view of a view, that has no name."""
    target = _target(d, 1)
    inner = Draw(d.rng, {target: d.values[target]}, d.mesh, d.stated)
    view = d.rng.choice(VIEWS)(inner)
    if d.rng.random() < 0.4:
        with torch.no_grad():
            scope = {target: d.values[target]}
            run_line(f"v0 = {view}", scope)
        inner = Draw(d.rng, {"v0": scope["v0"]}, d.mesh, d.stated)
        view = d.rng.choice(VIEWS)(inner).replace("v0", view)
    return view + d.rng.choice([".mul_(1.5)", ".add_(0.5)", ".fill_(0.25)", ".copy_(weight(1)[0])", ".zero_()"])


def _set_item(d: Draw) -> str:
    x = _target(d, 1)
    y = d.like(x)
    size = d.values[x].shape[0]
    return d.rng.choice([f"{x}[{d.slice(size)}] = 1.25", f"{x}[..., {d.slice(d.values[x].shape[-1])}] += {y}.sum()",
                         f"{x}[{d.index(size)}] = 0.5", f"{x}[{x} > 0.5] = 0.25  # if away({x}, 0.5)",
                         f"{x}[:] = {y}"])  # fmt: skip


def _write_rows(d: Draw) -> str:
    x = _target(d, 1)
    dim = d.dim(x, 1)
    index = d.index(d.values[x].shape[dim])
    return d.rng.choice([f"{x}.index_fill_({dim}, {index}, 0.5)", f"{x}.cumsum_({dim})", f"{x}.tril_()",
                         f"{x}.masked_fill_({x} > 0.3, -1.0)  # if away({x}, 0.3)"])  # fmt: skip


def _reshape_itself(d: Draw) -> str:
    x = _target(d, 2)
    return d.rng.choice([f"{x}.unsqueeze_(0)", f"{x}.squeeze_()", f"{x}.transpose_(0, 1)"])


# Random numbers: what is drawn is certain, or a check of what was drawn


def _write_drawn(d: Draw) -> str:
    """Random numbers of which there is one."""
    x = _target(d)
    return x + d.rng.choice([".normal_(1.5, 0.0)", ".uniform_(0.5, 0.5)", ".bernoulli_(1.0)",
                             f".bernoulli_(torch.zeros_like({x}))"])  # fmt: skip


def _copies(d: Draw) -> str:
    """Zeros, if all copies of what was drawn are the same: shards are sharded out of one after the other."""
    x, draw = d.x(1), d.rng.choice(["torch.rand_like(R)", "torch.poisson(R.detach().exp())", "torch.randn_like(R)",
                                    "F.rrelu(R.detach(), training=True)", "F.dropout(R.detach())"])  # fmt: skip
    placements = " ".join(["S(0)"] * len(d.mesh))
    return f"(lambda r: whole(to(r, {placements!r})) - whole(r))({draw.replace('R', x)})"


def _sampled(d: Draw) -> str:
    """Samples of all categories without replacement, in order."""
    x = d.x(1, lambda t: t.ndim <= 2 and 0 not in t.shape and t.dtype is torch.float64)
    return f"torch.multinomial({x}.detach().sigmoid(), {x}.shape[-1]).sort(-1)[0]"


# Layouts


def _to(d: Draw) -> str:
    x = d.pick()
    value, mesh = d.values[x], d.mesh
    words = [f"S({d.rng.randrange(value.ndim)})" if value.ndim and d.rng.random() < 0.7 else "R" for _ in mesh]
    if not d.stated or d.rng.random() < 0.3:
        return f'to({x}, "{" ".join(words)}")'
    return f'to({x}, "{" ".join(words)}", {sizes_for(d.rng, mesh, tuple(value.shape), words)})'


def sizes_for(
    rng: random.Random, mesh: tuple[int, ...], shape: tuple[int, ...], words: list[str]
) -> dict[int, list[int]]:
    """Shard sizes of every dim that is sharded, by the last mesh dim that shards it."""
    sizes = {}
    for dim, size in enumerate(shape):
        dims = [m for m, word in enumerate(words) if word == f"S({dim})"]
        if dims:
            sizes[dims[-1]] = parts_in_style(rng, size, math.prod(mesh[m] for m in dims), rng.randrange(5))
    return sizes


OPS: list[tuple[str, list[Maker]]] = [
    ("pointwise", [_unary(t) for t in [
        "-X", "X.sin()", "torch.tanh(X)", "X.sigmoid()", "F.gelu(X)", "F.silu(X)", "F.softplus(X)", "X.erf()", "X * 0.5 + 1",
        "1 - X", "X ** 2", "X / 3", "X.clamp(max=2).exp()  # if away(X, 2)", "X.abs()  # if away(X, 0)",
        "X.relu()  # if away(X, 0)", "(X.square() + 1).sqrt()", "X.square().log1p()", "X.clone()", "X.contiguous()",
        "X.detach() * X", "X.sign()  # if away(X, 0)", "X.to(torch.float64)", "X > 0  # if away(X, 0)",
        "(X * 3).floor().long()  # if away((X * 3) - (X * 3).round(), 0)", "X.clamp(-0.5, 0.8)  # if away(X, -0.5, 0.8)",
        "torch.zeros_like(X)", "torch.ones_like(X) * X", "X.tril()", "X.mT.triu(1)", "F.normalize(X, dim=-1)  # if away(X, 0)",
        "torch.nan_to_num(X)", "X.sum()", "X.mean()", "X.norm()  # if away(X.norm(), 0)", "X.max()  # if apart(X)", "X.std()  # if away(X.std(), 0)", "X.prod()",
        "X.argmax()  # if apart(X)", "X.flatten()", "2 - X.cos()", "X.new_zeros(3) + 1", "X.numel() + X",
        "X * X.shape[0]", "F.layer_norm(X, X.shape[-1:])", "F.rms_norm(X, X.shape[-1:])", "X.repeat_interleave(2, 0)",
        "torch.cdist(X, X + 1)", "X.logit(0.1)  # if away(X, 0.1, 0.9)", "X.trace()", "torch.diag_embed(X)", "X.rot90()",
        "X.float()",
    ]]),
    ("pairs", [_binary(t) for t in [
        "X + Y", "X - Y", "X * Y", "X / (Y.abs() + 0.5)  # if away(Y, 0)", "torch.maximum(X, Y)  # if away(X - Y, 0)",
        "torch.minimum(X, Y)  # if away(X - Y, 0)", "torch.gt(X, Y)  # if away(X - Y, 0)", "torch.atan2(X, Y.square() + 1)",
        "torch.addcmul(X, X, Y, value=0.5)", "torch.lerp(X, Y.to(X.dtype), 0.3)", "torch.hypot(X, Y + 3)  # if away(Y, -3)",
        "F.mse_loss(X, Y.expand_as(X))", "torch.logaddexp(X, Y)",
    ]]),
    ("reductions", [_over(t) for t in [
        "X.sum(D, K)", "X.mean(D, K)", "X.amax(D, K)  # if apart(X)", "X.amin(D, K)  # if apart(X)",
        "X.var(D, keepdim=K, correction=0)", "torch.linalg.vector_norm(X, 2, D, K)  # if away(X.square().sum(D), 0)", "X.logsumexp(D, K)",
        "torch.std_mean(X, D, keepdim=K)  # if away(X.std(D), 0)", "(X > 0).any(D, K)  # if away(X, 0)", "torch.linalg.vector_norm(X, 1, D, K)  # if away(X, 0)",
    ]]),
    ("along", [*[_along(t) for t in [
        "X.softmax(D)", "X.log_softmax(D)", "X.cumsum(D)", "X.cumprod(D)", "X.logcumsumexp(D)", "X.flip(D)", "X.roll(2, D)",
        "X.prod(D)", "X.sort(D, stable=True)  # if apart(X, D)", "X.argsort(D)  # if apart(X, D)",
    ]], *[_along(t, 1) for t in [
        "tuple(X.cummax(D))  # if apart(X, D)", "X.cummin(D)[0]  # if apart(X, D)", "X.argmax(D)  # if apart(X, D)",
        "tuple(X.max(D))  # if apart(X, D)", "X.min(D, keepdim=True)[0]  # if apart(X, D)", "X.diff(dim=D)",
        "tuple(X.topk(N, D))  # if apart(X, D)", "X.median(D)[0]  # if apart(X, D)", "X.kthvalue(N, D)[0]  # if apart(X, D)",
        "F.glu(X, D)", "X.renorm(2, D, 1.0)",
    ]]]),
    ("views", VIEWS),
    ("more views", [*VIEWS, _expanded, _expanded, _parted]),
    ("joins", [_cat, _stack, _pad, _cat]),
    ("rows", [_rows, _rows, _embedding, _gather, _index_add, _where, _mask, _mask]),
    ("masks", [_kept, _kept, _scattered, _write_kept]),
    ("products", [_matmul, _matmul, _linear, _outer, _attention, _conv]),
    ("transforms", [_fourier]),
    ("windows", [_columns_of_windows, _along("X.roll(1, D) - X.roll(-2, D)"), _along("X.unfold(D, 2, 1).mean(-1)", 2), _along("torch.gradient(X, dim=D)[0]", 2)]),
    ("writes", [_write_number, _write_other, _write_view, _write_view, _write_view, _set_item, _write_rows, _reshape_itself]),
    ("random", [_copies, _copies, _sampled, _write_drawn, *[_unary(t) for t in [
        "torch.bernoulli(torch.gt(X, 0).to(torch.float64))  # if away(X, 0)", "F.rrelu(X, 0.25, 0.25, True)  # if away(X, 0)",
        "torch.normal(X.detach(), torch.zeros_like(X))", "F.dropout(X, 1.0)", "torch.poisson(torch.zeros_like(X))",
        "torch.randint_like(X, 3, 4)", "torch.rand_like(X).ge(0)", "torch._standard_gamma(X.detach().exp()).gt(0)",
    ]]]),
    ("dtypes", [_cast]),
    ("layouts", [_to, _to, lambda d: f"whole({d.pick()})"]),
]  # fmt: skip
"""How to draw a line, by family; a family is drawn first."""

_FAMILIES = [makers for _, makers in OPS]


def draw_line(d: Draw) -> tuple[str, bool] | None:
    """A line, and whether plain PyTorch refuses it; its results are added to the values. None if there is none."""
    for _ in range(60):
        try:
            text = d.rng.choice(d.rng.choice(_FAMILIES))(d)
        except (NoFit, RuntimeError, IndexError, ValueError):
            continue
        found = _tried(d, text)
        if found is not None:
            return found
    return None


def _tried(d: Draw, text: str) -> tuple[str, bool] | None:
    count = sum(name.startswith("v") for name in d.values)
    is_write = (
        bool(re.search(r"^[^#]*[a-z]_\([^()]*(\([^()]*\)[^()]*)*\)(\s*#.*)?$| \+?= ", text)) and "_scaled" not in text
    )
    try:
        if not holds(text, d.values):
            return None
        scope = {**CALLS, **d.values}
        if is_write:
            if _reads_what_it_writes(text, d.values):
                return None
            exec(_code(text), scope)
            return (text, False) if all(map(tame, d.values.values())) else None
        results = eval(text, scope)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return (text, True) if d.rng.random() < 0.15 else None
    if isinstance(results, (tuple, list)) and len(results) == 1:
        bare, _, condition = text.partition("  # if ")
        text, results = f"({bare})[0]" + (f"  # if {condition}" if condition else ""), results[0]
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    fit = all(x.numel() <= MOST_ELEMENTS and x.ndim <= MOST_DIMS + 1 and tame(x) for x in results)
    if not results or not fit:
        return None
    names = [f"v{count + n}" for n in range(len(results))]
    d.values.update(zip(names, results, strict=True))
    return f"{', '.join(names)} = {text}", False


def _reads_what_it_writes(text: str, values: Mapping[str, Tensor]) -> bool:
    """Whether a write reads another view of the memory that it writes to: what it gives is then a matter of order."""
    target, *others = (values[n] for n in _NAMES.findall(text.partition("  # if ")[0]))
    place = (target.storage_offset(), target.shape, target.stride())
    return any(
        x.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        and (x.storage_offset(), x.shape, x.stride()) != place
        for x in others
    )


def tame(x: Tensor) -> bool:
    """Whether numbers are neither lost nor so large that rounding is."""
    return not x.is_floating_point() or bool((x.detach().abs() < 1e4).all())
