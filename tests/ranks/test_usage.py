"""PyTorch's own tools around sharded tensors: optimizers, clipping, autocast, checkpointing, modes, random numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardcompile as sc
from shardcompile import ShardTensor
from shardcompile.testing import assert_matches_single_device, rank, world_size

SIZES = {2: [6, 3], 3: [5, 0, 4], 4: [1, 0, 6, 2]}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def sharded(full: Tensor) -> ShardTensor:
    sizes = SIZES[world_size()]
    return sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh_1d(), [Shard(0)], {0: sizes})


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 2)).double()


def shard_parameters(model: nn.Module) -> nn.Module:
    """Every parameter whose first dim has 9 rows becomes sharded, in uneven shards."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.shape[0] == 9:
                setattr(module, name, nn.Parameter(sharded(p.detach())))
    return model


OPTIMIZERS: dict[str, Callable[[Any, dict[str, Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p, o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **o),
    "Adam": lambda p, o: torch.optim.Adam(p, lr=0.01, amsgrad=True, **o),
    "AdamW": lambda p, o: torch.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, o: torch.optim.Adagrad(p, lr=0.1, **o),
}
MORE: dict[str, Callable[[Any, dict[str, Any]], torch.optim.Optimizer]] = {
    "RMSprop": lambda p, o: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, **o),
    "Adamax": lambda p, o: torch.optim.Adamax(p, lr=0.01, **o),
    "NAdam": lambda p, o: torch.optim.NAdam(p, lr=0.01, **o),
    "RAdam": lambda p, o: torch.optim.RAdam(p, lr=0.01, **o),
    "Adadelta": lambda p, o: torch.optim.Adadelta(p, **o),
    "Rprop": lambda p, o: torch.optim.Rprop(p, **o),
    "ASGD": lambda p, o: torch.optim.ASGD(p, **o),
}


def _train(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, clip: Callable[[Any], Any] | None
) -> list[float]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nnf.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        losses.append(float(loss.full_tensor() if isinstance(loss, ShardTensor) else loss))
    return losses


def _same_training(
    make: Callable[[Any, dict[str, Any]], torch.optim.Optimizer],
    options: dict[str, Any],
    clip: Callable[[Any], Any] | None = None,
) -> None:
    ours, theirs = shard_parameters(network()), network()
    x, y = values(9, 9, seed=1), values(9, 2, seed=2)
    got = _train(ours, sharded(x), sharded(y), make(ours.parameters(), options), clip)
    wanted = _train(theirs, x, y, make(theirs.parameters(), options), clip)
    assert got == pytest.approx(wanted, rel=1e-10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        whole = a.full_tensor() if isinstance(a, ShardTensor) else a
        torch.testing.assert_close(whole, b.detach(), rtol=1e-10, atol=1e-10, check_device=False)


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_over_sharded_parameters(name: str, kind: str) -> None:
    _same_training(
        OPTIMIZERS[name], {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}.get(kind, {"fused": True})
    )


@pytest.mark.ranks(3, timeout=120, processes=False)
def test_more_optimizers_over_sharded_parameters() -> None:
    for name, make in MORE.items():
        for options in ({"foreach": False}, {"foreach": True}):
            try:
                _same_training(make, options)
            except Exception as error:
                raise AssertionError(f"{name} {options}: {error}") from error


def _foreach_arguments(overload: Any, positions: list[Tensor]) -> list[Any]:
    made: list[Any] = []
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            continue
        if kind == "List[Tensor]":
            made.append([p + len(made) for p in positions])
        elif kind.startswith("List["):
            made.append([1.5 + i for i in range(len(positions))])
        elif kind == "Tensor":
            several = argument.name == "scalars"
            made.append(torch.linspace(1, 2, len(positions)).double() if several else torch.tensor(1.5).double())
        elif argument.has_default_value():
            break
        else:
            made.append(1.5)
    return made


@pytest.mark.ranks(3, timeout=200, processes=False)
def test_foreach_ops_give_what_they_give_on_plain_tensors() -> None:
    full = [values(9, 9, seed=s).abs() + 0.1 for s in range(3)]
    sizes, other = [5, 0, 4], [2, 6, 1]
    mesh = mesh_1d()

    def spread(tensors: list[Tensor], unlike: bool) -> list[Tensor]:
        partition = other if unlike else sizes
        return [sc.distribute_tensor(t, mesh, [Shard(0)], sharding_shapes={0: partition}) for t in tensors]

    checked = 0
    for name in sorted(n for n in dir(torch.ops.aten) if n.startswith("_foreach_")):
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, o) for o in packet.overloads() if "out" not in o):
            for unlike in (False, True):
                args = _foreach_arguments(overload, full)
                ours = [
                    spread(a, unlike and i > 0) if isinstance(a, list) and isinstance(a[0], Tensor) else a
                    for i, a in enumerate(args)
                ]
                first = next(a for a in ours if isinstance(a, list) and isinstance(a[0], Tensor))
                theirs = next(a for a in args if isinstance(a, list) and isinstance(a[0], Tensor))
                expected, got = overload(*args), overload(*ours)
                if overload._schema.is_mutable:
                    expected, got = theirs, first
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(
                        a.full_tensor(), b, equal_nan=True, msg=lambda m, o=overload: f"{o}: {m}"
                    )
                checked += 1
    assert checked >= 150  # as many as torch 2.11 has; later versions have more


@pytest.mark.ranks(3, processes=False)
def test_the_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    for bad in (False, True):
        model = nn.Linear(9, 2)
        model.weight = nn.Parameter(sc.distribute_tensor(torch.ones(2, 9), mesh_1d(), [Shard(1)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x = torch.ones(4, 9)
        x[0, 0] = float("inf") if bad else 1.0  # in the shard of the first rank only
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        weight = model.weight.full_tensor()
        wanted = torch.ones(2, 9) if bad else torch.full((2, 9), 0.6)
        torch.testing.assert_close(weight, wanted)
        assert scaler.get_scale() == (4.0 if bad else 8.0)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("foreach", [False, True, None])
def test_clipping_of_gradients(foreach: bool | None) -> None:
    clips: list[Callable[[Any], Any]] = [
        lambda p: nn.utils.clip_grad_norm_(p, 0.05, foreach=foreach),
        lambda p: nn.utils.clip_grad_norm_(p, 0.05, norm_type=float("inf"), foreach=foreach),
        lambda p: nn.utils.clip_grad_norm_(p, 0.05, norm_type=1.0, foreach=foreach),
        lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=foreach),
    ]
    for clip in clips:
        _same_training(OPTIMIZERS["SGD"], {}, clip)


@pytest.mark.ranks(3, processes=False)
def test_the_norm_that_clipping_returns_is_that_of_the_whole_gradients() -> None:
    ours, theirs = shard_parameters(network()), network()
    x = values(9, 9, seed=1)
    ours(sharded(x)).square().sum().backward()
    theirs(x).square().sum().backward()
    got = nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    got = got.full_tensor() if isinstance(got, ShardTensor) else got
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    model = network().float()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    x = values(9, 9).float()
    step = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    out, expected = step(sharded(x)), run(x)
    assert out.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(out.full_tensor(), expected, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    run(x).float().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        assert g.dtype is torch.float32
        torch.testing.assert_close(g, p.grad, rtol=2e-2, atol=4e-2)


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(compiled: bool) -> None:
    model = network()
    shard = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    step = torch.compile(shard, fullgraph=True, backend="aot_eager") if compiled else shard
    x = sharded(values(9, 9)).requires_grad_()
    y = values(9, 9).requires_grad_()
    step(x).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(y).square().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad)
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)


@pytest.mark.ranks(3, processes=False)
def test_checkpointing_repeats_dropout() -> None:
    layer = nn.Dropout(0.5)
    x = sharded(torch.ones(9, 200)).requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out.detach().full_tensor(), x.grad.full_tensor())


@pytest.mark.ranks(3, processes=False)
def test_no_grad_and_inference_mode() -> None:
    model, x = network(), values(9, 9)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(sharded(x))
            inner = sharded(x)
            inner[2:7] += 1
            inner.relu_()
        assert not out.requires_grad
        torch.testing.assert_close(out.full_tensor(), model(x).detach())
        changed = x.clone()
        changed[2:7] += 1
        torch.testing.assert_close(inner.full_tensor(), changed.relu())


@pytest.mark.ranks(3, processes=False)
def test_functional_call_and_deepcopy_and_state_dict() -> None:
    model, x = shard_parameters(network()), values(9, 9)
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, doubled, (sharded(x),))
    plain = network()
    expected = torch.func.functional_call(plain, {n: 2 * p for n, p in plain.named_parameters()}, (x,))
    torch.testing.assert_close(out.full_tensor(), expected)
    twin = copy.deepcopy(model)
    twin.load_state_dict({n: 3 * p for n, p in model.state_dict().items()})
    torch.testing.assert_close(twin[0].weight.full_tensor(), 3 * plain[0].weight)
    torch.testing.assert_close(model[0].weight.full_tensor(), plain[0].weight)


@pytest.mark.ranks(3, processes=False)
def test_results_keep_their_names() -> None:
    x = sharded(values(9, 4))
    for out in (x.max(0), x.sort(1), x.topk(2, 1), x.median(0), x.cummax(0), torch.linalg.qr(x), x.kthvalue(2, 1)):
        assert isinstance(out, tuple)
        assert type(out).__module__ == "torch.return_types"
        assert isinstance(out[0], ShardTensor)
    assert x.max(0).indices.dtype is torch.int64


@pytest.mark.ranks(3, processes=False)
def test_numbers_leave_a_tensor_only_if_they_are_the_same_everywhere() -> None:
    x = sharded(values(9, 4))
    assert x.sum().item() == pytest.approx(values(9, 4).sum().item())
    assert float(x.mean()) == pytest.approx(values(9, 4).mean().item())
    assert bool((x < 100).all())
    assert x[3, 1].item() == values(9, 4)[3, 1].item()
    with pytest.raises(RuntimeError, match="elements"):
        x.item()


# Random numbers


def _everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def _draws() -> Iterator[tuple[str, Callable[[ShardTensor], Tensor]]]:
    yield "rand_like", torch.rand_like
    yield "randn_like", torch.randn_like
    yield "dropout", lambda x: nnf.dropout(x.abs() + 1)
    yield "bernoulli", lambda x: torch.bernoulli(torch.full_like(x, 0.5))
    yield "normal_", lambda x: torch.empty_like(x).normal_()
    yield "uniform_", lambda x: torch.empty_like(x).uniform_()


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_random_values_are_independent_across_shards_and_alike_in_copies(compiled: bool) -> None:
    mesh = mesh_1d()
    for name, draw in _draws():
        function = torch.compile(draw, fullgraph=True, backend="aot_eager") if compiled else draw
        # Shards of equal size: were they drawn alike, they would be equal.
        x = sc.ShardTensor.from_local(torch.zeros(4, 16), mesh, [Shard(0)])
        torch.manual_seed(5)
        first, second = function(x).full_tensor(), function(x).full_tensor()
        torch.manual_seed(5)
        again = function(x).full_tensor()
        a, b, c = first.chunk(3)
        assert not torch.equal(a, b), name
        assert not torch.equal(b, c), name
        assert not torch.equal(first, second), name
        assert torch.equal(first, again), name
        whole = sc.distribute_tensor(torch.zeros(5, 7), mesh, [Replicate()])
        copies = _everywhere(function(whole).to_local())
        assert all(torch.equal(v, copies[0]) for v in copies), name


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]], ids=str)
def test_random_values_of_shards_on_two_mesh_dims(placements: list[Any]) -> None:
    """No two shards are alike, also where ranks swap their positions on the mesh dims; copies are."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = sc.ShardTensor.from_local(torch.zeros(4, 16), mesh, placements)
    for name, draw in _draws():
        torch.manual_seed(5)
        shards = _everywhere(draw(x).to_local())
        for a, b in itertools.combinations(range(4), 2):
            copies = placements[1] == Replicate() and a // 2 == b // 2
            assert torch.equal(shards[a], shards[b]) == copies, (name, a, b)


@pytest.mark.ranks(3, processes=False)
def test_permutations_are_the_same_on_every_rank() -> None:
    mesh = mesh_1d()
    torch.manual_seed(1)
    x = sharded(values(9, 2))
    order = torch.randperm(9)
    assert all(torch.equal(o, order) for o in _everywhere(order))
    torch.testing.assert_close(x[order].full_tensor(), values(9, 2)[order])
    assert mesh.size() == 3


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("start", ["method", "function", "grad"])
def test_a_plain_gradient_is_the_whole_one(start: str) -> None:
    full, grad = values(9, 2), values(9, 2, seed=1)
    x = sharded(full).requires_grad_()
    out = x * 2
    if start == "grad":
        (found,) = torch.autograd.grad(out, x, grad)
    else:
        _ = out.backward(grad) if start == "method" else torch.autograd.backward([out], [grad])
        found = x.grad
    assert found.placements == x.placements
    assert torch.equal(found.full_tensor(), 2 * grad)


class Accumulating(nn.Module):
    """Sums, maxima and means of sharded rows, written into plain tensors that were made before."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.result = nn.Linear(3, 4), nn.Linear(16, 2)
        self.start = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        h = torch.tanh(self.features(x))
        sums = torch.zeros(5, 4, dtype=h.dtype).index_add_(dim=0, index=group, source=h)
        started = (self.start * 2).index_add_(0, group, h).square_()
        largest = torch.full((5, 4), -2.0, dtype=h.dtype)
        largest.scatter_reduce_(0, group[:, None].expand_as(h), h, "amax")
        total = torch.ones(5, 4, dtype=h.dtype)
        total += h.sum(0)
        total *= h.mean()
        total[1:3] = h.square().mean(0)
        total[3].copy_(h.amax(0))
        return self.result(torch.cat([sums, started, largest, total], 1)) + h.mean()


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_plain_tensors_take_what_depends_on_sharded_ones() -> None:
    torch.manual_seed(0)
    x, group = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 3, 0, 4, 1])
    assert_matches_single_device(
        Accumulating().double(), [x, group], [Shard(0), Shard(0)], backend="aot_eager", steps=2, input_grads=False
    )


@pytest.mark.ranks(2, processes=False)
def test_what_does_not_fit_into_a_plain_tensor_is_refused() -> None:
    rows = sc.distribute_tensor(torch.ones(3, 4), mesh_1d(), [Shard(0)], sharding_shapes={0: [1, 2]}).requires_grad_()
    with pytest.raises(sc.UnsupportedOpError, match=r"cannot be written into torch\.int64"):
        torch.zeros(3, 4, dtype=torch.int64).add_(rows)
    with pytest.raises(
        sc.UnsupportedOpError, match=r"of shape \(3, 4\), which cannot be written into .* of shape \(4,\)"
    ):
        torch.zeros(4).add_(rows)


@pytest.mark.ranks(3)  # torch keeps one level of forward-mode differentiation for all threads
def test_forward_over_reverse_mode_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full, w = torch.randn(7, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    sizes = [5, 0, 2]
    mesh = init_device_mesh("cpu", (world_size(),))
    x = sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh, [Shard(0)], {0: sizes})

    def curvature(x: Any) -> Any:
        return torch.func.jvp(torch.func.grad(lambda x: torch.tanh(x @ w).sum()), (x,), (torch.ones_like(x),))[1]

    monkeypatch.setattr(sc.config, "fallback", "error")
    torch.testing.assert_close(curvature(x).full_tensor(), curvature(full))
