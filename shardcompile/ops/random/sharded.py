"""Random ops.

What is guaranteed: a replicated value is the same on every rank; blocks on different ranks are independent;
`torch.manual_seed` on every rank makes a run reproducible; compiled and eager code obey the same contract. Values
differ from those of a single process, and between compiled and eager code.

How: the default CPU generator gives one seed per call. Along mesh dims that replicate, the first rank's seed is taken
over by the others; along mesh dims that shard, the rank's position is mixed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import wait
from shardcompile.errors import UnsupportedOpError
from shardcompile.layout import Layout, Spec, dense_stride
from shardcompile.ops import always, state
from shardcompile.ops.support.strides import in_order
from shardcompile.sharded import Sharded

aten = torch.ops.aten
_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    "random_block(Tensor like, Tensor seed, str kind, str[] group_names) -> Tensor",
    tags=[
        torch.Tag.pt2_compliant_tag,
        torch.Tag.cudagraph_unsafe,
        torch.Tag.flexible_layout,
        torch.Tag.nondeterministic_seeded,
    ],
)
_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring positions give unrelated seeds


def _random_block(like: Tensor, seed: Tensor, kind: str, group_names: list[str]) -> Tensor:
    position = 0
    for name in group_names:
        group = compat.process_group(name)
        position = position * group.size() + group.rank()
    generator = torch.Generator(like.device)
    generator.manual_seed((int(seed.item()) + position * _MIX) % (1 << 63))
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return out.uniform_(generator=generator) if kind == "uniform" else out.normal_(generator=generator)


_LIBRARY.impl("random_block", _random_block, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::random_block", lambda like, seed, kind, groups: like.new_empty(like.shape), lib=_LIBRARY
)


def _agreed_seed(layout: Layout, device: torch.device) -> Tensor:
    """A seed that all ranks along the replicating mesh dims share."""
    groups = [compat.group_name_of(layout.mesh, m) for m, p in enumerate(layout.placements) if not isinstance(p, Shard)]
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64)
    if not groups:
        return seed
    seed = seed.to(device)
    for name in groups:
        seed = wait(torch.ops._c10d_functional.broadcast(seed, 0, name))
    return seed


def _block(x: Sharded, kind: str, dtype: torch.dtype | None = None) -> Sharded:
    """Random numbers laid out like `x`, stored without gaps in the order of its strides, as `empty_like` would."""
    layout: Layout = x._spec.layout
    if any(isinstance(p, Partial) for p in layout.placements):
        raise UnsupportedOpError(f"random numbers for terms of a pending reduction: {layout.describe()}; reduce first")
    like = x._local_tensor if dtype is None else x._local_tensor.to(dtype)
    positions = [compat.group_name_of(layout.mesh, m) for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    local = torch.ops.shardcompile.random_block(like, _agreed_seed(layout, like.device), kind, positions)
    stride = dense_stride(layout.shape, x.stride())
    return type(x)._wrap(in_order(local, stride), Spec.of(layout.with_dtype(local.dtype), stride))


def _numbers_like(kind: str) -> Callable[..., Tensor]:
    def run(x: Sharded, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return _block(_reduce(x), kind, dtype)

    return run


def _reduce(x: Sharded) -> Sharded:
    """Only the shape of `x` counts: a pending reduction is dropped."""
    return aten.zeros_like.default(x) if x._spec.layout.is_partial else x


def _refuse_generator(generator: torch.Generator | None) -> None:
    if generator is not None:
        raise UnsupportedOpError("random ops on sharded tensors take their seeds from the default generator only")


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Where numbers are drawn: those of half precision would make probabilities coarse."""
    wide = dtype in (torch.float32, torch.float64) or dtype.is_complex
    return dtype if wide else torch.float32


def _refill(kind: str, transform: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """An in-place op that fills its argument."""

    def run(x: Sharded, *args: object, generator: torch.Generator | None = None, **kwargs: object) -> Tensor:
        _refuse_generator(generator)
        numbers = _block(x, kind, _precise(x.dtype) if dtype is None else dtype)
        return aten.copy_.default(x, transform(numbers, *args, **kwargs))

    return run


def _bernoulli(x: Sharded, p: float | None = None, *, generator: torch.Generator | None = None) -> Tensor:
    _refuse_generator(generator)
    x = _settle(x)
    numbers = _block(x, "uniform", _precise(x.dtype))
    return aten.lt.Tensor(numbers, x).to(x.dtype) if p is None else (numbers < p).to(x.dtype)


def _bernoulli_from(x: Sharded, p: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    _refuse_generator(generator)
    return aten.copy_.default(x, aten.lt.Tensor(_block(x, "uniform", _precise(x.dtype)), p))


def _settle(x: Any) -> Sharded:
    return x.redistribute(placements=x._spec.layout.reduced().placements) if x._spec.layout.is_partial else x


def _native_dropout(x: Sharded, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    x = _settle(x)
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _block(x, "uniform", torch.float32) >= p
    scale = 0.0 if p >= 1 else 1 / (1 - p)
    return x * keep * scale, keep


def _integers_like(
    x: Sharded, low: int, high: int | None = None, *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    low, high = (0, low) if high is None else (low, high)
    return _whole_numbers(_block(_reduce(x), "uniform", torch.float64), low, high).to(dtype or x.dtype)


def _cauchy(u: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * (math.pi * (u - 0.5)).tan()


def _geometric(u: Tensor, p: float) -> Tensor:
    return (torch.log1p(-u) / math.log1p(-p)).floor() + 1


def _whole_numbers(u: Tensor, low: int, high: int | None = None) -> Tensor:
    low, high = (0, low) if high is None else (low, high)
    return (u * (high - low)).floor() + low


def _normal(mean: Tensor, std: Tensor | float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """`torch.normal` of tensors of means or deviations."""
    _refuse_generator(generator)
    like = mean + std  # both sharded or plain, broadcast
    return aten.randn_like.default(like) * std + mean


state(aten.rand_like.default, sharded=always(_numbers_like("uniform")))
state(aten.randn_like.default, sharded=always(_numbers_like("normal")))
state(aten.randint_like.default, sharded=always(_integers_like))
state(aten.randint_like.low_dtype, sharded=always(_integers_like))
state(aten.uniform_.default, sharded=always(_refill("uniform", lambda u, low=0.0, high=1.0: u * (high - low) + low)))
state(aten.normal_.default, sharded=always(_refill("normal", lambda z, mean=0.0, std=1.0: z * std + mean)))
state(aten.log_normal_.default, sharded=always(_refill("normal", lambda z, mean=1.0, std=2.0: (z * std + mean).exp())))
state(aten.exponential_.default, sharded=always(_refill("uniform", lambda u, rate=1.0: -torch.log1p(-u) / rate)))
state(aten.cauchy_.default, sharded=always(_refill("uniform", _cauchy)))
state(aten.geometric_.default, sharded=always(_refill("uniform", _geometric)))
state(aten.random_.to, sharded=always(_refill("uniform", _whole_numbers, torch.float64)))
state(getattr(aten.random_, "from"), sharded=always(_refill("uniform", _whole_numbers, torch.float64)))
state(aten.normal.Tensor_Tensor, sharded=always(_normal))
state(aten.normal.Tensor_float, sharded=always(_normal))
state(aten.normal.float_Tensor, sharded=always(_normal))
state(aten.bernoulli_.float, sharded=always(_refill("uniform", lambda u, p=0.5: u < p)))
state(aten.bernoulli_.Tensor, sharded=always(_bernoulli_from))
state(aten.bernoulli.default, sharded=always(_bernoulli))
state(aten.bernoulli.p, sharded=always(_bernoulli))
state(aten.native_dropout.default, sharded=always(_native_dropout))
