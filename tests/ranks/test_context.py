"""Context parallelism: models of plain tensors whose sequence is cut while a context lasts, against one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from tiers import often
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank, world_size

WORDS, WIDTH, HEADS = 11, 16, 4
CUTS = [[5, 0, 8], [1, 9, 3], [6, 6, 1], [4, 2, 9]]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


class Decoder(nn.Module):
    """Two layers with rotary factors, which come as an input, and fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.key = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))
        self.value = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, factors: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for query, key, value in zip(self.query, self.key, self.value, strict=True):
            q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (query, key, value))
            y = nnf.scaled_dot_product_attention(
                q * factors, k * factors, v, mask, is_causal=mask is None, enable_gqa=True
            )
            x = x + y.transpose(1, 2).flatten(2)
        return self.out(x)


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(WORDS, (2, rows), generator=generator)
    factors = torch.randn(rows, WIDTH // HEADS, dtype=torch.float64, generator=generator)
    return ids, torch.randint(WORDS, (2, rows), generator=generator), factors


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nnf.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def expected(rows: int, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    net = decoder()
    ids, targets, factors = inputs(rows)
    logits = net(ids, factors, mask)
    loss_of(logits, targets).backward()
    return logits.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def check(logits: Tensor, net: nn.Module, want: tuple[Tensor, dict[str, Tensor]], cut: Sequence[int]) -> None:
    torch.testing.assert_close(logits, want[0].split(list(cut), 1)[rank()], rtol=1e-10, atol=1e-10)
    for name, p in net.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, want[1][name], rtol=1e-10, atol=1e-10)
    net.zero_grad()


def train(net: nn.Module, run: Any, cuts: Sequence[Sequence[int]]) -> None:
    for cut in cuts:
        ids, targets, factors = inputs(sum(cut))
        with sc.context_parallel(mesh(), buffers=[ids, targets, factors], buffer_seq_dims=[1, 1, 0], sizes=cut):
            assert ids.shape == (2, cut[rank()])
            logits = run(ids, factors)
            loss_of(logits, targets).backward()
        check(logits, net, once(lambda cut=cut: expected(sum(cut))), cut)
        assert all(torch.equal(a, b) for a, b in zip((ids, targets, factors), inputs(sum(cut)), strict=True))


@pytest.fixture(params=["auto", "ring"])
def _attention(request: Any) -> Iterator[None]:
    sc.config.attention = request.param
    yield
    sc.config.attention = "auto"


@pytest.mark.usefixtures("_attention")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(3, processes=False)
def test_a_decoder_of_plain_tensors_trains(compiled: bool) -> None:
    net = decoder()
    before = once(graphs_compiled)
    train(net, torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net, CUTS)
    # Dynamo compiles plain tensors for the sizes of the first call, for all others, and for sizes 0 and 1.
    assert once(graphs_compiled) - before <= 4


@pytest.mark.parametrize("attention", often(["auto", "ring"], 1))
@pytest.mark.ranks(3, timeout=300)
def test_a_decoder_of_plain_tensors_trains_on_processes(attention: Any) -> None:
    sc.config.attention = attention  # of the worker
    try:
        net = decoder()
        train(net, torch.compile(net, fullgraph=True, backend="inductor"), CUTS[:2])
    finally:
        sc.config.attention = "auto"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(3, processes=False)
def test_a_mask_has_rows_of_this_rank_and_columns_of_all(compiled: bool) -> None:
    cut = CUTS[1]
    net = decoder()
    run: Any = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    seen = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.7
    seen |= torch.eye(13, dtype=torch.bool)
    of_columns = seen[:, :, :1] | (torch.arange(13) == 3)
    for mask, cut_mask in ((seen, True), (of_columns, False)):
        ids, targets, factors = inputs(13)
        rows = mask.clone()
        buffers, dims = [ids, targets, factors], [1, 1, 0]
        if cut_mask:
            buffers, dims = [*buffers, rows], [*dims, 2]
        with sc.context_parallel(mesh(), buffers=buffers, buffer_seq_dims=dims, sizes=cut):
            logits = run(ids, factors, rows)
            loss_of(logits, targets).backward()
        check(logits, net, once(lambda mask=mask: expected(13, mask)), cut)


@pytest.mark.ranks(3, processes=False)
def test_buffers_come_back() -> None:
    here, m = rank(), mesh()
    a, b = torch.arange(14.0).view(7, 2), torch.arange(7)
    whole_a, whole_b, stored = a.clone(), b.clone(), a.data_ptr()
    with sc.context_parallel(m, buffers=[a, b], buffer_seq_dims=[0, -1], no_restore_buffers={b}):
        assert torch.equal(a, whole_a.split([3, 3, 1])[here]) and torch.equal(b, whole_b.split([3, 3, 1])[here])
        a.zero_()
    assert torch.equal(a, whole_a) and a.data_ptr() == stored
    assert torch.equal(b, whole_b.split([3, 3, 1])[here])
    with pytest.raises(KeyError), sc.context_parallel(m, buffers=[a], buffer_seq_dims=[0], sizes=[0, 7, 0]):
        raise KeyError
    assert torch.equal(a, whole_a)
    weight = torch.ones(7, 2).requires_grad_()
    with sc.context_parallel(m, buffers=[a], buffer_seq_dims=[0], sizes=[3, 3, 1]):
        loss = (a * weight[: a.shape[0]]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # the rows that were read are gone


@pytest.mark.ranks(3, processes=False)
def test_what_does_not_fit_is_refused() -> None:
    m, x = mesh(), torch.rand(7, 2)

    def refused(match: str, error: type[Exception] = sc.LayoutError, **kwargs: Any) -> None:
        with pytest.raises(error, match=match), sc.context_parallel(kwargs.pop("mesh", m), **kwargs):
            pass

    refused("2 buffers, and buffer_seq_dims for 1", buffers=[x, x.clone()], buffer_seq_dims=[0])
    refused(
        r"shape \(7, 2\) has not the 8 rows of sizes=\[1, 3, 4\] along dim 0",
        buffers=[x],
        buffer_seq_dims=[0],
        sizes=[1, 3, 4],
    )
    refused("has not the 7 rows", buffers=[x, torch.rand(8)], buffer_seq_dims=[0, 0])
    refused(r"sizes=\[3, 4\] for the 3 ranks", buffers=[x], buffer_seq_dims=[0], sizes=[3, 4])
    refused("none of the buffers", buffers=[x], buffer_seq_dims=[0], no_restore_buffers={torch.rand(7)})
    refused("given twice", buffers=[x, x], buffer_seq_dims=[0, 0])
    unsupported = sc.UnsupportedOpError
    refused("requires gradients", unsupported, buffers=[nn.Parameter(x.clone())], buffer_seq_dims=[0])
    sharded = sc.ShardTensor.from_local(x, m, [Replicate()])
    refused("call the model with sharded tensors", unsupported, buffers=[sharded], buffer_seq_dims=[0])
    q = torch.rand(1, 1, 7, 4)
    with sc.context_parallel(m, buffers=[x], buffer_seq_dims=[0], sizes=[3, 4, 0]):
        with pytest.raises(sc.LayoutError, match=r"attention to 7 rows, where this rank has \d of the sequence's 7"):
            nnf.scaled_dot_product_attention(q, q, q)
        mine = q[:, :, : x.shape[0]]
        if mine.shape[-2] == 0:
            with pytest.raises(sc.LayoutError, match="Give each rank at least two rows, or pass a mask"):
                nnf.scaled_dot_product_attention(mine, mine, mine)
        with pytest.raises(sc.LayoutError, match="a mask has a column for each of the sequence's 7 rows"):
            nnf.scaled_dot_product_attention(mine, mine, mine, torch.ones(x.shape[0], 3))
    assert nnf.scaled_dot_product_attention(q, q, q).shape == q.shape


@pytest.mark.ranks(4, processes=False)
def test_a_part_of_a_larger_mesh() -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    with pytest.raises(sc.LayoutError, match="one dim"), sc.context_parallel(square):
        pass
    q = torch.rand(1, 2, 7, 4, generator=torch.Generator().manual_seed(square.get_local_rank("data")))
    whole = q.clone()
    with sc.context_parallel(square["context"], buffers=[q], buffer_seq_dims=[2], sizes=[2, 5]):
        out = nnf.scaled_dot_product_attention(q, q, q, is_causal=True)
    want = nnf.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    torch.testing.assert_close(out, want.split([2, 5], 2)[square.get_local_rank("context")])


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    own: dict[str, Any] = {
        "llama": {"num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=WORDS, num_hidden_layers=2, **own)
    net: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    return net


def expected_of_hugging_face(kind: str, rows: int) -> tuple[Tensor, dict[str, Tensor], Any]:
    net = hugging_face(kind)
    ids, targets, _ = inputs(rows)
    with torch.no_grad():
        cache = net(ids, use_cache=True).past_key_values
    logits = net(ids, use_cache=False).logits
    loss_of(logits, targets).backward()
    return logits.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, cache


@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(3, timeout=300, processes=False)
def test_decoders_of_hugging_face_train_and_read_a_prompt(kind: str, compiled: bool) -> None:
    net = hugging_face(kind)
    run: Any = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    for cut in ([5, 3, 5], [2, 8, 3], [6, 6, 2]):  # these models take one row for a step of generation
        ids, targets, _ = inputs(sum(cut))
        places = torch.arange(sum(cut)).expand(2, -1).clone()
        want = once(lambda cut=cut: expected_of_hugging_face(kind, sum(cut)))
        with sc.context_parallel(mesh(), buffers=[ids, targets, places], buffer_seq_dims=[1, 1, 1], sizes=cut):
            logits = run(ids, position_ids=places, use_cache=True).logits
            loss_of(logits, targets).backward()
            with torch.no_grad():
                cache = net(ids, position_ids=places, use_cache=True).past_key_values
        check(logits, net, want[:2], cut)
        for got, full in zip(cache.layers, want[2].layers, strict=True):
            torch.testing.assert_close(got.keys, full.keys.split(cut, 2)[rank()])
            torch.testing.assert_close(got.values, full.values.split(cut, 2)[rank()])
