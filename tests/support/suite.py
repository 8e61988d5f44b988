"""Graphs that schedules are judged by: written down with realistic sizes, or traced from models.

A written graph has numbers for the shards of the rank that it is written for, and the size vectors of all ranks in its
collectives. Compute and communication are of the same order in it, up to `MOST_TOKENS`, so that an order matters.

A traced graph is that of a model under AOTAutograd, with the partitioner and the decompositions of Inductor, where
shards are symbols.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.fx import Graph, GraphModule, Node

import shardcompile as sc
from examples.poisson.model import PointTransformer, relative_l2
from shardcompile.inspect.offline import OfflineWorld, trace_step
from shardcompile.machines import H100, link_of
from shardcompile.passes import Pipeline
from tests.support.lockstep import Builder

aten = torch.ops.aten
_ours = torch.ops.shardcompile
_c10d = torch.ops._c10d_functional

BF16 = torch.bfloat16

# ----------------------------------------------------------------------------------------------- partitions

IMBALANCES = ("even", "1:9", "log-normal", "one owner", "empty shards")
"""How a dim is sharded, see `partition`."""


def partition(total: int, ranks: int, imbalance: str, number: int = 0) -> list[int]:
    """Shard sizes along a dim.

    Args:
        total: size of the dim.
        ranks: how many shards.
        imbalance: one of `IMBALANCES`, or "mild", by which the largest shard is about twice the mean. Of 1:9 it is the first rank that has nine times as much as the others, whichever
            tensor it is; single owners and log-normal sizes are other ones for each tensor; of empty shards every
            second one is.
        number: of the tensor.
    """
    numbers = random.Random(f"{imbalance} {total} {ranks} {number}")
    weights = {
        "even": lambda: [1.0] * ranks,
        "1:9": lambda: [9.0] + [1.0] * (ranks - 1),
        "log-normal": lambda: [numbers.lognormvariate(0, 1) for _ in range(ranks)],
        "mild": lambda: [numbers.lognormvariate(0, 0.3) for _ in range(ranks)],
        "one owner": lambda: [float(r == number % ranks) for r in range(ranks)],
        "empty shards": lambda: [float(r % 2 == number % 2) for r in range(ranks)],
    }[imbalance]()
    return apportioned(total, weights)


def random_partition(total: int, ranks: int, numbers: random.Random) -> list[int]:
    """Shard sizes that are drawn: log-normal ones, with empty shards now and then, or a single owner."""
    kind = numbers.random()
    if kind < 0.15:
        return apportioned(total, [float(r == numbers.randrange(ranks)) or 1e-9 for r in range(ranks)])
    sigma = numbers.choice([0.2, 0.5, 1.0, 2.0])
    weights = [numbers.lognormvariate(0, sigma) for _ in range(ranks)]
    if kind < 0.5:
        weights = [w * (numbers.random() < 0.6) for w in weights]
    return apportioned(total, weights if any(weights) else [1.0] * ranks)


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers of a given sum, in proportion to weights."""
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


# ------------------------------------------------------------------------------------ how graphs are written

Partitions = Callable[[int, int], list[int]]
"""Shard sizes of a dim by its size and the number of the tensor."""


@dataclass(frozen=True)
class Place:
    """Where a graph is written for.

    Attributes:
        ranks: in the group.
        rank: whose shards the graph has.
        group: name of the group.
        partitions: of all that is sharded.
        device: of all tensors.
        padded: whether gathers and reductions are written with torch's even collectives, padded to the largest shard.
    """

    ranks: int
    rank: int
    group: str
    partitions: Partitions
    device: str = "cpu"
    padded: bool = False


class Writer(Builder):
    """Writes a graph for one rank of a group.

    Args:
        place: of that rank.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self._tensors = 0

    def input(self, *shape: int, dtype: torch.dtype = BF16) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=self.place.device)
        return node

    def partition(self, size: int) -> list[int]:
        """The partition of one more tensor."""
        self._tensors += 1
        return self.place.partitions(size, self._tensors - 1)

    def parameter(self, *shape: int) -> tuple[Node, list[int], tuple[int, ...]]:
        """The shard of a parameter that is sharded along its first dim, the partition and the shape of the whole."""
        sizes = self.partition(shape[0])
        return self.input(sizes[self.place.rank], *shape[1:]), sizes, shape

    def gathered(self, shard: Node, sizes: list[int], shape: tuple[int, ...]) -> Node:
        """The whole parameter."""
        if self.place.padded:
            return self._gathered_with_padding(shard, sizes)
        flat = self.done(_ours.all_gather_v.default, shard, 0, sum(sizes), sizes, 0, [], self.place.group)
        return self.call(aten.view.default, flat, list(shape)) if len(shape) > 1 else flat

    def _gathered_with_padding(self, shard: Node, sizes: list[int]) -> Node:
        most = max(sizes)
        padded = self._padded(shard, most - sizes[self.place.rank])
        whole = self.done(_c10d.all_gather_into_tensor.default, padded, self.place.ranks, self.place.group)
        if set(sizes) == {most}:
            return whole
        parts = [self.call(aten.slice.Tensor, whole, 0, r * most, r * most + s) for r, s in enumerate(sizes) if s]
        return self.call(aten.cat.default, parts, 0)

    def scattered(self, whole: Node, sizes: list[int]) -> Node:
        """The sum over the ranks, of which each keeps its shard."""
        rows = sizes[self.place.rank]
        if self.place.padded:
            most = max(sizes)
            parts = self.call(aten.split_with_sizes.default, whole, sizes, 0)
            shards = [
                self._padded(self.call(operator.getitem, parts, r), most - s) if s else self._zeros(whole, most)
                for r, s in enumerate(sizes)
            ]
            packed = self.call(aten.cat.default, shards, 0)
            reduced = self.done(_c10d.reduce_scatter_tensor.default, packed, "sum", self.place.ranks, self.place.group)
            return self.call(aten.slice.Tensor, reduced, 0, 0, rows)
        flat = self.done(_ours.reduce_scatter_v.default, whole, 0, rows, "sum", sizes, 0, [], self.place.group)
        shape = [rows, *whole.meta["val"].shape[1:]]
        return self.call(aten.view.default, flat, shape) if len(shape) > 1 else flat

    def _padded(self, x: Node, rows: int) -> Node:
        ndim = x.meta["val"].ndim
        return self.call(aten.constant_pad_nd.default, x, [0, 0] * (ndim - 1) + [0, rows]) if rows else x

    def _zeros(self, like: Node, rows: int) -> Node:
        return self.call(aten.new_zeros.default, like, [rows, *like.meta["val"].shape[1:]])

    def turned(self, x: Node, dims: tuple[int, int], partitions: tuple[list[int], list[int]]) -> Node:
        """A tensor that is sharded along the first of two dims, sharded along the second one instead."""
        (src, dst), (given, taken) = dims, partitions
        rows = taken[self.place.rank]
        args = (src, dst, sum(given), rows, given, 0, [], taken, 0, [], self.place.group)
        flat = self.done(_ours.all_to_all_v.default, x, *args)
        shape = list(x.meta["val"].shape)
        shape[src], shape[dst] = sum(given), rows
        # The op returns rows of the source dim first.
        moved = self.call(aten.view.default, flat, [shape[src], *(s for d, s in enumerate(shape) if d != src)])
        return moved if src == 0 else self.call(aten.permute.default, moved, _first_to(src, len(shape)))

    def repartition(self, x: Node, given: list[int], taken: list[int]) -> Node:
        """A tensor sharded in rows, in other shards."""
        args = (0, sum(given), taken[self.place.rank], given, 0, [], taken, 0, [], [], None, self.place.group)
        flat = self.done(_ours.fetch_ranges.default, x, *args)
        return self.call(aten.view.default, flat, [taken[self.place.rank], *x.meta["val"].shape[1:]])

    def rolled(self, x: Node, sizes: list[int], shift: int) -> Node:
        """A tensor sharded in rows, rolled along them."""
        args = (0, shift, -shift, sum(sizes), sizes[self.place.rank], sizes, 0, [], self.place.group)
        flat = self.done(_ours.fetch_around.default, x, *args)
        return self.call(aten.view.default, flat, list(x.meta["val"].shape))

    def t(self, x: Node) -> Node:
        """A matrix transposed."""
        return self.call(aten.permute.default, x, [1, 0])

    def mm(self, a: Node, b: Node) -> Node:
        return self.call(aten.mm.default, a, b)

    def normed(self, x: Node, weight: Node) -> Node:
        """Root mean square norm, as Inductor's decomposition has it."""
        wide = self.call(aten.mul.Tensor, x, 1.0)
        mean = self.call(aten.mean.dim, self.call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 1e-6))
        return self.call(aten.mul.Tensor, self.call(aten.mul.Tensor, wide, scale), weight)

    def norm_gradients(self, grad: Node, x: Node, weight: Node) -> tuple[Node, Node]:
        """What stands for the gradients of `normed`, of its input and its weight: as many passes over the memory."""
        scaled = self.call(aten.mul.Tensor, grad, weight)
        inner = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, scaled, x), [-1], True)
        result = self.call(aten.sub.Tensor, scaled, self.call(aten.mul.Tensor, x, inner))
        return result, self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, grad, x), [0])


def _first_to(dim: int, ndim: int) -> list[int]:
    order = list(range(1, ndim))
    order.insert(dim, 0)
    return order


# ---------------------------------------------------------------------- parameters that are kept sharded

SEQUENCE = 2048
MOST_TOKENS = 1 << 16


@dataclass(frozen=True)
class Size:
    """Of a transformer.

    Attributes:
        layers: how many.
        width: channels.
        tokens: of one rank, whole sequences.
        heads: of the attention.
        sequence: tokens that attend to each other.
    """

    layers: int
    width: int = 2048
    tokens: int = 8192
    heads: int = 16
    sequence: int = SEQUENCE


def balanced_tokens(ranks: int, partitions: Partitions, size: int = 4096) -> int:
    """Tokens of a rank with which a layer computes as long as its parameters take to be gathered, on H100.

    A whole number of sequences, up to `MOST_TOKENS`.
    """
    shares = [max(c) / max(sum(c), 1) for c in (partitions(size, i) for i in range(4))]
    wire = 2 * (ranks - 1) * sum(shares) / len(shares) / link_of(H100, ranks).bandwidth  # seconds of a parameter
    compute = 2 / (H100.flops[BF16] * H100.share)  # of a parameter and a token
    return SEQUENCE * max(1, min(round(wire / compute / SEQUENCE), MOST_TOKENS // SEQUENCE))


def _parameters(w: Writer, width: int) -> list[tuple[Node, list[int], tuple[int, ...]]]:
    shapes = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    return [w.parameter(*shape) for shape in shapes]


def fsdp_forward(place: Place, size: Size) -> Graph:
    """Layers of a transformer whose parameters are gathered for each of them."""
    w = Writer(place)
    x = w.input(size.tokens, size.width)
    layers = [_parameters(w, size.width) for _ in range(size.layers)]
    saved: list[Node] = []
    for shards in layers:
        norm, qkv, out, norm2, up, down = (w.gathered(*b) for b in shards)
        h = w.normed(x, norm)
        attended = _attention(w, w.mm(h, w.t(qkv)), size)
        y = w.call(aten.add.Tensor, x, w.mm(attended[0], w.t(out)))
        h2 = w.normed(y, norm2)
        wide = w.mm(h2, w.t(up))
        g = w.call(aten.gelu.default, wide)
        saved += [x, h, *attended, y, h2, wide, g]
        x = w.call(aten.add.Tensor, y, w.mm(g, w.t(down)))
    return w.output(x, *saved)


def _heads(w: Writer, packed: Node, size: Size) -> list[Node]:
    shape = [size.tokens // size.sequence, size.sequence, 3, size.heads, size.width // size.heads]
    heads = w.call(aten.permute.default, w.call(aten.view.default, packed, shape), [2, 0, 3, 1, 4])
    return [w.call(aten.select.int, heads, 0, i) for i in range(3)]


def _attention(w: Writer, packed: Node, size: Size) -> list[Node]:
    """The attention's result, and what its gradient needs."""
    q, k, v = _heads(w, packed, size)
    if w.place.device == "cpu":
        results = w.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
        rest = [w.call(operator.getitem, results, 1)]
    else:
        results = w.call(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, True)
        rest = [w.call(operator.getitem, results, i) for i in (1, 6, 7)]
    out = w.call(aten.permute.default, w.call(operator.getitem, results, 0), [0, 2, 1, 3])
    return [w.call(aten.view.default, out, [size.tokens, size.width]), packed, *rest]


def _attention_gradient(w: Writer, grad: Node, attended: Node, packed: Node, rest: Sequence[Node], size: Size) -> Node:
    q, k, v = _heads(w, packed, size)
    shape = [size.tokens // size.sequence, size.sequence, size.heads, size.width // size.heads]
    grad, out = (
        w.call(aten.permute.default, w.call(aten.view.default, x, shape), [0, 2, 1, 3]) for x in (grad, attended)
    )
    if w.place.device == "cpu":
        target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        results = w.call(target, grad, q, k, v, out, rest[0], 0.0, True)
    else:
        target = aten._scaled_dot_product_flash_attention_backward.default
        lse, seed, offset = rest
        args = (grad, q, k, v, out, lse, None, None, size.sequence, size.sequence, 0.0, True, seed, offset)
        results = w.call(target, *args)
    parts = [w.call(aten.permute.default, w.call(operator.getitem, results, i), [0, 2, 1, 3]) for i in range(3)]
    return w.call(aten.view.default, w.call(aten.stack.default, parts, 2), [size.tokens, 3 * size.width])


def fsdp_backward(place: Place, size: Size) -> Graph:
    """The backward pass of `fsdp_forward`: parameters are gathered again, gradients are reduced and scattered."""
    w = Writer(place)
    layers = [_parameters(w, size.width) for _ in range(size.layers)]
    saved = [_saved(w, size) for _ in range(size.layers)]
    dy = w.input(size.tokens, size.width)
    results: list[Node] = []
    for shards, (x, h, a, packed, rest, y, h2, wide, g) in zip(layers[::-1], saved[::-1], strict=True):
        sizes = [b[1] for b in shards]
        down, up, norm2, out, qkv, norm = (w.gathered(*b) for b in shards[::-1])
        d_down = w.scattered(w.mm(w.t(dy), g), sizes[5])
        d_wide = w.call(aten.gelu_backward.default, w.mm(dy, down), wide)
        d_up = w.scattered(w.mm(w.t(d_wide), h2), sizes[4])
        d_y, d_norm2 = w.norm_gradients(w.mm(d_wide, up), y, norm2)
        dy = w.call(aten.add.Tensor, dy, d_y)
        d_out = w.scattered(w.mm(w.t(dy), a), sizes[2])
        d_packed = _attention_gradient(w, w.mm(dy, out), a, packed, rest, size)
        d_qkv = w.scattered(w.mm(w.t(d_packed), h), sizes[1])
        d_x, d_norm = w.norm_gradients(w.mm(d_packed, qkv), x, norm)
        dy = w.call(aten.add.Tensor, dy, d_x)
        small = [w.scattered(d_norm2, sizes[3]), w.scattered(d_norm, sizes[0])]
        results += [d_down, d_up, d_out, d_qkv, *small]
    return w.output(dy, *results)


def _saved(w: Writer, size: Size) -> tuple[Any, ...]:
    batch, heads = size.tokens // size.sequence, size.heads
    x, h, a, y, h2 = (w.input(size.tokens, size.width) for _ in range(5))
    packed = w.input(size.tokens, 3 * size.width)
    rest = [w.input(batch, heads, size.sequence, dtype=torch.float32)]
    if w.place.device != "cpu":
        rest += [w.input(2, dtype=torch.uint64), w.input(dtype=torch.uint64)]
    wide, g = (w.input(size.tokens, 4 * size.width) for _ in range(2))
    return x, h, a, packed, rest, y, h2, wide, g


# ------------------------------------------------------------------------------------- mixture of experts


@dataclass(frozen=True)
class Experts:
    """Of a mixture of experts.

    Attributes:
        layers: how many.
        experts: of a rank on average.
        tokens: of a rank, for one expert and half of the batch, on average.
        width: channels.
        hidden: channels within an expert.
    """

    layers: int = 4
    experts: int = 2
    tokens: int = 64
    width: int = 2048
    hidden: int = 4096


def experts_forward(place: Place, size: Experts) -> Graph:
    """Tokens go to the ranks of their experts and back, in two halves; every token also meets a shared expert."""
    w = Writer(place)
    given, taken = _expert_partitions(w, size)
    n, rows = sum(taken), given[place.rank]
    weights = [_expert_weights(w, taken[place.rank], size) for _ in range(size.layers)]
    halves = [w.input(n, rows, size.width) for _ in range(2)]
    saved: list[Node] = []
    for shared_in, shared_out, own_in, own_out in weights:
        for i, x in enumerate(halves):
            arrived = w.turned(x, (1, 0), (given, taken))
            wide = w.call(aten.bmm.default, arrived, own_in)
            result = w.call(aten.bmm.default, w.call(aten.gelu.default, wide), own_out)
            back = w.turned(result, (0, 1), (taken, given))
            flat = w.call(aten.view.default, x, [n * rows, size.width])
            hidden = w.mm(flat, shared_in)
            alone = w.mm(w.call(aten.gelu.default, hidden), shared_out)
            both = w.call(aten.add.Tensor, back, w.call(aten.view.default, alone, [n, rows, size.width]))
            halves[i] = w.call(aten.add.Tensor, x, both)
            saved += [x, arrived, wide, hidden]
    return w.output(*halves, *saved)


def experts_backward(place: Place, size: Experts) -> Graph:
    """The backward pass of `experts_forward`, but for the gradients' reduction."""
    w = Writer(place)
    given, taken = _expert_partitions(w, size)
    n, rows, mine = sum(taken), given[place.rank], taken[place.rank]
    weights = [_expert_weights(w, mine, size) for _ in range(size.layers)]
    sizes = [(n, rows, size.width), (mine, sum(given), size.width), (mine, sum(given), size.hidden)]
    hidden = (n * rows, size.hidden)
    saved = [[[w.input(*e) for e in (*sizes, hidden)] for _ in range(2)] for _ in range(size.layers)]
    grads = [w.input(n, rows, size.width) for _ in range(2)]
    results: list[Node] = []
    for layer, (shared_in, shared_out, own_in, own_out) in reversed(list(enumerate(weights))):
        for i, (x, arrived, wide, hid) in enumerate(saved[layer]):
            flat, dy = (w.call(aten.view.default, t, [n * rows, size.width]) for t in (x, grads[i]))
            d_hid = w.call(aten.gelu_backward.default, w.mm(dy, w.t(shared_out)), hid)
            d_alone = w.call(aten.view.default, w.mm(d_hid, w.t(shared_in)), [n, rows, size.width])
            results += [w.mm(w.t(flat), d_hid), w.mm(w.t(w.call(aten.gelu.default, hid)), dy)]
            d_result = w.turned(grads[i], (1, 0), (given, taken))
            d_wide = w.call(aten.gelu_backward.default, _bmm(w, d_result, own_out, 2), wide)
            d_x = w.turned(_bmm(w, d_wide, own_in, 2), (0, 1), (taken, given))
            results += [_bmm(w, arrived, d_wide, 1), _bmm(w, w.call(aten.gelu.default, wide), d_result, 1)]
            grads[i] = w.call(aten.add.Tensor, grads[i], w.call(aten.add.Tensor, d_x, d_alone))
    return w.output(*grads, *results)


def _bmm(w: Writer, a: Node, b: Node, turn: int) -> Node:
    """The product of two batches of matrices, of which the first or the second one is transposed."""
    turned = w.call(aten.permute.default, a if turn == 1 else b, [0, 2, 1])
    return w.call(aten.bmm.default, *((turned, b) if turn == 1 else (a, turned)))


def _expert_partitions(w: Writer, size: Experts) -> tuple[list[int], list[int]]:
    """How the tokens of an expert and how the experts are sharded."""
    return w.partition(w.place.ranks * size.tokens), w.partition(w.place.ranks * size.experts)


def _expert_weights(w: Writer, mine: int, size: Experts) -> list[Node]:
    shapes = [(size.width, size.hidden), (size.hidden, size.width)]
    return [w.input(*s) for s in shapes] + [w.input(mine, *s) for s in shapes]


# ------------------------------------------------------------------------------------------ images in rows


@dataclass(frozen=True)
class Images:
    """Of a U-Net on images whose rows are sharded.

    Attributes:
        rows: of one rank on average, a multiple of four.
        columns: of an image.
        channels: at full resolution.
        halves: images that are worked on independently of each other.
    """

    rows: int = 64
    columns: int = 256
    channels: int = 64
    halves: int = 2


def unet_forward(place: Place, size: Images) -> Graph:
    """Two levels down and up; each convolution fetches the rows next to its shard. No shard is empty."""
    w = Writer(place)
    partition = [4 * (s + 1) for s in w.partition(size.rows * place.ranks // 4)]
    sizes = [[s // 2**level for s in partition] for level in range(3)]
    c = size.channels
    plan = [(3, c, 0), (c, 2 * c, 1), (2 * c, 4 * c, 2), (6 * c, 2 * c, 1), (3 * c, c, 0)]
    kernels = [(w.input(o, i, 3, 3), w.input(o, o, 3, 3)) for i, o, _ in plan]
    results: list[Node] = []
    for _ in range(size.halves):
        x = w.input(1, 3, partition[place.rank], size.columns)
        skips: list[Node] = []
        for (first, second), (_, _, level) in zip(kernels, plan, strict=True):
            down = level == len(skips)
            if down and skips:
                x = w.call(aten.avg_pool2d.default, x, [2, 2], [2, 2])
            elif not down:
                x = w.call(aten.upsample_nearest2d.default, x, _doubled(x))
                x = w.call(aten.cat.default, [skips[level], x], 1)
            for kernel in (first, second):
                wide = _haloed(w, x, sizes[level])
                x = w.call(aten.relu.default, w.call(aten.convolution.default, wide, kernel, *_PLAIN))
                results += [wide, x]  # for the backward pass
            if down:
                skips.append(x)
    return w.output(*results)


_PLAIN = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
"""A convolution's arguments: one step at a time, no padding."""


def _doubled(x: Node) -> list[int]:
    return [2 * s for s in x.meta["val"].shape[2:]]


def _haloed(w: Writer, x: Node, sizes: list[int]) -> Node:
    """A shard with one row more on either side, fetched where there is one, and a column of zeros on either side."""
    start, end = sum(sizes[: w.place.rank]), sum(sizes[: w.place.rank + 1])
    above, below = start > 0, end < sum(sizes)
    rows = end - start + above + below
    partition = (sizes, 0, [])
    args = (2, sum(sizes), rows, *partition, *partition, [sum(sizes), 1, 1, 1, 1], None, w.place.group)
    flat = w.done(_ours.fetch_ranges.default, x, *args)
    batch, channels, _, columns = x.meta["val"].shape
    moved = w.call(aten.view.default, flat, [rows, batch, channels, columns])
    wide = w.call(aten.permute.default, moved, [1, 2, 0, 3])
    return w.call(aten.constant_pad_nd.default, wide, [1, 1, 1 - above, 1 - below])


# ----------------------------------------------------------------------------------------- drawn programs


def drawn(place: Place, numbers: random.Random, ops: int = 40) -> Graph:
    """Matrices, sharded or whole, that are gathered, reduced, exchanged, multiplied and added at random.

    Args:
        place: where it is written for.
        numbers: draws the program, the same one for every rank.
        ops: how many.
    """
    w = Writer(place)
    size = numbers.choice([16, 64, 512])
    whole = [w.input(size, size)]
    partitions = [w.partition(size) for _ in range(3)]
    shards = [(w.input(c[place.rank], size), c) for c in partitions]
    # What meets no collective does not tell that other ranks have other sizes, see `shards.labels`.
    whole += [w.gathered(shard, sizes, (size, size)) for shard, sizes in shards]
    for _ in range(ops):
        kind = numbers.choice(
            ["gather", "scatter", "exchange", "reduce", "product", "sum", "shard product", "repartition", "roll"]
        )
        shard, sizes = numbers.choice(shards)
        x, y = numbers.choice(whole), numbers.choice(whole)
        if kind == "gather":
            whole.append(w.gathered(shard, sizes, (size, size)))
        elif kind == "scatter":
            shards.append((w.scattered(x, sizes), sizes))
        elif kind == "exchange":
            other = numbers.choice(partitions)
            turned = w.turned(shard, (0, 1), (sizes, other))
            shards.append((w.turned(turned, (1, 0), (other, sizes)), sizes))
        elif kind == "reduce":
            flat = w.call(aten.view.default, x, [size * size])
            reduced = w.done(_c10d.all_reduce.default, flat, "sum", place.group)
            whole.append(w.call(aten.view.default, reduced, [size, size]))
        elif kind == "product":
            whole.append(w.mm(x, y))
        elif kind == "sum":
            whole.append(w.call(aten.add.Tensor, x, y))
        elif kind == "repartition":
            other = numbers.choice(partitions)
            shards.append((w.repartition(shard, sizes, other), other))
        elif kind == "roll":
            shards.append((w.rolled(shard, sizes, numbers.choice([-1, 1, 3])), sizes))
        else:
            shards.append((w.mm(shard, x), sizes))
    return w.output(*whole[-4:], *(b for b, _ in shards[-4:]))


# -------------------------------------------------------------------------------------------- traced models

Rows = Callable[[int, int], list[int]]
"""Shard sizes of a number of rows over a number of ranks."""


def sharded(mesh: DeviceMesh, shape: Sequence[int], dim: int, sizes: list[int]) -> sc.ShardTensor:
    """Values of some kind, sharded along a dim."""
    local = [sizes[mesh.get_local_rank()] if d == dim else s for d, s in enumerate(shape)]
    return sc.ShardTensor.from_local(torch.randn(local), mesh, [Shard(dim)], {0: sizes})


def point_transformer(rows: Rows) -> Any:
    """A `build` of a transformer on points that are sharded unevenly."""

    def build(mesh: DeviceMesh) -> Any:
        net = PointTransformer(features=5, channels=256, heads=8, slices=64, layers=4)
        x = sharded(mesh, (16384 * mesh.size(), 5), 0, rows(16384 * mesh.size(), mesh.size()))
        return (lambda x: net(x).square().mean()), (x,)

    return build


def demo_step(rows: Rows) -> Any:
    """A `build` of the demo's training step, loss included."""

    def build(mesh: DeviceMesh) -> Any:
        net = PointTransformer()
        sizes = rows(1024 * mesh.size(), mesh.size())
        x, y = sharded(mesh, (sum(sizes), 5), 0, sizes), sharded(mesh, (sum(sizes),), 0, sizes)
        return (lambda x, y: relative_l2(net(x), y)), (x, y)

    return build


class _Convs(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


class UNet(nn.Module):
    """Two levels down and up, with halos along the rows, and upsampling that gathers them."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(_Convs(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_Convs(a + b, a) for a, b in [(widths[1], widths[2]), (widths[0], widths[1])])
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for convs in self.down:
            x = convs(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for convs in self.up:
            x = convs(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2, mode="nearest")], 1))
        return self.out(x)


def unet(rows: Rows) -> Any:
    """A `build` of a U-Net on images whose rows are sharded unevenly, in whole fours."""

    def build(mesh: DeviceMesh) -> Any:
        net = UNet()
        sizes = [4 * s for s in rows(64 * mesh.size(), mesh.size())]
        x = sharded(mesh, (1, 3, sum(sizes), 512), 2, sizes)
        return (lambda x: net(x).square().mean()), (x,)

    return build


def fsdp_module(rows: Rows, layers: int = 2, width: int = 2048) -> Any:
    """A `build` of perceptrons whose parameters are gathered, and whose gradients are reduced and scattered."""

    def build(mesh: DeviceMesh) -> Any:
        def parameter(size: int, *rest: int) -> sc.ShardTensor:
            sizes = rows(size, mesh.size())
            local = torch.randn(sizes[mesh.get_local_rank()], *rest, dtype=BF16)
            return sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes}).requires_grad_()

        parameters = [
            [parameter(width), parameter(4 * width, width), parameter(width, 4 * width)] for _ in range(layers)
        ]

        def loss(x: Tensor, parameters: Any) -> Tensor:
            for shards in parameters:
                norm, up, down = (
                    p.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for p in shards
                )
                x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (width,), norm), up)), down)
            return x.float().square().mean()

        return loss, (torch.randn(8192, width, dtype=BF16), parameters)

    return build


class _Keep:
    """A pass that keeps the graphs as they come to ours."""

    name = "keep"

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(self, graph: Graph) -> None:
        self.graphs.append(copied(graph))


def traced(world: OfflineWorld, build: Any) -> list[Graph]:
    """The forward and the backward graph of a model, as they come to our passes."""
    keep = _Keep()
    trace_step(world, build, pipeline=Pipeline([keep]))
    return keep.graphs


# ------------------------------------------------------------------------------------------------ graphs


def copied(graph: Graph) -> Graph:
    """A graph that passes may change without the other, in a module of its own."""
    new = Graph()
    values: dict[Node, Node] = {}
    output = new.graph_copy(graph, values)
    new.output(output)
    root = graph.owning_module or nn.Module()
    return GraphModule(root, new).graph
