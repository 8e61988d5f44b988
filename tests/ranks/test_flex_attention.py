"""`flex_attention` on sharded tensors, against products in float64.

Torch refuses its backward pass on CPUs, where its own kernels have none; ours has one, so the tests take the question out.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import shardcompile as sc
from shardcompile.collectives import transport
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh
from tests.support.tiers import often

BATCH, HEADS, ROWS = Shard(0), Shard(1), Shard(2)
SHARD = 4
DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 9, 0, 6]))  # 20 rows
MASKS: dict[str, Callable[..., Any]] = {
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "causal documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "causal": lambda b, h, i, j: i >= j,
    "sliding window": lambda b, h, i, j: (i >= j) & (i - j < 3),
    "prefix": lambda b, h, i, j: (j < 5) | (i >= j),
    "by head, with hidden rows": lambda b, h, i, j: (i >= j) & (j % (h + 2) == 1),
    "nothing": lambda b, h, i, j: (i < 0) & (j < 0),
}


@pytest.fixture(autouse=True)
def backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def block_mask(name: str, heads: int, rows: int, columns: int) -> BlockMask:
    return create_block_mask(MASKS[name], None, heads, rows, columns, device="cpu", BLOCK_SIZE=SHARD)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: str | None, bias: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    h, i, j = (torch.arange(n) for n in scores.shape[1:])
    h, i = h[:, None, None], i[:, None]
    if bias is not None:
        scores = scores + bias[h] * (i - j)
    if mask is not None:
        scores = scores.masked_fill(~MASKS[mask](0, h, i, j), -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0) @ v


def biased(bias: Any) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score + bias[h] * (i - j)


def step(function: Callable[..., Any], values: list[Any], others: list[Any]) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    out = function(*values)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    if isinstance(out, sc.ShardTensor):
        weights = sc.distribute_tensor(weights, out.device_mesh, [Replicate()] * out.device_mesh.ndim)
    grads = torch.autograd.grad((out * weights).sum(), [*values, *others])
    return [x.full_tensor() if isinstance(x, sc.ShardTensor) else x for x in (out.detach(), *grads)]


def check(
    call: Callable[..., Any],
    reference: Callable[..., Any],
    values: list[Tensor],
    placements: list[Any],
    sizes: list[Any],
    bias: Tensor | None = None,
) -> None:
    others = [] if bias is None else [bias]
    expected = step(reference, [x.requires_grad_() for x in values], others)
    partition = [
        sc.distribute_tensor(x.detach(), mesh(), p, sharding_shapes=s).requires_grad_()
        for x, p, s in zip(values, placements, sizes, strict=True)
    ]
    for ours, theirs in zip(step(call, partition, others), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("mask", "backend"),
    [
        *((name, None) for name in MASKS),
        *often([*((name, "aot_eager") for name in MASKS), ("prefix", "inductor")], 0),
    ],
)
def test_masks_over_partitions(mask: str, backend: str | None) -> None:
    torch.manual_seed(0)
    bias = drawn(2).requires_grad_()
    structure = block_mask(mask, 2, 20, 20)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q.sin(), k, v, biased(bias), structure) * 2  # type: ignore[operator]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q.sin(), k, v, mask, bias) * 2

    torch._dynamo.reset()
    before = graphs_compiled()
    call = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    for sizes in ([7, 0, 13], [1, 18, 1], [0, 0, 20]):
        values = [drawn(2, 2, 20, 4), drawn(2, 2, 20, 4), drawn(2, 2, 20, 3)]
        check(call, reference, values, [[ROWS]] * 3, [{0: sizes}] * 3, bias)
    assert backend is None or graphs_compiled() - before == 1


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often([None, "aot_eager"], 1))
def test_other_tensors(backend: str | None) -> None:
    """Grouped heads, one batch of keys, keys that are sharded otherwise or not at all, no mask, plain keys."""
    torch.manual_seed(0)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, enable_gqa=True)  # type: ignore[return-value]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q, k, v, None, None)

    call = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    rows, columns = {0: [4, 0, 5]}, {0: [1, 6, 0]}
    for placements, sizes in (
        ([[ROWS]] * 3, [rows, columns, columns]),
        ([[ROWS], [Replicate()], [ROWS]], [rows, None, columns]),
        ([[Replicate()], [ROWS], [ROWS]], [None, columns, columns]),
        ([[BATCH], [ROWS], [BATCH]], [{0: [1, 0, 1]}, columns, {0: [0, 2, 0]}]),
        ([[HEADS], [HEADS], [HEADS]], [None, {0: [0, 0, 2]}, None]),
    ):
        values = [drawn(2, 4, 9, 4), drawn(2, 2, 7, 4), drawn(2, 2, 7, 4)]
        check(call, reference, values, placements, sizes)


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize(
    ("backend", "partition"), often(list(itertools.product([None, "aot_eager"], [(ROWS, HEADS), (BATCH, ROWS)])), 2)
)
def test_two_mesh_dims(backend: str | None, partition: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    bias = drawn(3).requires_grad_()
    structure = block_mask("by head, with hidden rows", 3, 20, 20)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, biased(bias), structure)  # type: ignore[return-value]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q, k, v, "by head, with hidden rows", bias)

    call = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    values = [drawn(3, 3, 20, 4) for _ in range(3)]
    check(call, reference, values, [list(partition)] * 3, [None] * 3, bias)


@pytest.mark.ranks(3, processes=False)
def test_functions_may_read_sharded_tensors_and_give_statistics() -> None:
    torch.manual_seed(0)
    values, sizes = [drawn(1, 2, 20, 4) for _ in range(3)], {0: [11, 0, 9]}
    of_rows = drawn(20)
    q, k, v = (sc.distribute_tensor(x, mesh(), [ROWS], sharding_shapes=sizes) for x in values)
    table = sc.distribute_tensor(of_rows, mesh(), [Shard(0)], sharding_shapes=sizes)
    wanted = of_torch.AuxRequest(lse=True)  # torch has no largest scores on CPUs
    found, more = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j] * table[i], return_aux=wanted)  # type: ignore[misc]
    scores = values[0] @ values[1].mT / 2 + of_rows * of_rows[:, None]
    torch.testing.assert_close(found.full_tensor(), scores.softmax(-1) @ values[2])  # type: ignore[union-attr]
    torch.testing.assert_close(more.lse.full_tensor(), scores.logsumexp(-1))  # type: ignore[union-attr]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(
    ("mask", "received"),
    [
        ("causal", {0: {}, 1: {0: 8}, 2: {0: 8, 1: 8}}),
        ("sliding window", {0: {}, 1: {0: 4}, 2: {1: 4}}),
        ("documents", {0: {1: 8}, 1: {0: 4, 2: 4}, 2: {1: 4}}),  # sharded of 4 rows
        ("prefix", {0: {}, 1: {0: 8}, 2: {0: 8, 1: 8}}),
    ],
)
def test_rows_that_the_structure_names_and_no_others(
    mask: str, received: dict[int, dict[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, dict[int, int]] = {0: {}, 1: {}, 2: {}}
    exchange = transport.exchange

    def noted(call: Any, sends: Any, receives: Any) -> Any:
        seen[call.group.rank()].update({peer: t.numel() // 16 for peer, t in receives if t.numel()})
        return exchange(call, sends, receives)

    q = sc.distribute_tensor(drawn(1, 2, 20, 4), mesh(), [ROWS], sharding_shapes={0: [8, 8, 4]})
    structure = block_mask(mask, 2, 20, 20)
    monkeypatch.setattr(transport, "exchange", noted)
    flex_attention(q, q, q, block_mask=structure)
    me = mesh().get_local_rank()
    assert seen[me] == received[me]


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("inside", often([True, False], 1), ids=["structure made inside", "structure handed over"])
def test_documents_that_change_at_every_step_under_one_graph(inside: bool) -> None:
    torch.manual_seed(0)

    def structure_of(documents: Tensor) -> BlockMask:
        def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[i] == documents[j]) & (i >= j)

        return create_block_mask(same, None, None, 20, 20, device="cpu", BLOCK_SIZE=SHARD)

    def function(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, named: Any) -> Tensor:
        def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[i] == documents[j]) & (i >= j)

        if named is None:
            structure = create_block_mask(same, None, None, 20, 20, device="cpu", BLOCK_SIZE=SHARD)
        else:
            structure = BlockMask.from_kv_blocks(*named, BLOCK_SIZE=SHARD, mask_mod=same, seq_lengths=(20, 20))
        return flex_attention(q, k, v, block_mask=structure)  # type: ignore[return-value]

    torch._dynamo.reset()
    before = graphs_compiled()
    call = torch.compile(function, fullgraph=True, backend="aot_eager")
    for lengths, sizes in (([5, 9, 0, 6], [7, 0, 13]), ([20, 0, 0, 0], [1, 18, 1]), ([1, 1, 17, 1], [0, 20, 0])):
        documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
        made = structure_of(documents)
        named = None
        if not inside:  # shards that are seen in part, and as a whole
            named = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
        seen = (documents == documents[:, None]) & torch.ones(20, 20, dtype=torch.bool).tril()

        def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            return (q @ k.mT / 2).masked_fill(~seen, -math.inf).softmax(-1) @ v

        check(
            lambda q, k, v, d=documents, n=named: call(q, k, v, d, n),
            reference,
            [drawn(1, 2, 20, 4) for _ in range(3)],
            [[ROWS]] * 3,
            [{0: sizes}] * 3,
        )
    assert graphs_compiled() - before == 1


@pytest.mark.ranks(2, processes=False)
def test_torch_refuses_the_backward_pass_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as it is without `backward_on_the_cpu`
    q = sc.distribute_tensor(drawn(1, 2, 20, 4), mesh(), [ROWS]).requires_grad_()
    for call in (flex_attention, torch.compile(flex_attention, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match="FlexAttention does not support backward on CPU"):
            call(q, q, q)
    q = q.detach()
    assert flex_attention(q, q, q).placements == (ROWS,)  # type: ignore[union-attr]


def random_function(seed: int) -> tuple[Any, Any, list[tuple[int, ...]], Tensor | None]:
    """A function, its reference, the shapes of its inputs, and what it has a gradient for besides."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mask, group, heads = draw.choice([None, *MASKS]), draw.choice([1, 2]), draw.randint(1, 2)
    rows, columns = (20, 20) if mask else (draw.randint(1, 12), draw.randint(1, 12))
    bias = drawn(heads * group).requires_grad_() if draw.random() < 0.5 else None
    structure = None if mask is None else block_mask(mask, heads * group, rows, columns)
    score_mod = None if bias is None else biased(bias)
    return (
        lambda q, k, v: flex_attention(q, k, v, score_mod, structure, enable_gqa=group > 1),
        lambda q, k, v: by_hand(q, k, v, mask, bias),
        [(2, heads * group, rows, 4), (2, heads, columns, 4), (2, heads, columns, draw.choice([3, 4]))],
        bias,
    )


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(("first", "count"), often([(0, 1), *((n, 20) for n in range(0, 100, 20))], 1))
def test_random_cases(first: int, count: int) -> None:
    """Functions with five shards each, eagerly and by one graph."""
    for seed in range(first, first + count):
        torch._dynamo.reset()
        function, reference, shapes, bias = random_function(seed)
        call = torch.compile(function, fullgraph=True, backend="aot_eager")
        before = graphs_compiled()
        for each, case in itertools.product((call, function), range(5)):
            assert each is call or case or graphs_compiled() - before == 1
            draw = random.Random(f"{seed} {case}")
            torch.manual_seed(5 * seed + case)
            values = [drawn(*shape) for shape in shapes]
            partition = [{0: drawn_sizes(draw, shape[2])} for shape in shapes[:2]]
            check(each, reference, values, [[ROWS]] * 3, [*partition, partition[1]], bias)


def drawn_sizes(draw: random.Random, rows: int) -> list[int]:
    ends = sorted(draw.choices(range(rows + 1), k=2))
    return [ends[0], ends[1] - ends[0], rows - ends[1]]
