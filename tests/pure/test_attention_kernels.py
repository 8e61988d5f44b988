"""Attention of a shard of queries over a shard of keys, against products and a softmax in float64."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from shardcompile.ops.attention.kernels import attend, attend_backward, pieces_of


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shift: int) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.arange(q.shape[2]).unsqueeze(1) + shift >= torch.arange(k.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    lse = scores.logsumexp(-1)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0) @ v, lse


@pytest.mark.parametrize("causal", [False, True])
def test_pieces_cover_each_score_that_counts_once(causal: bool) -> None:
    for rows, columns, shift in itertools.product(range(6), range(6), range(-7, 8)):
        counted = torch.zeros(rows, columns, dtype=torch.int64)
        for r, c, square in pieces_of(rows, columns, causal, shift):
            shard = torch.ones_like(counted[r, c])
            assert shard.numel()
            assert not square or shard.shape[0] == shard.shape[1]
            counted[r, c] += shard.tril() if square else shard
        seen = torch.arange(rows).unsqueeze(1) + shift >= torch.arange(columns)
        assert torch.equal(counted, (seen if causal else torch.ones_like(seen)).long()), (rows, columns, shift)


def random_shapes() -> list[tuple[int, ...]]:
    numbers = random.Random(0)
    return [
        (numbers.choice([0, 1, 2]), numbers.choice([0, 2, 4]), numbers.choice([0, 1, 5]), numbers.choice([0, 1, 6]))
        for _ in range(40)
    ]


@pytest.mark.parametrize("kind", ["plain", "causal", "added", "bools", "rows hidden"])
def test_forward_and_backward_are_those_of_the_products(kind: str) -> None:
    torch.manual_seed(0)
    for (batch, heads, rows, columns), shift in zip(random_shapes(), itertools.cycle(range(-6, 7)), strict=False):
        own = heads // 2 if rows % 2 else heads
        q = torch.randn(batch, rows, heads, 4, dtype=torch.float64).transpose(1, 2)
        k, v = (torch.randn(batch, own, columns, 4, dtype=torch.float64) for _ in range(2))
        mask = None
        if kind == "added":
            mask = torch.randn(batch, 1, rows, columns, dtype=torch.float64)
        elif kind == "bools":
            mask = torch.rand(1, heads, rows, columns) < 0.7
        elif kind == "rows hidden":
            mask = torch.zeros(1, 1, rows, columns, dtype=torch.float64)
            mask[:, :, rows // 2 :] = -math.inf
        causal = kind == "causal"
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected, lse = by_hand(*leaves, mask, causal, shift)  # type: ignore[arg-type]
        out, denominator = attend(q, k, v, mask, causal, shift, 0.5)
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(denominator, lse.detach())
        fake = torch.empty(batch, rows, heads, 4, device="meta").transpose(1, 2)
        assert out.stride() == fake.stride() or not out.numel()
        grad = torch.randn_like(out)
        grads = attend_backward(grad, q, k, v, out, denominator, mask, causal, shift, 0.5)
        expected_grads = torch.autograd.grad(expected, leaves, grad)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_shards_of_keys_add_up(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7) < 0.5 if masked else None
    out, lse = attend(q, k, v, mask, not masked, 2, 0.5)
    grad = torch.randn_like(out)
    whole = attend_backward(grad, q, k, v, out, lse, mask, not masked, 2, 0.5)
    shards = [
        attend_backward(
            *(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse),
            *(None if mask is None else mask[..., a:b], not masked, 2 - a, 0.5),
        )
        for a, b in ((0, 3), (3, 3), (3, 7))
    ]
    torch.testing.assert_close(sum(b[0] for b in shards), whole[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([b[i] for b in shards], 2), whole[i])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["plain", "causal", "added"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_of_gpus(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    for shift in (0, 5, -5):
        q, k, v = (torch.randn(2, n, r, 16, dtype=dtype, device="cuda") for n, r in ((4, 37), (2, 41), (2, 41)))
        mask = torch.randn(2, 1, 37, 41, dtype=dtype, device="cuda") if kind == "added" else None
        out, lse = attend(q, k, v, mask, kind == "causal", shift, 0.25)
        grad = torch.randn_like(out)
        grads = attend_backward(grad, q, k, v, out, lse, mask, kind == "causal", shift, 0.25)
        q, k, v = (x.cpu().double().requires_grad_() for x in (q, k, v))
        expected, _ = by_hand(q, k, v, None if mask is None else mask.cpu().double(), kind == "causal", shift)
        theirs = torch.autograd.grad(expected, [q, k, v], grad.cpu().double())
        for ours, reference in zip([out, *grads], [expected, *theirs], strict=True):
            torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-2, atol=1e-2)
