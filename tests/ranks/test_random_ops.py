"""Random ops on sharded tensors: every op that torch tags as such, distributions, generators, gradients, graphs."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, distributions, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardcompile as sc
from shardcompile import ShardTensor, config
from shardcompile.errors import UnsupportedOpError
from shardcompile.testing import rank, world_size
from tests.support.random_cases import ELSEWHERE, RandomOp, call_of, random_ops
from tests.support.tiers import often, spread

aten = torch.ops.aten
MANY = {0: [350, 0, 250]}
FEW = [{0: [5, 0, 2]}, {0: [0, 6, 1]}, {0: [3, 3, 1]}]
EQUAL = {0: [30, 30, 30]}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def sharded(full: Tensor, sizes: dict[int, list[int]], dim: int = 0) -> ShardTensor:
    local = full.split(sizes[0], dim)[rank()].clone()
    return ShardTensor.from_local(local, mesh_1d(), [Shard(dim)], sizes)


def replicated(full: Tensor) -> ShardTensor:
    return ShardTensor.from_local(full.clone(), mesh_1d(), [Replicate()])


def pending(full: Tensor) -> ShardTensor:
    return ShardTensor.from_local(full * [0.25, 0.25, 0.5][rank()], mesh_1d(), [Partial()])


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def full_of(results: list[Any]) -> list[Tensor]:
    return [x.full_tensor() if isinstance(x, ShardTensor) else x for x in results]


def same_moments(drawn: Tensor, expected: Tensor) -> None:
    """Mean and variance of a bounded function of both, since not every distribution has moments of its own."""
    for power in (1, 2):
        a, b = (x.double().flatten().div(3).atan() ** power for x in (drawn, expected))
        error = math.sqrt(float(a.var() / a.numel() + b.var() / b.numel())) + 1e-12
        assert abs(float(a.mean() - b.mean())) < 6 * error


# Every op


def _covered() -> list[RandomOp]:
    return [call_of(op) for op in random_ops() if op.name() not in ELSEWHERE]


def test_every_random_op_of_torch_is_called_here_or_has_a_reason_why_not() -> None:
    named = {op.name() for op in random_ops()}
    assert len(_covered()) > 80
    # Some names are of other versions of torch, or are there as soon as Inductor is imported.
    assert len(named & set(ELSEWHERE)) > 40


@pytest.mark.ranks(3, processes=False, timeout=240)
def test_every_random_op_draws_the_same_where_replicated_and_again_by_the_same_seed() -> None:
    """The generators of the ranks are in different states."""
    for case in _covered():
        for lay_out in (replicated, pending):
            full = case.values(21)
            torch.manual_seed(rank())
            first, second = full_of(case.draw(lay_out(full))), full_of(case.draw(lay_out(full)))
            torch.manual_seed(rank())
            again = full_of(case.draw(lay_out(full)))
            plain = case.draw(full)
            for a, _, c, p in zip(first, second, again, plain, strict=True):
                assert (a.shape, a.dtype) == (p.shape, p.dtype), case
                assert all(torch.equal(x, a) for x in everywhere(a)), case
                assert torch.equal(a, c), case
            assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True)), case


@pytest.mark.ranks(3, processes=False, timeout=240)
def test_shards_of_every_random_op_have_the_moments_of_plain_ones_and_are_independent() -> None:
    for case in _covered():
        full = case.values(600)
        dim = full.ndim - 2
        torch.manual_seed(3)
        plain = case.draw(full)
        for at, sizes in ((dim, MANY), (full.ndim - 1, {0: [1, 0, 3]})):
            torch.manual_seed(4)
            drawn = full_of(case.draw(sharded(full, sizes, at)))
            states = everywhere(torch.get_rng_state())
            assert all(torch.equal(s, states[0]) for s in states), f"{case}: generators of ranks differ afterwards"
            torch.manual_seed(4)
            again = full_of(case.draw(sharded(full, sizes, at)))
            for a, b, p in zip(drawn, again, plain, strict=True):
                assert (a.shape, a.dtype) == (p.shape, p.dtype), case
                assert torch.equal(a, b), case
                same_moments(a, p)
        alike = full.narrow(dim, 0, 30)  # were the streams of shards the same, so would be the shards
        torch.manual_seed(5)
        out = case.draw(sharded(torch.cat([alike] * 3, dim), EQUAL, dim))
        for first, second in itertools.combinations(range(3), 2):
            parts = [x.chunk(3, dim) for x in full_of(out)]
            assert any(not torch.equal(p[first], p[second]) for p in parts), case


@pytest.mark.ranks(4, processes=False, timeout=120)
def test_streams_over_two_mesh_dims_follow_the_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("poisson", "_standard_gamma", "multinomial", "native_dropout", "uniform", "_sample_dirichlet"):
        case = call_of(getattr(aten, name).default)
        for placements in ([Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate()] * 2):
            x = ShardTensor.from_local(case.values(40), mesh, placements)
            torch.manual_seed(7 if placements[0] == placements[1] else 7 + rank())
            shards = everywhere([y.to_local() for y in case.draw(x)])
            for a, b in itertools.combinations(range(4), 2):
                copies = all(
                    p == Replicate() or i == j for p, i, j in zip(placements, divmod(a, 2), divmod(b, 2), strict=True)
                )
                equal = all(torch.equal(s, t) for s, t in zip(shards[a], shards[b], strict=True))
                assert equal == copies, (name, placements, a, b)


@pytest.mark.ranks(3, processes=False)
def test_layouts_of_what_is_drawn_are_those_of_the_operands() -> None:
    x = sharded(values(7, 4).exp(), FEW[0])
    y = sharded(values(7, 4).exp(), {0: [1, 0, 3]}, 1)
    for function in (torch.poisson, torch._standard_gamma, torch.rand_like, torch._sample_dirichlet, nnf.rrelu):
        for z in (x, y):
            assert function(z).sharding.describe_placements() == z.sharding.describe_placements(), function
    assert torch.multinomial(x, 2).sharding.describe_placements() == "S(0)[5,0,2]"
    assert torch.multinomial(y, 2).sharding.describe_placements() == "R"  # rows of probabilities have to be whole
    assert torch.multinomial(sharded(values(7).exp(), FEW[0]), 3).sharding.describe_placements() == "R"


# Layers, distributions, functions


def _module_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "gru": lambda x: _module_of(lambda: nn.GRU(4, 3, 2, dropout=0.5))(x)[0],
    "lstm": lambda x: _module_of(lambda: nn.LSTM(4, 3, 2, dropout=0.5))(x)[0],
    "rnn": lambda x: _module_of(lambda: nn.RNN(4, 3, 2, dropout=0.5))(x)[0],
    "rrelu of a module": nn.RReLU(),
    "gumbel_softmax": nnf.gumbel_softmax,
    "gumbel_softmax, hard": functools.partial(nnf.gumbel_softmax, hard=True),
    "dropout": nnf.dropout,
    "alpha_dropout": functools.partial(nnf.alpha_dropout, training=True),
    "dropout1d": lambda x: nnf.dropout1d(x.expand(5, *x.shape)),
    "dropout2d": lambda x: nnf.dropout2d(x.expand(2, 5, *x.shape)),
    "dropout3d": lambda x: nnf.dropout3d(x.expand(2, 5, 1, *x.shape)),
    "feature_alpha_dropout": lambda x: nnf.feature_alpha_dropout(x.expand(2, 5, 1, *x.shape), training=True),
    "fractional_max_pool2d": lambda x: nnf.fractional_max_pool2d(
        x.expand(2, 3, *x.shape) * values(2, 3, 7, 4), 2, output_size=(3, 2)
    ),
    "fractional_max_pool3d": lambda x: nnf.fractional_max_pool3d(
        x.expand(3, 7, *x.shape) * values(3, 7, 7, 4), 2, output_size=(3, 3, 2)
    ),
    "attention with dropout": lambda x: nnf.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x.detach().clone()),
    "xavier_normal_": lambda x: nn.init.xavier_normal_(x.detach().clone()),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.detach().clone()),
    "orthogonal_": lambda x: nn.init.orthogonal_(x.detach().clone()),
    "next token": lambda x: torch.multinomial(x.expand(2, 7, 4)[:, -1].softmax(-1), 1),
    "Categorical": lambda x: distributions.Categorical(logits=x).sample(),
    "Categorical, many": lambda x: distributions.Categorical(logits=x).sample((5,)),
    "Multinomial": lambda x: distributions.Multinomial(10, logits=x).sample(),
    "OneHotCategoricalStraightThrough": lambda x: distributions.OneHotCategoricalStraightThrough(logits=x).rsample(),
    "Bernoulli": lambda x: distributions.Bernoulli(logits=x).sample(),
    "Binomial": lambda x: distributions.Binomial(10, logits=x).sample(),
    "Poisson": lambda x: distributions.Poisson(x.exp()).sample(),
    "Gamma": lambda x: distributions.Gamma(x.exp(), x.exp()).rsample(),
    "Beta": lambda x: distributions.Beta(x.exp(), x.exp() + 1).rsample(),
    "Dirichlet": lambda x: distributions.Dirichlet(x.exp()).rsample(),
    "Chi2": lambda x: distributions.Chi2(x.exp()).rsample(),
    "Exponential": lambda x: distributions.Exponential(x.exp()).rsample(),
    "Laplace": lambda x: distributions.Laplace(x, x.exp()).rsample(),
    "Cauchy": lambda x: distributions.Cauchy(x, x.exp()).rsample(),
    "Geometric": lambda x: distributions.Geometric(x.sigmoid()).sample(),
    "Normal": lambda x: distributions.Normal(x, x.exp()).sample(),
}
"""Where plain tensors of random numbers play no part."""

WITH_PLAIN_NOISE: dict[str, Callable[[Any], Any]] = {
    "Normal, reparametrised": lambda x: distributions.Normal(x, x.exp()).rsample(),
    "LogNormal": lambda x: distributions.LogNormal(x, x.exp()).rsample(),
    "Uniform": lambda x: distributions.Uniform(x, x + 1).rsample(),
    "RelaxedBernoulli": lambda x: distributions.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "StudentT": lambda x: distributions.StudentT(x.exp()).rsample(),
    "svd_lowrank": lambda x: torch.svd_lowrank(x, 2)[1],
    "pca_lowrank": lambda x: torch.pca_lowrank(x, 2)[1],
    "a permutation": lambda x: x[torch.randperm(7)],
}
"""What torch draws as a plain tensor, from the default generator of each rank, which has to be in the same state."""


@pytest.mark.ranks(3, processes=False, timeout=120)
@pytest.mark.parametrize("name", [*FUNCTIONS, *WITH_PLAIN_NOISE])
def test_functions_and_distributions_draw_in_every_layout(name: str) -> None:
    function = (FUNCTIONS | WITH_PLAIN_NOISE)[name]
    full = values(7, 4)
    plain = function(full.clone())
    for x in (replicated(full), sharded(full, FEW[0]), sharded(full, {0: [1, 0, 3]}, 1), pending(full)):
        torch.manual_seed(rank() if name in FUNCTIONS else 1)
        out = function(x)
        torch.manual_seed(rank() if name in FUNCTIONS else 1)
        again = function(x).full_tensor()
        whole = out.full_tensor()
        assert (whole.shape, whole.dtype) == (plain.shape, plain.dtype)
        assert torch.equal(whole, again)
        assert whole.isfinite().all()
        assert all(torch.equal(v, whole) for v in everywhere(whole))


@pytest.mark.ranks(3, processes=False)
def test_features_are_dropped_whole_across_shards() -> None:
    x = sharded(torch.ones(4, 30, 7, 6), FEW[0], 2)
    torch.manual_seed(rank())
    out = nnf.dropout2d(x).full_tensor()
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(out, out[..., :1, :1].expand_as(out))


# Gradients


def _gamma_gradient(x: Tensor, sample: Tensor) -> Tensor:
    return torch._standard_gamma_grad(x, sample)


def _dirichlet_gradient(x: Tensor, sample: Tensor) -> Tensor:
    # The gradient of the sum of squares, as `torch.distributions.Dirichlet` works it out.
    total = x.sum(-1, True).expand_as(x)
    grad = 2 * sample
    return torch._dirichlet_grad(sample, x, total) * (grad - (sample * grad).sum(-1, True))


GRADIENTS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "gamma": (torch._standard_gamma, lambda x, y: 2 * y * _gamma_gradient(x, y)),
    "dirichlet": (lambda x: distributions.Dirichlet(x).rsample(), _dirichlet_gradient),
    "rrelu": (lambda x: nnf.rrelu(-x, training=True), lambda x, y: 2 * y * (y / x)),
    "rrelu_": (lambda x: nnf.rrelu_(-x, training=True), lambda x, y: 2 * y * (y / x)),
    "rrelu, not trained": (lambda x: nnf.rrelu(-x), lambda x, y: 2 * y * (y / x)),
    "dropout": (nnf.dropout, lambda x, y: 2 * y * (y / x)),
    "checkpoint": (lambda x: checkpoint(_drop_twice, x, use_reentrant=False), lambda x, y: 2 * y * (y / x)),
    "transposed": (lambda x: nnf.rrelu(-x.t(), training=True).t(), lambda x, y: 2 * y * (y / x)),
}
"""A function, and the gradient of the sum of squares of what it drew."""


def _drop_twice(x: Any) -> Any:
    return nnf.dropout(nnf.rrelu(-x, training=True), 0.3)  # torch reads the noise of an `rrelu` at the end too early


@pytest.mark.ranks(3, processes=False, timeout=240)
@pytest.mark.parametrize(
    ("compiled", "name"),
    [*((False, name) for name in GRADIENTS), *often([(True, name) for name in spread(GRADIENTS, 3)], 4)],
)
def test_gradients_are_those_of_what_was_drawn(name: str, compiled: bool) -> None:
    function, expected = GRADIENTS[name]
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    full = values(7, 4).exp()
    for x in (replicated(full), sharded(full, FEW[0]), sharded(full, FEW[1]), sharded(full, {0: [1, 0, 3]}, 1)):
        x.requires_grad_()
        torch.manual_seed(rank())
        out = run(x)
        (out * out).sum().backward()
        drawn = out.detach().full_tensor()
        torch.testing.assert_close(x.grad.full_tensor(), expected(full, drawn))
        torch.manual_seed(rank())
        assert torch.equal(function(x).detach().full_tensor(), drawn)  # eager and compiled code draw alike here


# Graphs


def _many(x: Any, probabilities: Any) -> tuple[Any, ...]:
    noise = torch.zeros_like(x)
    return (
        torch.poisson(x),
        torch.binomial(x.floor() + 9, probabilities),
        torch._standard_gamma(x),
        torch._sample_dirichlet(x),
        torch.multinomial(x, 2),
        torch.multinomial(x, 9, True),
        torch.bernoulli(probabilities),
        torch.normal(x, probabilities),
        torch.randint_like(x, 2, 9),
        torch.native_dropout(x, 0.5, True)[1],
        torch.empty_like(x).exponential_(2.0),
        torch.empty_like(x).uniform_(0.25, 0.5),
        aten.rrelu_with_noise(-x, noise, 0.1, 0.3, True),
        noise,
        nnf.gumbel_softmax(x),
        distributions.Beta(x, x, validate_args=False).rsample(),
    )


def _pieces(sizes: dict[int, list[int]], seed: int) -> tuple[ShardTensor, ShardTensor]:
    return sharded(values(7, 4, seed=seed).exp(), sizes), sharded(values(7, 4, seed=seed).sigmoid(), sizes)


@pytest.mark.ranks(3, processes=False, timeout=240)
@pytest.mark.parametrize("backend", ["aot_eager", "shardcompile"])
def test_one_graph_draws_for_every_partition_what_eager_code_draws(backend: str) -> None:
    compiled = torch.compile(_many, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, sizes in enumerate(FEW):
            torch.manual_seed(rank())
            out = compiled(*_pieces(sizes, seed))
            torch.manual_seed(rank())
            for a, b in zip(out, _many(*_pieces(sizes, seed)), strict=True):
                assert a.sharding == b.sharding
                torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=1e-12, atol=1e-12)


# Generators


@pytest.mark.ranks(3, processes=False)
def test_generators_that_are_passed_give_the_seeds() -> None:
    x = sharded(values(7, 4).exp(), FEW[0])
    draws: list[Callable[[Any, torch.Generator], Any]] = [
        lambda x, g: torch.poisson(x, g),
        lambda x, g: torch.multinomial(x, 2, generator=g),
        lambda x, g: x.clone().normal_(generator=g),
        lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
        lambda x, g: aten._sample_dirichlet.default(x, g),
        lambda x, g: torch.rand(7, 4, dtype=x.dtype, generator=g, out=x.clone()),
    ]
    for draw in draws:
        for y in (x, replicated(values(7, 4).exp()), sharded(values(7, 4).exp(), {0: [1, 0, 3]}, 1)):
            before = torch.get_rng_state()
            first = torch.Generator().manual_seed(rank())
            a, b = draw(y, first).full_tensor(), draw(y, first).full_tensor()
            c = draw(y, torch.Generator().manual_seed(rank())).full_tensor()
            assert torch.equal(torch.get_rng_state(), before)
            assert torch.equal(a, c)
            assert not torch.equal(a, b)
            assert all(torch.equal(v, a) for v in everywhere(a))


# Ops that nobody listed


_LIBRARY = torch.library.Library("random_ops_of_tests", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
_LIBRARY.define("jitter(Tensor x, float by) -> Tensor", tags=_TAGS)
_LIBRARY.define("ruled_jitter(Tensor x, float by) -> Tensor", tags=_TAGS)
_LIBRARY.define("ruled_jitter_(Tensor(a!) x, float by) -> ()", tags=_TAGS)
_LIBRARY.define("shake(Tensor(a!) x, float by) -> ()", tags=_TAGS)  # there is no op that returns what it writes


def _jitter(x: Tensor, by: float) -> Tensor:
    return x + by * torch.rand_like(x)


def _jitter_(x: Tensor, by: float) -> None:
    x.add_(by * torch.rand_like(x))


for _name, _kernel in (
    ("jitter", _jitter),
    ("ruled_jitter", _jitter),
    ("ruled_jitter_", _jitter_),
    ("shake", _jitter_),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _fake = (lambda x, by: None) if _kernel is _jitter_ else (lambda x, by: torch.empty_like(x))
    torch.library.register_fake(f"random_ops_of_tests::{_name}", _fake, lib=_LIBRARY)
MINE: Any = torch.ops.random_ops_of_tests


@sc.register_sharding(MINE.ruled_jitter.default)
def _rows_of_jitter(x: Any, by: float) -> list[tuple[list[Any], list[Any]]]:
    return [([Shard(0)], [Shard(0), None])]


@sc.register_sharding([MINE.ruled_jitter_.default, MINE.shake.default])
def _rows_of_jitter_(x: Any, by: float) -> list[tuple[list[Any], list[Any]]]:
    return [([], [Shard(0), None])]


def _written(op: Any) -> Callable[[Any], Any]:
    def draw(x: Any) -> Any:
        y = x.clone()
        op(y, 1.0)
        return y

    return draw


def _custom() -> Iterator[tuple[Callable[[Any], Any], str]]:
    yield lambda x: MINE.jitter(x, 1.0), "R"
    yield lambda x: MINE.ruled_jitter(x, 1.0), "S(0)[30,30,30]"
    yield _written(MINE.ruled_jitter_), "S(0)[30,30,30]"
    yield _written(MINE.shake), "S(0)[30,30,30]"


@pytest.mark.ranks(3, processes=False, timeout=120)
@pytest.mark.parametrize("compiled", [False, True])
def test_custom_ops_with_the_tag_keep_the_contract(compiled: bool) -> None:
    for draw, layout in _custom():
        run = torch.compile(draw, fullgraph=True, backend="aot_eager") if compiled else draw
        before = torch.get_rng_state()
        torch.manual_seed(rank())
        x = replicated(torch.zeros(5, 3))
        copies = everywhere(run(x).to_local())
        assert all(torch.equal(c, copies[0]) for c in copies)
        torch.manual_seed(rank())
        assert torch.equal(run(x).to_local(), copies[0])
        torch.manual_seed(2)
        out = run(sharded(torch.zeros(90, 3), EQUAL))
        assert out.sharding.describe_placements() == layout
        a, b, c = out.full_tensor().chunk(3)
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)
        assert float(out.full_tensor().mean()) == pytest.approx(0.5, abs=0.1)
        states = everywhere(torch.get_rng_state())
        assert all(torch.equal(s, states[0]) for s in states)
        torch.set_rng_state(before)


@pytest.mark.ranks(3, processes=False)
def test_what_is_gathered_to_be_drawn_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    from shardcompile.ops.support import gather_log

    gather_log._LOGGED_BYTES.pop(MINE.jitter.default, None)
    sc.dispatch.engine.clear_cache()
    with caplog.at_level(logging.INFO, logger="shardcompile"):
        MINE.jitter(sharded(torch.zeros(7, 3), FEW[0]), 1.0)
    dist.barrier()
    assert any("random_ops_of_tests.jitter" in r.getMessage() for r in caplog.records)


@pytest.mark.ranks(3, processes=False)
def test_what_has_no_way_is_refused_with_a_way_out() -> None:
    x = sharded(values(2, 2, 7, 4), FEW[0], 2)
    with pytest.raises(UnsupportedOpError, match=r"dropout.*MATH"):
        aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)
    old, config.fallback = config.fallback, "error"
    try:
        with pytest.raises(UnsupportedOpError, match="register_sharding"):
            MINE.jitter(sharded(torch.zeros(7, 3), FEW[0]), 2.0)
    finally:
        config.fallback = old
