"""A pending sum that several eager ops read is reduced once, until it is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

import shardcompile as sc
from shardcompile.testing import mesh
from tests.support.sent import Sent


def _rows() -> tuple[Tensor, Any]:
    full = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return full, sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [4, 0, 3]})


def _twice(y: Any) -> list[Any]:
    return [y.exp(), y.sigmoid() + y.abs()]


def _written(y: Any) -> list[Any]:
    before = y.exp()
    y.mul_(2)
    return [before, y.exp(), y.sin()]


def _written_by_a_view(y: Any) -> list[Any]:
    before = y.exp()
    y[:1].zero_()
    return [before, y.exp()]


def _copied_over(y: Any) -> list[Any]:
    before = y.exp()
    y.copy_(torch.arange(3.0, dtype=torch.float64))
    return [before, y.exp()]


def _result_is_written(y: Any) -> list[Any]:
    same, _ = torch.native_dropout(y, 0.5, False)
    same = same.exp_() if same is not y else same.exp()
    return [same, y.cos()]


def _no_copy(y: Any) -> list[Any]:
    found = [y.to(torch.float64), y.contiguous(), y.nan_to_num()]
    found[-1].zero_()
    return [*found, y.cos()]


def _data(y: Any) -> list[Any]:
    before = y.exp()
    y.data.mul_(2)
    then = y.exp()
    other = y.data
    of_other = other.exp()
    y.mul_(3)
    of_both = [of_other, other.exp(), y.exp()]
    y.data = torch.ones_like(y)
    return [before, then, *of_both, y.exp()]


def _detached(y: Any) -> list[Any]:
    before = y.exp()
    y.detach().mul_(2)
    return [before, y.exp()]


def _view_of_what_is_written(y: Any) -> list[Any]:
    view = y.view(3, 1)
    found = [view.exp()]
    y.mul_(2)
    found.append(view.exp())
    torch._foreach_mul_([y], 2)
    found += [view.exp(), y.exp()]
    view.t_()
    return [*found, view.exp()]


def _written_as_a_result(y: Any) -> list[Any]:
    before = y.exp()
    torch.mul(y, 3, out=y)
    return [before, y.exp()]


PROGRAMS: dict[str, tuple[Callable[[Any], list[Any]], int | None]] = {
    "twice": (_twice, 1),
    "written": (_written, 2),
    "written by a view": (_written_by_a_view, None),
    "copied over": (_copied_over, None),
    "a result is written": (_result_is_written, None),
    "no copy": (_no_copy, None),
    "data": (_data, None),
    "detached": (_detached, None),
    "a view of what is written": (_view_of_what_is_written, None),
    "written as a result": (_written_as_a_result, None),
}
"""Programs of a pending sum, and how many reductions they need."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_plain_pytorch(name: str, inference: bool) -> None:
    run, reductions = PROGRAMS[name]
    with torch.inference_mode(inference):
        full, x = _rows()
        want = run(full.sum(0))
        y = x.sum(0)
        assert y.placements[0].is_partial()
        with Sent() as sent:
            got = run(y)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
    if reductions is not None and not inference:
        assert sent.names.count("all_reduce") == reductions


@pytest.mark.ranks(3, processes=False)
def test_the_backward_pass_reads_what_the_forward_pass_has_reduced() -> None:
    full, x = _rows()

    def run(x: Any) -> Any:
        x = x.clone().requires_grad_()
        y = x.sum(0)
        (y.exp() + y.sin()).sum().backward()
        return x.grad

    with Sent() as sent:
        got = run(x)
    torch.testing.assert_close(got.full_tensor(), run(full))
    assert sent.names.count("all_reduce") == 1


@pytest.mark.ranks(3, processes=False)
def test_terms_in_memory_of_the_user_may_change_unseen() -> None:
    term = torch.ones(3, dtype=torch.float64)
    y = sc.ShardTensor.from_local(term, mesh(), [Partial()], {})
    views = [y, y.view(3, 1), y.detach(), *y.split(2)]
    for before, after in ((1.0, 3**0.5), (3.0, 3.0)):
        term.numpy()[:] = before
        for view in views:
            assert view.sqrt().full_tensor().flatten().tolist() == pytest.approx([after] * view.numel())
