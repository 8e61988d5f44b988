"""Whether strides allow a view is worked out as torch's kernel does it."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from shardcompile.ops.support.local_shards import _can_be_viewed


def _draw(numbers: random.Random) -> tuple[Tensor, list[int]]:
    """A tensor with some order of dims and gaps, and a shape of as many elements."""
    shape = [numbers.choice([1, 1, 2, 3, 4]) for _ in range(numbers.randint(1, 4))]
    stored = torch.empty([n + numbers.choice([0, 0, 1]) for n in shape])
    x = stored[tuple(slice(0, n) for n in shape)].permute(numbers.sample(range(len(shape)), len(shape)))
    wanted, left = [], x.numel()
    while left > 1:
        wanted.append(numbers.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= wanted[-1]
    numbers.shuffle(wanted)
    if wanted and numbers.random() < 0.2:
        wanted[numbers.randrange(len(wanted))] = -1
    return x, wanted


def _viewed(x: Tensor, shape: list[int]) -> bool:
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def test_views_are_those_that_torch_makes() -> None:
    numbers = random.Random(0)
    drawn = [_draw(numbers) for _ in range(3000)]
    told = [_viewed(x, shape) for x, shape in drawn]
    assert [_can_be_viewed(x, shape) for x, shape in drawn] == told
    assert 300 < sum(told) < 2700
