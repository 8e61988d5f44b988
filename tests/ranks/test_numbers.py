"""Numbers of sharded tensors that Python or C++ reads, and packed sequences, against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Shard
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

import shardcompile as sc
from shardcompile.testing import mesh, once, rank, world_size

Function = Callable[[Any], Any]

NUMBERS: dict[str, Function] = {
    "tensor": lambda x: torch.tensor([x.mean(), 2.0, x[0, 0], x.sum()]),
    "tensor of lists": lambda x: torch.tensor([[x.mean(), 1.0], (2.0, x.max())]),
    "tensor of another dtype": lambda x: torch.tensor([x.mean(), x.sum()], dtype=torch.float32),
    "tensor of integers": lambda x: torch.tensor([x.long().sum(), x.argmax()]),
    "tensor of truths": lambda x: torch.tensor([(x > 3).any(), (x > 99).any()]),
    "tensor of complex numbers": lambda x: torch.tensor([x.sum() + 1j, x.mean()]),
    "tensor of halves": lambda x: torch.tensor([x.half().max(), x.half().min()]),
    "tensor of one element each": lambda x: torch.tensor([x[:1, 0], x[2:3, 1]]),
    "tensor of a tensor": lambda x: torch.tensor(x.detach()),
    "tensor of a number": lambda x: torch.tensor(x.sum()),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), x.mean()]),
    "as_tensor of a number": lambda x: torch.as_tensor(x.sum()),
    "asarray": lambda x: torch.asarray([x.sum(), x.mean()]),
    "Tensor": lambda x: torch.Tensor([x.sum(), x.mean()]),
    "LongTensor": lambda x: torch.LongTensor([x.long().sum()]),
    "new_tensor of a plain one": lambda x: torch.zeros(2).new_tensor([x.sum(), x.mean()]),
    "new_tensor": lambda x: x.new_tensor([x.sum(), x.mean()]),
    "new_tensor of numbers": lambda x: x.new_tensor([1.0, 2.0]),
    "default_collate": lambda x: torch.utils.data.default_collate([1.0, x.sum()]),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: (bool(x.sum()), bool(x[0, 0])),
    "complex": lambda x: complex(x.sum()),
    "item": lambda x: x.mean().item(),
    "math": lambda x: math.sqrt(x.sum()),
    "text": lambda x: ("%d %.3f" % (x.sum(), x.mean()), f"{x.mean():.4f}"),  # noqa: UP031
    "tolist": lambda x: x.tolist(),
    "an index of a list": lambda x: [5, 6, 7][x.long()[0, 1]],
    "a slice of a list": lambda x: list(range(9))[: x.long()[0, 2]],
    "range": lambda x: list(range(x.long().sum())),
    "an index of a plain tensor": lambda x: torch.arange(30)[x.long()[0, 1]],
    "a slice of a plain tensor": lambda x: torch.arange(30)[x.long()[0, 1] :],
    "full": lambda x: torch.full((2, 3), x.sum()),
    "a size": lambda x: torch.full((x.long()[0, 2],), 1.0),
    "linspace": lambda x: torch.linspace(x.min(), x.max(), 5),
    "logspace": lambda x: torch.logspace(x.min(), x.mean() / 9, 4),
    "arange": lambda x: torch.arange(x.min(), x.max(), x.mean()),
    "narrow": lambda x: torch.arange(30).narrow(0, x.long()[0, 1], 3),
    "split": lambda x: torch.arange(6).split([x.long()[0, 2], 4]),
    "alpha": lambda x: torch.add(torch.ones(2), torch.ones(2), alpha=x.sum()),
    "numpy of a number": lambda x: torch.from_numpy(np.asarray(x.sum().detach()).reshape(1)),
    "numpy of numbers": lambda x: torch.from_numpy(np.array([x.sum().detach(), x.mean().detach()])),
}
"""What reads numbers."""


def _cases(full: Tensor) -> dict[str, Any]:
    """A tensor in several layouts; one row, and no rows, on some ranks."""
    n, last = len(full), world_size() - 1
    return {
        "uneven": sc.distribute_tensor(
            full, mesh(), [Shard(0)], sharding_shapes={0: [n - 1, *[0] * (last - 1), 1][: last + 1]}
        ),
        "columns": sc.distribute_tensor(full, mesh(), [Shard(1)]),
        "replicated": sc.distribute_tensor(full, mesh()),
        "partial": sc.ShardTensor.from_local(full if rank() == last else torch.zeros_like(full), mesh(), [Partial()]),
    }


def _same(got: Any, expected: Any) -> None:
    a, b = tree_leaves(got), tree_leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if not isinstance(y, Tensor):
            assert x == y and type(x) is type(y)
            continue
        torch.testing.assert_close(x.full_tensor() if isinstance(x, sc.ShardTensor) else x, y)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.filterwarnings("ignore")
def test_numbers(name: str) -> None:
    full = torch.arange(21.0, dtype=torch.float64).view(7, 3) / 4
    full[0] = torch.tensor([0.0, 1.0, 2.0])
    run = NUMBERS[name]
    expected = once(lambda: run(full))
    for x in _cases(full).values():
        _same(run(x), expected)


@pytest.mark.ranks(3, processes=False)
def test_more_than_one_element_is_no_number() -> None:
    x = sc.ones(7, 3, device_mesh=mesh(), placements=[Shard(0)])
    with pytest.raises(ValueError, match="only one element tensors"):
        torch.tensor([x, x])


LENGTHS = [4, 4, 2, 1, 1]

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "tanh": lambda: nn.RNN(3, 4),
}


def _packed(layer: Any, x: Tensor, lengths: list[int] | Tensor, is_sorted: bool) -> list[Any]:
    """Results of a layer on sequences of several lengths, packed and unpacked again."""
    first = layer.batch_first
    sequences = rnn.pack_padded_sequence(x if first else x.transpose(0, 1), lengths, first, is_sorted)
    out, state = layer(sequences)
    padded, back = rnn.pad_packed_sequence(out, first, padding_value=-1.0, total_length=5)
    return [sequences.data, out.data, *tree_leaves(state), padded, back]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_packed_sequences(name: str) -> None:
    torch.manual_seed(0)
    layer = RECURRENT[name]().double()
    full = torch.randn(5, 4, 3, dtype=torch.float64)
    for lengths, is_sorted in ((LENGTHS, True), ([2, 4, 1, 4, 3], False), (torch.tensor([1, 1, 1, 1, 1]), True)):
        plain = full.clone().requires_grad_()
        expected = _packed(layer, plain, lengths, is_sorted)
        _loss(expected).backward()
        wanted = [plain.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
        for dim, sizes in ((0, [4, 0, 1]), (0, [0, 0, 5]), (1, [1, 3, 0])):
            x = sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: sizes}).requires_grad_()
            got = _packed(layer, x, lengths, is_sorted)
            _same(got, expected)
            _loss(got).backward()
            _same([x.grad, *(p.grad for p in layer.parameters())], wanted)
            layer.zero_grad()


def _loss(results: list[Any]) -> Tensor:
    return sum((r * r.detach().cos()).sum() for r in results if r.dtype.is_floating_point)  # type: ignore[return-value]


@pytest.mark.ranks(3, processes=False)
def test_packed_sequences_stay_sharded_and_their_lengths_are_plain() -> None:
    full = torch.randn(5, 4, 3)
    x = sc.distribute_tensor(full, mesh(), [Shard(2)], sharding_shapes={0: [2, 0, 1]})
    packed = rnn.pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True)
    assert type(packed.batch_sizes) is Tensor and packed.data.placements == (Shard(1),)
    padded, lengths = rnn.pad_packed_sequence(packed, batch_first=True)
    assert type(lengths) is Tensor and padded.placements == (Shard(2),)
    sizes = sc.distribute_tensor(torch.tensor(LENGTHS), mesh(), [Shard(0)])
    again = rnn.pack_padded_sequence(x, sizes, batch_first=True)
    assert torch.equal(again.data.full_tensor(), packed.data.full_tensor())
    for wrong in ([4, 4, 2, 1, 0], [1, 4, 2, 1, 1]):
        with pytest.raises(RuntimeError) as plain:
            rnn.pack_padded_sequence(full, wrong, batch_first=True)
        with pytest.raises(RuntimeError) as ours:
            rnn.pack_padded_sequence(x, wrong, batch_first=True)
        assert str(plain.value) == str(ours.value)


@pytest.mark.ranks(3, processes=False)
def test_sequences_of_lists() -> None:
    full = torch.randn(7, 3)
    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [5, 0, 2]})

    def act(x: Tensor) -> list[Any]:
        parts = [x[:3], x[3:5], x[5:]]
        packed = rnn.pack_sequence(parts)
        return [rnn.pad_sequence(parts), packed.data, *rnn.unpack_sequence(packed), packed.batch_sizes]

    _same(act(x), act(full))
