"""Models as people train them on many GPUs, to be traced: `build` functions for `shardcompile.inspect.offline`.

Widths and sequences are those of real models, layers a few, because a trace takes time by the layer. Weights are kept
in float32 and gathered in bfloat16, and gradients are reduced in float32.

Even shards are DTensors: as SimpleFSDP does, each weight is cast and gathered by itself in the graph. With tensor
parallelism what is gathered over the nodes is the shard of a DTensor over the ranks of a node. Uneven shards are ours,
and their sizes are part of the program.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

import shardcompile as sc
from examples.poisson.model import PointTransformer
from shardcompile import compat
from shardcompile.inspect.offline import offline_world, trace
from shardcompile.passes import Pipeline
from shardcompile.passes.graph.collective import Collective
from tests.support import suite
from tests.support.suite import partition, sharded

BF16, FP32 = torch.bfloat16, torch.float32
PARTS = 8
"""Ranks of a node."""

Build = Callable[[DeviceMesh], Any]


# --------------------------------------------------------------------------------------------- weights


@dataclass
class Weights:
    """Makes the weights of a model.

    Attributes:
        mesh: over which they are sharded, of one dim.
        imbalance: how, see `suite.partition`; None for DTensors in even shards.
        dim: that is sharded, for DTensors.
        made: how many there are.
    """

    mesh: DeviceMesh
    imbalance: str | None = None
    dim: int = 0
    made: int = 0

    def __call__(self, *shape: int) -> Tensor:
        """One more weight, sharded."""
        self.made += 1
        if self.imbalance is None:
            return self._even(shape)
        sizes = partition(shape[0], self.mesh.size(), self.imbalance, self.made)
        local = torch.randn(sizes[self.mesh.get_local_rank()], *shape[1:])
        return nn.Parameter(sc.ShardTensor.from_local(local, self.mesh, [Shard(0)], {0: sizes}))

    def _even(self, shape: Sequence[int]) -> Tensor:
        rows, n = shape[self.dim], self.mesh.size()
        each = -(-rows // n)
        first = min(each * self.mesh.get_local_rank(), rows)
        local = torch.randn([min(each, rows - first) if d == self.dim else s for d, s in enumerate(shape)])
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        whole = DTensor.from_local(local, self.mesh, [Shard(self.dim)], shape=torch.Size(shape), stride=stride)
        return nn.Parameter(whole)


class Model(nn.Module):
    """A program and its weights, as parameters: their sizes are numbers in a trace.

    Args:
        program: called with the weights of all layers and the inputs.
        layers: weights of each.
    """

    def __init__(self, program: Callable[..., Any], layers: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(nn.ParameterList(weights) for weights in layers)

    def forward(self, *inputs: Any) -> Any:
        return self.program(self.layers, *inputs)


def whole(weight: Any) -> Tensor:
    """A weight, gathered in bfloat16; its gradient is summed and sharded in float32."""
    if isinstance(weight, DTensor):
        gathered = weight.redistribute(placements=[Replicate()], forward_dtype=BF16, backward_dtype=FP32)
        return gathered.to_local(grad_placements=[Partial("avg")])
    gathered = weight.redistribute(placements=[Replicate()], forward_dtype=BF16, backward_dtype=FP32)
    return gathered.to_local(grad_placements=[Partial()])


# ------------------------------------------------------------------------------------------------ Llama


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder, those of Llama-3-8B."""

    layers: int = 3
    tokens: int = 8192
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    shared_heads: int = 8


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _attended(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, int], angles: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention. [B, T, C] each -> [B, T, C]."""
    q = _rotated(q.unflatten(-1, (heads[0], -1)), angles)
    k = _rotated(k.unflatten(-1, (heads[1], -1)), angles)
    v = v.unflatten(-1, (heads[1], -1))
    k, v = (x.repeat_interleave(heads[0] // heads[1], 2) for x in (k, v))
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def llama(imbalance: str | None = None, size: Transformer = Transformer()) -> Build:
    """A decoder whose weights are sharded over all ranks."""

    def build(mesh: DeviceMesh) -> Any:
        make, kept = Weights(mesh, imbalance), size.width * size.shared_heads // size.heads
        c, h = size.width, size.hidden
        shapes = [(c,), (c, c), (kept, c), (kept, c), (c, c), (c,), (h, c), (h, c), (c, h)]
        weights = [[make(*shape) for shape in shapes] for _ in range(size.layers)]
        per_head = c // size.heads
        angles = tuple(torch.randn(1, size.tokens, 1, per_head) for _ in range(2))

        def loss(weights: Any, x: Tensor, angles: Any) -> Tensor:
            for layer in weights:
                norm, q, k, v, o, norm2, gate, up, down = layer
                h = _rms(x, whole(norm))
                qkv = (F.linear(h, whole(m)) for m in (q, k, v))
                x = x + F.linear(_attended(*qkv, (size.heads, size.shared_heads), angles), whole(o))
                h = _rms(x, whole(norm2))
                x = x + F.linear(F.silu(F.linear(h, whole(gate))) * F.linear(h, whole(up)), whole(down))
            return x.float().square().mean()

        x = torch.randn(1, size.tokens, c, dtype=BF16, requires_grad=True)
        return Model(loss, weights), (x, angles)

    return build


def llama_2d(size: Transformer = Transformer(tokens=16384)) -> Build:
    """The same with tensor parallelism in a node, and sharded sequences between: weights are sharded over the nodes."""

    def build(mesh: DeviceMesh) -> Any:
        nodes, parts = mesh["nodes"], mesh["parts"]
        n = parts.size()
        make, kept = Weights(nodes), size.width * size.shared_heads // size.heads
        c, h = size.width, size.hidden
        shapes = [(c,), (c // n, c), (kept // n, c), (kept // n, c), (c, c // n)]
        shapes += [(c,), (h // n, c), (h // n, c), (c, h // n)]
        weights = [[make(*shape) for shape in shapes] for _ in range(size.layers)]
        per_head = c // size.heads
        angles = tuple(torch.randn(1, size.tokens, 1, per_head) for _ in range(2))
        x = DTensor.from_local(torch.randn(1, size.tokens // n, c, dtype=BF16), parts, [Shard(1)])

        def rows(weight: Tensor) -> Tensor:
            return DTensor.from_local(whole(weight), parts, [Shard(0)], run_check=False)

        def columns(weight: Tensor) -> Tensor:
            return DTensor.from_local(whole(weight), parts, [Shard(1)], run_check=False)

        def same(weight: Tensor) -> Tensor:
            return DTensor.from_local(whole(weight), parts, [Replicate()], run_check=False)

        def attended(h: Any, layer: Any, angles: Any) -> Tensor:
            q, k, v = (F.linear(h, rows(m)).to_local() for m in layer)
            heads = (size.heads // n, size.shared_heads // n)
            return DTensor.from_local(_attended(q, k, v, heads, angles), parts, [Shard(2)], run_check=False)

        def loss(weights: Any, x: Any, angles: Any) -> Tensor:
            for norm, q, k, v, o, norm2, gate, up, down in weights:
                h = _rms(x, same(norm)).redistribute(placements=[Replicate()])
                out = F.linear(attended(h, (q, k, v), angles), columns(o))
                x = x + out.redistribute(placements=[Shard(1)])
                h = _rms(x, same(norm2)).redistribute(placements=[Replicate()])
                inner = F.silu(F.linear(h, rows(gate))) * F.linear(h, rows(up))
                x = x + F.linear(inner, columns(down)).redistribute(placements=[Shard(1)])
            return x.to_local().float().square().mean()

        return Model(loss, weights), (x.detach().requires_grad_(), angles)

    return build


# ---------------------------------------------------------------------------------------------- experts


def experts_2d(layers: int = 3, tokens: int = 8192, width: int = 4096, hidden: int = 14336) -> Build:
    """Mixtral-like: dense weights are sharded over all ranks, each rank of a node has an expert, sharded over the nodes.

    Tokens are sent to their experts within the node, all experts being given as many.
    """

    def build(mesh: DeviceMesh) -> Any:
        nodes, parts = mesh["nodes"], mesh["parts"]
        n, group = parts.size(), parts.get_group()
        dense, own = Weights(mesh["all"]), Weights(nodes)
        c, h = width, hidden
        weights = [
            [dense(c), dense(3 * c // 2, c), dense(c, c), dense(c), dense(n, c), own(h, c), own(h, c), own(c, h)]
            for _ in range(layers)
        ]
        angles = tuple(torch.randn(1, tokens, 1, c // 32) for _ in range(2))

        def sent(x: Tensor) -> Tensor:
            split = [x.shape[0] // n] * n
            return funcol.all_to_all_single_autograd(x, split, split, group)

        def loss(weights: Any, x: Tensor, angles: Any) -> Tensor:
            for norm, qkv, o, norm2, router, gate, up, down in weights:
                h = _rms(x, whole(norm))
                q, k, v = F.linear(h, whole(qkv)).split([c, c // 4, c // 4], -1)
                x = x + F.linear(_attended(q, k, v, (32, 8), angles), whole(o))
                h = _rms(x, whole(norm2)).flatten(0, 1)
                shares, chosen = F.linear(h, whole(router)).float().softmax(-1).topk(2)
                places = chosen.flatten().argsort()
                rows = sent(h.repeat_interleave(2, 0)[places])
                rows = F.linear(F.silu(F.linear(rows, whole(gate))) * F.linear(rows, whole(up)), whole(down))
                back = torch.zeros_like(rows).index_add(0, places, sent(rows)) * shares.flatten().to(BF16)[:, None]
                x = x + back.unflatten(0, (-1, 2)).sum(1)[None]
            return x.float().square().mean()

        x = torch.randn(1, tokens, c, dtype=BF16, requires_grad=True)
        for t in (x, *angles):  # or the exchange's splits were numbers, which other ranks may not have
            torch._dynamo.mark_dynamic(t, 1)
        return Model(loss, weights), (x, angles)

    return build


def experts_uneven(layers: int = 3, tokens: int = 64, width: int = 2048, hidden: int = 4096) -> Build:
    """Experts are sharded unevenly over the ranks, two each on average, and their weights stay where they are.

    A rank has tokens for each expert; they are exchanged for those of its own experts, and back.
    """

    def build(mesh: DeviceMesh) -> Any:
        ranks = mesh.size()
        experts = partition(2 * ranks, ranks, "log-normal", 1)
        shapes = ((2 * ranks, width, hidden), (2 * ranks, hidden, width))
        weights = [
            [nn.Parameter(sharded(mesh, shape, 0, experts).to(BF16)) for shape in shapes]
            + [nn.Parameter(torch.randn(width, width, dtype=BF16))]
            for _ in range(layers)
        ]
        x = sharded(mesh, (2 * ranks, tokens * ranks, width), 1, [tokens] * ranks).to(BF16)
        x = x.redistribute(placements=[Shard(1)]).detach().requires_grad_()

        def loss(weights: Any, x: Any) -> Any:
            for up, down, shared in weights:
                h = torch.bmm(F.gelu(torch.bmm(x, up)), down)
                x = x + h.redistribute(placements=[Shard(1)]) + F.gelu(x @ shared)
            return x.float().square().mean()

        return Model(loss, weights), (x,)

    return build


# -------------------------------------------------------------------------------------------- diffusion


def diffusion_transformer(
    imbalance: str | None, layers: int = 4, batch: int = 64, width: int = 1152, tokens: int = 256
) -> Build:
    """DiT-XL/2: each layer is modulated by what step and class say. Weights are sharded over all ranks."""

    def build(mesh: DeviceMesh) -> Any:
        make, c = Weights(mesh, imbalance), width
        shapes = [(6 * c, c), (6 * c,), (3 * c, c), (3 * c,), (c, c), (c,), (4 * c, c), (4 * c,), (c, 4 * c), (c,)]
        weights = [[make(*shape) for shape in shapes] for _ in range(layers)]

        def loss(weights: Any, x: Tensor, step: Tensor) -> Tensor:
            for shards in weights:
                ada, ada_b, qkv, qkv_b, out, out_b, up, up_b, down, down_b = shards
                six = F.linear(F.silu(step), whole(ada), whole(ada_b))[:, None].chunk(6, -1)
                h = F.layer_norm(x, (c,)) * (1 + six[0]) + six[1]
                parts = F.linear(h, whole(qkv), whole(qkv_b)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
                a = F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2)
                x = x + six[2] * F.linear(a, whole(out), whole(out_b))
                h = F.layer_norm(x, (c,)) * (1 + six[3]) + six[4]
                h = F.gelu(F.linear(h, whole(up), whole(up_b)), approximate="tanh")
                x = x + six[5] * F.linear(h, whole(down), whole(down_b))
            return x.float().square().mean()

        x = torch.randn(batch, tokens, c, dtype=BF16, requires_grad=True)
        return Model(loss, weights), (x, torch.randn(batch, c, dtype=BF16))

    return build


def diffusion_unet(imbalance: str | None, batch: int = 16, channels: int = 320) -> Build:
    """Of Stable Diffusion's widths: residual shards modulated by the step, three levels, attention at the lowest."""

    def build(mesh: DeviceMesh) -> Any:
        make, c = Weights(mesh, imbalance), channels
        widths = [c, 2 * c, 4 * c]
        pairs = list(zip([c, *widths], widths, strict=False))
        down = [_residual(make, i, o) for i, o in pairs]
        up = [_residual(make, o + s, i) for (i, o), s in zip(pairs[::-1], widths[::-1], strict=True)]
        middle = [make(3 * 4 * c, 4 * c), make(4 * c, 4 * c)]

        def loss(weights: Any, x: Tensor, step: Tensor) -> Tensor:
            down, middle, up = weights[:3], weights[3], weights[4:]
            skips: list[Tensor] = []
            for i, shard in enumerate(down):
                x = _residual_block(F.avg_pool2d(x, 2) if i else x, step, shard)
                skips.append(x)
            rows = x.flatten(2).transpose(1, 2)
            parts = F.linear(rows, whole(middle[0])).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2)
            x = x + F.linear(a, whole(middle[1])).transpose(1, 2).unflatten(2, x.shape[2:])
            for i, shard in enumerate(up):
                x = F.interpolate(x, scale_factor=2.0, mode="nearest") if i else x
                x = _residual_block(torch.cat([x, skips.pop()], 1), step, shard)
            return x.float().square().mean()

        x = torch.randn(batch, c, 64, 64, dtype=BF16, requires_grad=True)
        return Model(loss, [*down, middle, *up]), (x, torch.randn(batch, 4 * c, dtype=BF16))

    return build


def _residual(make: Weights, inputs: int, outputs: int) -> list[Tensor]:
    step = 1280
    shapes = [(inputs,), (outputs, inputs, 3, 3), (outputs, step), (outputs,), (outputs, outputs, 3, 3)]
    return [make(*shape) for shape in [*shapes, (outputs, inputs, 1, 1)]]


def _residual_block(x: Tensor, step: Tensor, weights: Any) -> Tensor:
    norm, conv, modulation, norm2, conv2, short = weights
    h = F.conv2d(F.silu(F.group_norm(x, 32, whole(norm))), whole(conv), padding=1)
    h = h + F.linear(F.silu(step), whole(modulation))[..., None, None]
    h = F.conv2d(F.silu(F.group_norm(h, 32, whole(norm2))), whole(conv2), padding=1)
    return h + F.conv2d(x, whole(short))


# ---------------------------------------------------------------------------------------------- meshes


def transolver(points: int = 32768, layers: int = 4) -> Build:
    """A transformer on points that are sharded unevenly; weights are replicated, and their gradients reduced."""

    def build(mesh: DeviceMesh) -> Any:
        net = PointTransformer(features=6, channels=256, heads=8, slices=64, layers=layers)
        sizes = partition(points * mesh.size(), mesh.size(), "log-normal", 3)
        x = sharded(mesh, (sum(sizes), 6), 0, sizes)
        return (lambda x: net(x).square().mean()), (x,)

    return build


def message_passing(nodes: int = 512, layers: int = 4, width: int = 128) -> Build:
    """MeshGraphNet-like: edges read both ends and are added up at one; nodes and edges are sharded unevenly."""

    def build(mesh: DeviceMesh) -> Any:
        n = mesh.size()
        rows, links = partition(nodes * n, n, "log-normal", 4), partition(6 * nodes * n, n, "log-normal", 5)
        x, e = sharded(mesh, (sum(rows), width), 0, rows), sharded(mesh, (sum(links), width), 0, links)
        numbers = torch.zeros(links[mesh.get_local_rank()], dtype=torch.long)
        ends = [sc.ShardTensor.from_local(numbers.clone(), mesh, [Shard(0)], {0: links}) for _ in range(2)]
        shapes = [(3 * width, width), (width, width), (2 * width, width), (width, width)]
        weights = [[nn.Parameter(torch.randn(*s)) for s in shapes] for _ in range(layers)]

        def loss(weights: Any, x: Any, e: Any, ends: Any) -> Any:
            source, target = ends
            for w1, w2, w3, w4 in weights:
                wide = torch.cat([e, x[source], x[target]], 1)
                e = e + F.silu(wide @ w1) @ w2
                near = torch.zeros_like(x).index_add(0, target, e)
                x = x + F.silu(torch.cat([x, near], 1) @ w3) @ w4
            return x.square().mean()

        return Model(loss, weights), (x, e, ends)

    return build


# ----------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True)
class Traced:
    """What is traced.

    Attributes:
        build: of it, see `shardcompile.inspect.offline`.
        dims: of its mesh: 1, or 2 named "nodes" and "parts".
        again: whether the backward pass gathers weights again, as is done where they do not fit all at once.
        data_size: what each size amounts to that only a run tells, see `with_data_sizes`.
    """

    build: Build
    dims: int = 1
    again: bool = False
    data_size: int | None = None


def models(layers: int | None = None) -> dict[str, Traced]:
    """By name.

    Args:
        layers: of each; None for as many as trace within a minute, or as the model has.
    """

    def of(most: int) -> int:
        return most if layers is None else min(layers, most)

    llama_3 = Transformer(of(32))
    return {
        "Llama, 1-D": Traced(llama(None, llama_3), again=True),
        "Llama, 2-D": Traced(llama_2d(Transformer(of(32), tokens=16384)), 2, again=True),
        "Llama, uneven": Traced(llama("mild", Transformer(of(16))), again=True),
        "Llama, very uneven": Traced(llama("log-normal", Transformer(of(16))), again=True),
        "experts, 2-D": Traced(experts_2d(of(16)), 2, again=True),
        "experts, uneven": Traced(experts_uneven(of(8))),
        "DiT, 1-D": Traced(diffusion_transformer(None, of(28)), again=True),
        "DiT, uneven": Traced(diffusion_transformer("mild", of(28)), again=True),
        "U-Net, 1-D": Traced(diffusion_unet(None), again=True),
        "U-Net, uneven": Traced(diffusion_unet("mild"), again=True),
        "Transolver": Traced(transolver(layers=of(8))),
        "message passing": Traced(message_passing(layers=of(8))),
    }


@contextmanager
def traced(model: Traced, ranks: int, rank: int = 0) -> Iterator[list[Graph]]:
    """The forward and the backward graph as they come to our passes, in the world that they are for."""
    names = ("nodes", "parts") if model.dims == 2 else None
    shape = (ranks // PARTS, PARTS) if names else None
    with offline_world(ranks, mesh_shape=shape, mesh_dim_names=names, rank=rank) as world:
        if names:
            world.mesh._flatten("all")
        early = trace.before_division

        def joint_passes(pipeline: Pipeline, foreign: bool = False) -> Callable[[Graph], None]:
            def run(graph: Graph) -> None:
                early(pipeline, foreign)(graph)
                gather_again(graph)

            return run

        reads_values = torch._dynamo.config.patch(capture_scalar_outputs=True)
        joint = mock.patch.object(trace, "before_division", joint_passes if model.again else early)
        with reads_values, joint:
            graphs = suite.traced(world, model.build)
        yield graphs


@contextmanager
def with_data_sizes(graph: Graph, data_size: int | None) -> Iterator[None]:
    """Inside the context, each data-dependent size of a graph that has no hint has this one.

    A trace does not tell such sizes. Times are computed with those of a typical run.
    """
    values = [node.meta.get("val") for node in graph.nodes]
    sizes = [v for v in values if compat.has_no_hint(v)]
    with contextlib.ExitStack() as stack:
        for size in sizes if data_size is not None else ():
            stack.enter_context(mock.patch.dict(size.node.shape_env.var_to_hint_override))
            compat.suggest_hint(size, data_size)
        yield


def gather_again(joint: Graph) -> None:
    """Have the backward pass gather weights again: all that is made of one input alone, and gathered on the way."""
    source: dict[Node, set[Node]] = {}  # the inputs that a node is made of, where it is at most one, but for sizes
    gathered: set[Node] = set()
    for node in joint.nodes:
        if node.op == "placeholder":
            source[node] = {node} if isinstance(node.meta["val"], Tensor) else set()
        elif node.op == "call_function" and source.keys() >= set(node.all_input_nodes):
            made_of = set().union(*(source[x] for x in node.all_input_nodes))
            c = Collective.of(node)
            if len(made_of) == 1 and (c is None or c.kind.startswith("all_gather")):
                source[node] = made_of
                if c is not None or not gathered.isdisjoint(node.all_input_nodes):
                    gathered.add(node)
    for node in gathered:
        node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 0
