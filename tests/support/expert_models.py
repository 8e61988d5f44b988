"""Published mixtures of experts as torchtitan trains them with SimpleFSDP, to be traced like `scale_models`.

Dense weights are sharded over all ranks. The experts are sharded over the ranks of a node, and the weights of each over
the nodes. A layer sends the counts of its tokens to the ranks of their experts, reads from them how many tokens come,
and sends the tokens there and back: sizes that only a run tells, which are unbacked symbols in the graph.

Shapes and parts are those of torchtitan's `deepseek_v3` and of the models' configurations on the Hugging Face Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from tests.support.scale_models import BF16, PARTS, Build, Model, Traced, Weights, _attended, _rms, _rotated, whole


@dataclass(frozen=True)
class Mixture:
    """The sizes of a decoder with experts.

    Attributes:
        layers: number of layers.
        width: channels.
        heads: heads of queries.
        shared_heads: heads of keys and values.
        head: channels of a head.
        words: words of the vocabulary.
        experts: routed experts of a layer.
        chosen: routed experts of a token.
        inner: hidden channels of an expert.
        shared: hidden channels of the shared experts together; 0 without any.
        hidden: hidden channels of a dense perceptron.
        dense: whether a layer has a dense perceptron instead of experts.
        latent: channels that keys and values are compressed to, as multi-head latent attention does; 0 for plain
            attention.
        norms: whether queries and keys are normalised.
        gated: whether the perceptrons multiply with a gate.
        batch: sequences of a rank.
        tokens: tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    shared_heads: int
    head: int
    words: int
    experts: int
    chosen: int
    inner: int
    shared: int = 0
    hidden: int = 0
    dense: Callable[[int], bool] = lambda layer: False
    latent: int = 0
    norms: bool = False
    gated: bool = True
    batch: int = 2
    tokens: int = 4096


ROTATED = 64
"""Channels of a head that latent attention rotates, in addition to `Mixture.head`."""

DEEPSEEK_V3 = Mixture(
    *(27, 2048, 16, 16, 128, 102400, 64, 6, 1408), 2 * 1408, 10944, dense=lambda layer: layer == 0, latent=512
)
MIXTRAL = Mixture(32, 4096, 32, 8, 128, 32000, 8, 2, 14336)
OLMOE = Mixture(16, 2048, 16, 16, 128, 50304, 64, 8, 1024, norms=True)

QWEN3 = Mixture(48, 2048, 32, 4, 128, 151936, 128, 8, 768, norms=True)
DBRX = Mixture(40, 6144, 48, 8, 128, 100352, 16, 4, 10752)
SWITCH = Mixture(
    24, 1024, 16, 16, 64, 32128, 128, 1, 4096, hidden=4096, dense=lambda layer: layer % 2 == 0, gated=False
)


def models(layers: int | None = None, held_out: bool = False) -> dict[str, Traced]:
    """Returns the models by name.

    Args:
        layers: of each, at most as many as the model has; None for 4.
        held_out: whether to return those that no pass may be tuned on, in place of the others.
    """

    def traced(size: Mixture, exchange: Exchange) -> Traced:
        kept = replace(size, layers=min(layers or 4, size.layers))
        balanced = size.batch * size.tokens * size.chosen // PARTS  # all experts are chosen equally often
        return Traced(mixture(kept, exchange), 2, again=True, data_size=balanced)

    if held_out:
        sizes = {"Qwen3": QWEN3, "DBRX": DBRX, "Switch": SWITCH}
        return {f"{name}, experts over 8": traced(size, by_counts) for name, size in sizes.items()}
    sizes = {"DeepSeek-V3": DEEPSEEK_V3, "Mixtral": MIXTRAL, "OLMoE": OLMOE}
    exchanges = {"experts over 8": by_counts, "equal counts": by_equal_counts, "routed rows": by_routed_rows}
    return {f"{name}, {kind}": traced(size, e) for kind, e in exchanges.items() for name, size in sizes.items()}


# --------------------------------------------------------------------------------------------- weights


def mixture(size: Mixture, exchange: Exchange) -> Build:
    """Returns a `build` of the loss of a decoder on words."""

    def build(mesh: DeviceMesh) -> Any:
        nodes, parts = mesh["nodes"], mesh["parts"]
        on_rank = size.experts // PARTS
        # As torchtitan does: where a rank has fewer experts than there are nodes, their rows are sharded.
        dense, own = Weights(mesh["all"]), Weights(nodes, dim=0 if on_rank >= nodes.size() else 1)
        weights = [[dense(size.words, size.width), dense(size.width), dense(size.words, size.width)]]
        weights += [_weights(size, dense, own, size.dense(i)) for i in range(size.layers)]
        angles = tuple(torch.randn(1, size.tokens, 1, ROTATED if size.latent else size.head) for _ in range(2))

        def loss(weights: Any, words: Tensor, following: Tensor, angles: Any) -> Tensor:
            (embedded, norm, out), *layers = weights
            x = F.embedding(words, whole(embedded))
            for i, layer in enumerate(layers):
                x = _layer(size, layer, x, angles, None if size.dense(i) else partial(exchange, parts))
            scores = F.linear(_rms(x, whole(norm)), whole(out))
            return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())

        words, following = (torch.zeros(size.batch, size.tokens, dtype=torch.long) for _ in range(2))
        return Model(loss, weights), (words, following, angles)

    return build


def _weights(size: Mixture, dense: Weights, own: Weights, is_dense: bool) -> list[Tensor]:
    c, on_rank = size.width, size.experts // PARTS
    attention = _latent_shapes(size) if size.latent else _attention_shapes(size)
    found = [dense(*shape) for shape in [(c,), *attention, (c, size.heads * size.head), (c,)]]
    if is_dense:
        return found + [dense(*shape) for shape in _perceptron_shapes(size, size.hidden)]
    found += [dense(*shape) for shape in _perceptron_shapes(size, size.shared)] if size.shared else []
    found += [dense(size.experts, c)]
    return found + [own(on_rank, *shape) for shape in _perceptron_shapes(size, size.inner)]


def _attention_shapes(size: Mixture) -> list[tuple[int, ...]]:
    q, kv = ((heads * size.head, size.width) for heads in (size.heads, size.shared_heads))
    return [q, kv, kv] + [(size.head,)] * (2 * size.norms)


def _latent_shapes(size: Mixture) -> list[tuple[int, ...]]:
    q, down = ((rows, size.width) for rows in (size.heads * (size.head + ROTATED), size.latent + ROTATED))
    return [q, down, (size.latent,), (2 * size.heads * size.head, size.latent)]


def _perceptron_shapes(size: Mixture, hidden: int) -> list[tuple[int, int]]:
    return [(hidden, size.width)] * (1 + size.gated) + [(size.width, hidden)]


# ---------------------------------------------------------------------------------------------- layers


def _layer(size: Mixture, weights: Any, x: Tensor, angles: Any, exchange: Any) -> Tensor:
    """Returns the output of a layer. [B, T, C] -> [B, T, C]."""
    num_perceptron = 2 + size.gated
    num_own = num_perceptron if exchange is None else num_perceptron * (1 + bool(size.shared)) + 1
    (norm, *attention, out, norm2), own = weights[:-num_own], weights[-num_own:]
    h = _rms(x, whole(norm))
    attended = (_latent if size.latent else _plain)(size, h, [whole(m) for m in attention], angles)
    x = x + F.linear(attended, whole(out))
    h = _rms(x, whole(norm2))
    if exchange is None:
        return x + _perceptron(h, [whole(m) for m in own])
    *shared, router = own[:-num_perceptron]
    mixed = _mixed(size, h.flatten(0, 1), whole(router), [whole(m) for m in own[-num_perceptron:]], exchange)
    if size.shared:
        x = x + _perceptron(h, [whole(m) for m in shared])
    return x + mixed.view_as(x)


def _plain(size: Mixture, h: Tensor, weights: Sequence[Tensor], angles: Any) -> Tensor:
    (q, k, v), norms = (F.linear(h, m) for m in weights[:3]), weights[3:]
    if norms:
        q, k = (_rms(t.unflatten(-1, (-1, size.head)), m).flatten(2) for t, m in zip((q, k), norms, strict=True))
    return _attended(q, k, v, (size.heads, size.shared_heads), angles)


def _latent(size: Mixture, h: Tensor, weights: Sequence[Tensor], angles: Any) -> Tensor:
    """Returns the result of multi-head latent attention, with queries that are not compressed."""
    to_q, down, norm, up = weights
    q, rotated_q = F.linear(h, to_q).unflatten(-1, (size.heads, -1)).split([size.head, ROTATED], -1)
    latent, rotated_k = F.linear(h, down).split([size.latent, ROTATED], -1)
    k, v = F.linear(_rms(latent, norm), up).unflatten(-1, (size.heads, -1)).chunk(2, -1)
    rotated_k = _rotated(rotated_k.unsqueeze(2), angles).expand(-1, -1, size.heads, -1)
    q, k = torch.cat([q, _rotated(rotated_q, angles)], -1), torch.cat([k, rotated_k], -1)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _perceptron(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    *inward, outward = weights
    return F.linear(_activated([F.linear(x, m) for m in inward]), outward)


def _activated(hidden: Sequence[Tensor]) -> Tensor:
    return F.silu(hidden[0]) * hidden[1] if len(hidden) > 1 else F.relu(hidden[0])


# --------------------------------------------------------------------------------------------- experts

Exchange = Callable[..., Tensor]
"""Sends tokens to the ranks of their experts, applies these, and sends the results back.

Called with the mesh of the ranks that have the experts, the tokens, the scores and indices of their experts, the number
of experts, and a function that applies the experts of this rank to rows that are ordered by them.
"""


def _mixed(size: Mixture, x: Tensor, router: Tensor, weights: Sequence[Tensor], exchange: Any) -> Tensor:
    """Returns for each token the sum over its experts, with DeepSeek's scores. [N, C] -> [N, C]."""
    scores = torch.sigmoid(F.linear(x, router).float())
    shares, chosen = scores.topk(size.chosen, dim=-1, sorted=False)
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        *inward, outward = (m.transpose(-2, -1) for m in weights)
        return torch._grouped_mm(
            _activated([torch._grouped_mm(rows, m, offs=ends) for m in inward]), outward, offs=ends
        )

    return exchange(x, shares, chosen, size.experts, experts)


def by_counts(mesh: DeviceMesh, x: Tensor, shares: Tensor, chosen: Tensor, num_experts: int, experts: Any) -> Tensor:
    """An `Exchange` as torchtitan has it: the split sizes of two all-to-alls are read from counts."""

    def read(counts: Tensor) -> list[int]:
        sizes = counts.to("cpu").tolist()
        for size in sizes:
            torch._check(size >= 0)
        return sizes

    return _by_splits(mesh, x, shares, chosen, num_experts, experts, read)


def by_equal_counts(
    mesh: DeviceMesh, x: Tensor, shares: Tensor, chosen: Tensor, num_experts: int, experts: Any
) -> Tensor:
    """The same with static split sizes, for experts that are chosen equally often."""
    ranks = mesh.size()
    sizes = [chosen.numel() // ranks] * ranks
    return _by_splits(mesh, x, shares, chosen, num_experts, experts, lambda counts: sizes)


def _by_splits(
    mesh: DeviceMesh, x: Tensor, shares: Tensor, chosen: Tensor, num_experts: int, experts: Any, read: Any
) -> Tensor:
    group, ranks, flat = mesh.get_group(), mesh.size(), chosen.flatten()
    counts = torch.histc(flat, bins=num_experts, min=0, max=num_experts)
    order = flat.argsort(stable=True)
    given = (x[order // chosen.shape[1]].float() * shares.flatten()[order, None]).to(BF16)
    came = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, group))
    sent, received = (read(c.view(ranks, -1).sum(1)) for c in (counts, came))
    rows = funcol.all_to_all_single_autograd(given, received, sent, group)
    places, own_counts = _by_expert(came, ranks, rows.shape[0])
    results = experts(rows[places], own_counts)
    back = funcol.all_to_all_single_autograd(
        torch.empty_like(results).index_copy(0, places, results), sent, received, group
    )
    copies = torch.zeros_like(given).index_copy(0, order, back)
    return copies.view(*chosen.shape, -1).sum(1)


def _by_expert(counts: Tensor, ranks: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the order of received rows that sorts them by expert, and the count for each expert.

    Args:
        counts: of the rows for each expert of this rank, by source rank.
        ranks: number of source ranks.
        num_rows: the sum of the counts.
    """
    starts = counts.cumsum(0) - counts
    lengths, starts = (t.view(ranks, -1).t().flatten() for t in (counts, starts))
    ends = lengths.cumsum(0)
    i = torch.arange(num_rows, device=counts.device)
    return i + (starts - ends + lengths)[torch.searchsorted(ends, i, right=True)], counts.view(ranks, -1).sum(0)


def by_routed_rows(
    mesh: DeviceMesh, x: Tensor, shares: Tensor, chosen: Tensor, num_experts: int, experts: Any
) -> Tensor:
    """An `Exchange` by `route_rows`."""
    on_rank = num_experts // mesh.size()
    rows = {0: [x.shape[0]] * mesh.size()}
    x, shares, chosen = (sc.ShardTensor.from_local(t, mesh, [Shard(0)], rows) for t in (x, shares, chosen))

    def sorted_experts(rows: Tensor, own: Tensor) -> Tensor:
        order = own.argsort(stable=True)
        counts = own.new_zeros(on_rank).scatter_add(0, own, torch.ones_like(own))
        results = experts(rows[order], counts)
        return torch.empty_like(results).index_copy(0, order, results)

    received, own, route = sc.route_rows(x, chosen // on_rank, each=[chosen % on_rank])
    results = sc.local_map(sorted_experts, [Shard(0)])(received, own)
    return route.combine(results, weights=shares.to(BF16)).to_local()
