"""Training graphs of a transformer of Llama-3-8B's shape, as foreign programs have them, written down.

Three ways to train it: its weights sharded evenly over all ranks and gathered in the graph (as SimpleFSDP does with
DTensors), the same over one mesh dim with tensor parallelism over the other, and weights in uneven shards. Tracing 32
layers of DTensors takes minutes; a graph is written in seconds. It has what a traced one has where it matters to the
passes: weights are kept in float32 and cast before they are gathered, each weight by itself; gradients are cast and
reduced one by one; norms and rotations are many small nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from tests.support import suite

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_cast = torch.ops.prims.convert_element_type.default

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Shape:
    """Of the model. Sizes are Llama-3-8B's.

    Attributes:
        layers: how many.
        tokens: that a rank, or a tensor-parallel group, computes with.
        width: channels.
        hidden: channels of the perceptron.
        heads: of queries.
        shared_heads: of keys and values.
        words: of the vocabulary; 0 leaves the embedding and the last product out.
    """

    layers: int = 32
    tokens: int = 8192
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    shared_heads: int = 8
    words: int = 128256


@dataclass(frozen=True)
class Groups:
    """Over which the model is sharded.

    Attributes:
        weights: name of the group that weights are sharded over.
        ranks: in it; 1 for weights that are whole.
        products: name of the group of tensor parallelism.
        parts: ranks in that; 1 for none.
    """

    weights: str
    ranks: int
    products: str = ""
    parts: int = 1


class Writer(suite.Writer):
    """Writes one graph.

    Args:
        place: of the rank.
        shape: of the model.
        groups: over which it is sharded.
        uneven: whether weights are sharded by `place.partitions`, and moved by our collectives.
    """

    def __init__(self, place: suite.Place, shape: Shape, groups: Groups, uneven: bool = False) -> None:
        super().__init__(place)
        self.shape, self.groups, self.uneven = shape, groups, uneven

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return self.call(_cast, x, dtype)

    def contiguous(self, x: Node) -> Node:
        node = self.graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        node.meta["val"] = x.meta["val"].clone(memory_format=torch.contiguous_format)
        return node

    # ------------------------------------------------------------------------------------- weights

    def weight(self, rows: int, *rest: int, whole: bool = False) -> tuple[Node, tuple[int, ...], list[int]]:
        """The shard of a weight, its shape before it was sharded into shards, and the sizes of these.

        Args:
            rows: of the weight.
            rest: its other sizes.
            whole: whether tensor parallelism leaves it whole.
        """
        shape = (rows, *rest) if whole else self._part(rows, *rest)
        sizes = self.partition(shape[0]) if self.uneven else [-(-shape[0] // self.groups.ranks)] * self.groups.ranks
        return self.input(sizes[self.place.rank], *shape[1:], dtype=FP32), shape, sizes

    def _part(self, rows: int, *rest: int) -> tuple[int, ...]:
        return (rows // self.groups.parts, *rest)

    def whole(self, weight: tuple[Node, tuple[int, ...], list[int]]) -> Node:
        """A weight, gathered in bfloat16."""
        shard, shape, sizes = weight
        shard = self.cast(shard, BF16)
        if self.groups.ranks == 1:
            return shard
        if self.uneven:
            return self.gathered(shard, sizes, shape)
        return self.done(_c10d.all_gather_into_tensor.default, shard, self.groups.ranks, self.groups.weights)

    def reduced(self, gradient: Node, weight: tuple[Node, tuple[int, ...], list[int]]) -> Node:
        """The shard of a gradient, reduced in float32."""
        gradient, sizes = self.cast(gradient, FP32), weight[2]
        if self.groups.ranks == 1:
            return gradient
        if self.uneven:
            return self.scattered(gradient, sizes)
        ranks, group = self.groups.ranks, self.groups.weights
        return self.done(_c10d.reduce_scatter_tensor.default, gradient, "avg", ranks, group)

    # ------------------------------------------------------------------------- tensor parallelism

    def spread(self, x: Node) -> Node:
        """All tokens of the tensor-parallel group, of whose tokens a rank has a part."""
        if self.groups.parts == 1:
            return x
        return self.done(_c10d.all_gather_into_tensor.default, x, self.groups.parts, self.groups.products)

    def summed(self, x: Node) -> Node:
        """The sum over the tensor-parallel group, of which a rank gets a part of the tokens."""
        if self.groups.parts == 1:
            return x
        return self.done(_c10d.reduce_scatter_tensor.default, x, "sum", self.groups.parts, self.groups.products)

    def agreed(self, gradient: Node) -> Node:
        """The gradient of a norm's weight, of which every tensor-parallel rank has a term."""
        if self.groups.parts == 1:
            return gradient
        return self.done(_c10d.all_reduce.default, gradient, "sum", self.groups.products)

    # -------------------------------------------------------------------------------------- layers

    def norm(self, x: Node, weight: Node) -> tuple[Node, Node]:
        """Root mean square norm in float32; the result and what its gradient needs."""
        wide = self.cast(x, FP32)
        mean = self.call(aten.mean.dim, self.call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 1e-5))
        normed = self.cast(self.call(aten.mul.Tensor, wide, scale), BF16)
        return self.call(aten.mul.Tensor, normed, weight), scale

    def norm_gradient(self, grad: Node, x: Node, scale: Node, weight: Node) -> tuple[Node, Node]:
        wide, grad32 = self.cast(x, FP32), self.cast(grad, FP32)
        normed = self.call(aten.mul.Tensor, wide, scale)
        scaled = self.call(aten.mul.Tensor, grad32, self.cast(weight, FP32))
        inner = self.call(aten.mean.dim, self.call(aten.mul.Tensor, scaled, normed), [-1], True)
        inside = self.call(aten.sub.Tensor, scaled, self.call(aten.mul.Tensor, normed, inner))
        result = self.cast(self.call(aten.mul.Tensor, inside, scale), BF16)
        return result, self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, grad32, normed), [0])

    def heads(self, x: Node, count: int) -> Node:
        tokens = x.meta["val"].shape[0]
        return self.call(aten.view.default, x, [1, tokens, count, self.shape.width // self.shape.heads])

    def rotated(self, x: Node, angles: tuple[Node, Node]) -> Node:
        """The rotation of pairs of channels, or back."""
        cos, sin = angles
        wide = self.cast(x, FP32)
        half = wide.meta["val"].shape[-1] // 2
        first = self.call(aten.slice.Tensor, wide, 3, 0, half)
        second = self.call(aten.slice.Tensor, wide, 3, half, 2 * half)
        turned = self.call(aten.cat.default, [self.call(aten.neg.default, second), first], 3)
        both = self.call(
            aten.add.Tensor, self.call(aten.mul.Tensor, wide, cos), self.call(aten.mul.Tensor, turned, sin)
        )
        return self.cast(both, BF16)

    def attention(self, qkv: Sequence[Node], angles: tuple[Node, Node]) -> list[Node]:
        """The result, rows of tokens, and the tensors that its gradient needs."""
        parts = self.groups.parts
        counts = [self.shape.heads // parts, self.shape.shared_heads // parts]
        q, k, v = (self.heads(x, n) for x, n in zip(qkv, (counts[0], counts[1], counts[1]), strict=True))
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        k, v = (self._repeated(x, counts[0] // counts[1]) for x in (k, v))
        q, k, v = (self.call(aten.permute.default, x, [0, 2, 1, 3]) for x in (q, k, v))
        results = self.call(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, True)
        out, *rest = (self.call(operator.getitem, results, i) for i in (0, 1, 6, 7))
        rows = self.call(aten.view.default, self.call(aten.permute.default, out, [0, 2, 1, 3]), [self._tokens, -1])
        return [rows, q, k, v, out, *rest]

    def _repeated(self, x: Node, times: int) -> Node:
        shape = list(x.meta["val"].shape)
        wide = self.call(aten.expand.default, self.call(aten.unsqueeze.default, x, 3), [*shape[:3], times, shape[3]])
        return self.call(aten.view.default, self.contiguous(wide), [*shape[:2], shape[2] * times, shape[3]])

    @property
    def _tokens(self) -> int:
        return self.shape.tokens

    def attention_gradient(self, grad: Node, saved: Sequence[Node], angles: tuple[Node, Node]) -> list[Node]:
        """The gradients of queries, keys and values, rows of tokens."""
        q, k, v, out, lse, seed, offset = saved
        shape = self.shape
        heads, shared = shape.heads // self.groups.parts, shape.shared_heads // self.groups.parts
        grad = self.call(aten.permute.default, self.heads(grad, heads), [0, 2, 1, 3])
        tokens = self._tokens
        args = (grad, q, k, v, out, lse, None, None, tokens, tokens, 0.0, True, seed, offset)
        results = self.call(aten._scaled_dot_product_flash_attention_backward.default, *args)
        found = []
        for i in range(3):
            x = self.call(aten.permute.default, self.call(operator.getitem, results, i), [0, 2, 1, 3])
            if i:
                grouped = self.call(aten.view.default, x, [1, tokens, shared, heads // shared, -1])
                x = self.call(aten.sum.dim_IntList, grouped, [3])
            x = self.rotated(x, angles) if i < 2 else x
            found.append(self.call(aten.view.default, self.contiguous(x), [tokens, -1]))
        return found

    def angles(self) -> tuple[Node, Node]:
        per_head = self.shape.width // self.shape.heads
        return tuple(self.input(1, self._tokens, 1, per_head, dtype=FP32) for _ in range(2))  # type: ignore[return-value]


def _weights(w: Writer) -> dict[str, Any]:
    s = w.shape
    per_head = s.width // s.heads
    kept = s.shared_heads * per_head
    parts = w.groups.parts
    return {
        "norm": w.weight(s.width, whole=True),
        "q": w.weight(s.width, s.width),
        "k": w.weight(kept, s.width),
        "v": w.weight(kept, s.width),
        "o": w.weight(s.width, s.width // parts, whole=True),
        "norm2": w.weight(s.width, whole=True),
        "gate": w.weight(s.hidden, s.width),
        "up": w.weight(s.hidden, s.width),
        "down": w.weight(s.width, s.hidden // parts, whole=True),
    }


def _ends(w: Writer) -> dict[str, Any]:
    s = w.shape
    return {"norm": w.weight(s.width, whole=True), "words": w.weight(s.words, s.width)} if s.words else {}


def forward(place: suite.Place, shape: Shape, groups: Groups, uneven: bool = False) -> Graph:
    """The forward pass: the tokens' channels to a loss, or to channels again."""
    w = Writer(place, shape, groups, uneven)
    rows = shape.tokens // groups.parts
    x, angles = w.input(rows, shape.width), w.angles()
    layers, ends = [_weights(w) for _ in range(shape.layers)], _ends(w)
    saved: list[Node] = []
    for p in layers:
        norm, q, k, v, o = (w.whole(p[name]) for name in ("norm", "q", "k", "v", "o"))
        h, scale = w.norm(x, norm)
        wide = w.spread(h)
        attended = w.attention([w.mm(wide, w.t(m)) for m in (q, k, v)], angles)
        y = w.call(aten.add.Tensor, x, w.summed(w.mm(attended[0], w.t(o))))
        norm2, gate, up, down = (w.whole(p[name]) for name in ("norm2", "gate", "up", "down"))
        h2, scale2 = w.norm(y, norm2)
        wide2 = w.spread(h2)
        g, u = w.mm(wide2, w.t(gate)), w.mm(wide2, w.t(up))
        g32 = w.cast(g, FP32)
        silu = w.cast(w.call(aten.mul.Tensor, g32, w.call(aten.sigmoid.default, g32)), BF16)
        z = w.summed(w.mm(w.call(aten.mul.Tensor, silu, u), w.t(down)))
        saved += [x, h, scale, *attended, y, h2, scale2, g, u]
        x = w.call(aten.add.Tensor, y, z)
    if not ends:
        return w.output(x, *saved)
    h, scale = w.norm(x, w.whole(ends["norm"]))
    scores = w.mm(w.spread(h), w.t(w.whole(ends["words"])))
    loss = w.call(aten.logsumexp.default, w.cast(scores, FP32), [-1])
    return w.output(loss, scores, scale, h, x, *saved)


def backward(place: suite.Place, shape: Shape, groups: Groups, uneven: bool = False) -> Graph:
    """The backward pass: weights are gathered again, gradients reduced and scattered."""
    w = Writer(place, shape, groups, uneven)
    rows, parts = shape.tokens // groups.parts, groups.parts
    angles = w.angles()
    layers, ends = [_weights(w) for _ in range(shape.layers)], _ends(w)
    saved = [_saved(w) for _ in range(shape.layers)]
    results: list[Node] = []
    if ends:
        x, h = w.input(rows, shape.width), w.input(rows, shape.width)
        scale = w.input(rows, 1, dtype=FP32)
        scores = w.input(shape.tokens, shape.words // parts)
        p = w.call(aten.exp.default, w.cast(scores, FP32))
        d_scores = w.cast(p, BF16)
        d_words = w.mm(w.t(d_scores), w.spread(h))
        d_h = w.summed(w.mm(d_scores, w.whole(ends["words"])))
        results.append(w.reduced(d_words, ends["words"]))
        grad, d_norm = w.norm_gradient(d_h, x, scale, w.whole(ends["norm"]))
        results.append(w.reduced(w.agreed(d_norm), ends["norm"]))
    else:
        grad = w.input(rows, shape.width)
    for p, s in zip(layers[::-1], saved[::-1], strict=True):
        grad = _layer_gradient(w, p, s, grad, angles, results)
    return w.output(grad, *results)


def _layer_gradient(
    w: Writer, p: dict[str, Any], s: dict[str, Any], grad: Node, angles: tuple[Node, Node], results: list[Node]
) -> Node:
    d_z = w.spread(grad)
    wide2 = w.spread(s["h2"])
    g32 = w.cast(s["g"], FP32)
    sigmoid = w.call(aten.sigmoid.default, g32)
    silu = w.cast(w.call(aten.mul.Tensor, g32, sigmoid), BF16)
    inner = w.call(aten.mul.Tensor, silu, s["u"])
    d_down = w.mm(w.t(d_z), inner)
    d_inner = w.mm(d_z, w.whole(p["down"]))
    d_u = w.call(aten.mul.Tensor, d_inner, silu)
    slope = w.call(aten.mul.Tensor, sigmoid, w.call(aten.add.Tensor, g32, 1.0))
    d_g = w.cast(w.call(aten.mul.Tensor, w.cast(w.call(aten.mul.Tensor, d_inner, s["u"]), FP32), slope), BF16)
    d_up, d_gate = w.mm(w.t(d_u), wide2), w.mm(w.t(d_g), wide2)
    back = w.call(aten.add.Tensor, w.mm(d_u, w.whole(p["up"])), w.mm(d_g, w.whole(p["gate"])))
    d_y, d_norm2 = w.norm_gradient(w.summed(back), s["y"], s["scale2"], w.whole(p["norm2"]))
    grad = w.call(aten.add.Tensor, grad, d_y)
    d_out = w.spread(grad)
    d_o = w.mm(w.t(d_out), s["rows"])
    d_qkv = w.attention_gradient(w.mm(d_out, w.whole(p["o"])), s["attended"], angles)
    wide = w.spread(s["h"])
    d_weights = [w.mm(w.t(d), wide) for d in d_qkv]
    terms = [w.mm(d, w.whole(p[name])) for d, name in zip(d_qkv, "qkv", strict=True)]
    total = w.call(aten.add.Tensor, w.call(aten.add.Tensor, terms[0], terms[1]), terms[2])
    d_x, d_norm = w.norm_gradient(w.summed(total), s["x"], s["scale"], w.whole(p["norm"]))
    named = {"down": d_down, "up": d_up, "gate": d_gate, "o": d_o, **dict(zip("qkv", d_weights, strict=True))}
    results += [w.reduced(d, p[name]) for name, d in named.items()]
    results += [w.reduced(w.agreed(d), p[name]) for name, d in (("norm2", d_norm2), ("norm", d_norm))]
    return w.call(aten.add.Tensor, grad, d_x)


def _saved(w: Writer) -> dict[str, Any]:
    shape, parts = w.shape, w.groups.parts
    rows, tokens, per_head = shape.tokens // parts, shape.tokens, shape.width // shape.heads
    heads, hidden = shape.heads // parts, shape.hidden // parts
    found: dict[str, Any] = {name: w.input(rows, shape.width) for name in ("x", "h", "y", "h2")}
    found |= {name: w.input(rows, 1, dtype=FP32) for name in ("scale", "scale2")}
    found |= {name: w.input(tokens, hidden) for name in ("g", "u")}
    found["rows"] = w.input(tokens, shape.width // parts)
    shards = [w.input(1, heads, tokens, per_head) for _ in range(4)]
    rest = [w.input(1, heads, tokens, dtype=FP32), w.input(2, dtype=torch.uint64), w.input(dtype=torch.uint64)]
    found["attended"] = [*shards, *rest]
    return found
