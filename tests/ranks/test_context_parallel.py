"""`context_parallel`: tensors that a program holds are sharded in place while the context lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh, once
from tests.support.tiers import often
from tests.zoo import packages

PARTITIONS = [[5, 0, 6], None, [0, 11, 0]]


class Decoder(nn.Module):
    """One layer with a cache of rotary positions, as a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("angles", torch.arange(rows).unsqueeze(1) * torch.tensor([1.0, 0.1]))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self._turned(q), self._turned(k)
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return nnf.cross_entropy(self.out(x + y).flatten(0, 1), labels.flatten())

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat(
            [a * self.angles.cos() - b * self.angles.sin(), b * self.angles.cos() + a * self.angles.sin()], -1
        )


def inputs(rows: int = 11) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 20, (2, rows + 1))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def step(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss.backward()
    whole = loss.full_tensor() if isinstance(loss, sc.ShardTensor) else loss
    return [whole.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def alone() -> list[Tensor]:
    model = Decoder(11).double()
    return step(model, model(*inputs()))


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("backend", "attention"),
    often([(None, "auto"), ("aot_eager", "auto"), ("aot_eager", "ring"), ("inductor", "auto")], 1),
)
def test_a_training_step(backend: str | None, attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc.config, "attention", attention)
    model, (ids, labels) = Decoder(11).double(), inputs()
    before = [x.clone() for x in (ids, labels, model.angles)]
    call = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    for sizes in PARTITIONS:
        buffers = [ids, labels, model.angles]
        with sc.context_parallel(mesh(), buffers=buffers, buffer_seq_dims=[1, -1, 0], sizes=sizes):
            assert [x.placements for x in (ids, labels, model.angles)] == [(Shard(1),), (Shard(1),), (Shard(0),)]
            assert sizes is None or ids.to_local().shape == (2, sizes[mesh().get_local_rank()])
            loss = call(ids, labels)
            found = step(model, loss)
        for a, b in zip(found, once(alone), strict=True):
            torch.testing.assert_close(a, b)
        for x, y in zip((ids, labels, model.angles), before, strict=True):
            assert type(x) is Tensor
            assert torch.equal(x, y)


@pytest.mark.ranks(3, processes=False)
def test_backward_outside_and_after_an_error() -> None:
    model, (ids, labels) = Decoder(11).double(), inputs()
    with sc.context_parallel(mesh(), buffers=[ids, labels], buffer_seq_dims=[1, 1], row_cost=4.0):
        assert ids.to_local().shape[1] == sc.balanced_partition([11], 3, row_cost=4.0)[mesh().get_local_rank()]
        loss = model(ids, labels)
    assert type(ids) is Tensor
    for a, b in zip(step(model, loss), once(alone), strict=True):
        torch.testing.assert_close(a, b)
    with (
        pytest.raises(ZeroDivisionError),
        sc.context_parallel(mesh(), buffers=[ids, labels], buffer_seq_dims=[1, 1], no_restore_buffers={labels}),
    ):
        raise ZeroDivisionError
    assert type(ids) is Tensor
    assert isinstance(labels, sc.ShardTensor)
    assert torch.equal(labels.full_tensor(), inputs()[1])


@pytest.mark.ranks(2, processes=False)
def test_what_cannot_be_partition_is_refused_and_nothing_is_changed() -> None:
    x, y = torch.arange(6.0), torch.arange(8.0).view(2, 4)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("parameters stay replicated", {"buffers": [nn.Parameter(x)], "buffer_seq_dims": [0]}),
        ("requires a gradient", {"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [0]}),
        ("buffer 1 of shape .* has no dim 2", {"buffers": [x, y], "buffer_seq_dims": [0, 2]}),
        ("2 buffers and 1 buffer_seq_dims", {"buffers": [x, y], "buffer_seq_dims": [0]}),
        ("named twice", {"buffers": [x, x], "buffer_seq_dims": [0, 0]}),
        ("do not shard 4 rows", {"buffers": [x, y], "buffer_seq_dims": [0, 1], "sizes": [6, 0]}),
        ("not among the buffers", {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": [y]}),
        ("pass one of them", {"buffers": [x], "buffer_seq_dims": [0], "sizes": [6, 0], "row_cost": 1.0}),
        ("is sharded already", {"buffers": [sc.distribute_tensor(x, mesh(), [Shard(0)])], "buffer_seq_dims": [0]}),
    ]
    for words, arguments in cases:
        with pytest.raises(sc.LayoutError, match=words), sc.context_parallel(mesh(), **arguments):
            pass
        assert type(x) is type(y) is Tensor


@pytest.mark.ranks(4, mesh=(2, 2), processes=False)
def test_one_dim_of_a_mesh() -> None:
    x = torch.arange(5.0)
    with pytest.raises(sc.LayoutError, match="2 dims; pass one"), sc.context_parallel(mesh()):
        pass
    part = DeviceMesh("cpu", mesh().mesh, mesh_dim_names=("data", "context"))["context"]
    with sc.context_parallel(part, buffers=[x], buffer_seq_dims=[0], sizes=[1, 4]):
        assert (x * 2).sum().full_tensor() == 20.0
        assert x.to_local().shape[0] == [1, 4][part.get_local_rank()]


def llama() -> nn.Module:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    config = packages.of("transformers", "LlamaConfig")(num_attention_heads=4, num_key_value_heads=2, **sizes)
    return packages.of("transformers", "LlamaForCausalLM")(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    pytest.importorskip("transformers")
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
    config = packages.of("transformers", "GPT2Config")(**sizes, **without)
    model = packages.of("transformers", "GPT2LMHeadModel")(config)
    # The default logs, which Dynamo refuses.
    model.loss_function = packages.of("transformers.loss.loss_utils", "ForCausalLMLoss")
    return model  # type: ignore[no-any-return]


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("make", "backend"), often([(llama, None), (gpt2, None), (llama, "aot_eager"), (gpt2, "aot_eager")], 0)
)
def test_decoders_of_the_world(make: Callable[[], nn.Module], backend: str | None) -> None:
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]

    call = torch.compile(loss_of, fullgraph=True, backend=backend) if backend else loss_of
    expected = [x.clone() for x in step(model, loss_of(ids, labels))]
    for sizes in PARTITIONS[:2]:
        with sc.context_parallel(mesh(), buffers=[ids, labels], buffer_seq_dims=[1, 1], sizes=sizes):
            found = step(model, call(ids, labels))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    if backend is not None:
        return
    with torch.no_grad():
        words = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        logits = model(input_ids=ids, use_cache=True).logits
        with sc.context_parallel(mesh(), buffers=[ids], buffer_seq_dims=[1], sizes=PARTITIONS[0]):
            prefill = model(input_ids=ids, use_cache=True)
            assert prefill.past_key_values.layers[0].keys.placements == (Shard(2),)
            torch.testing.assert_close(prefill.logits.full_tensor(), logits)
            found_words = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(found_words.full_tensor(), words)
