"""Gradients of plain leaf tensors, which eager mode reduces together: as in plain PyTorch, whatever looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardcompile as sc
from shardcompile import compat
from shardcompile.errors import UnsupportedOpError
from shardcompile.tensor.gradient_buckets import _BackwardPass
from shardcompile.testing import rank

ROWS = {1: [7], 2: [5, 2], 3: [4, 0, 3]}


class Net(nn.Module):
    """Two layers with a norm; a scale that is used twice, a parameter that is used plainly too, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.full([3], 0.5))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.second(x) * self.scale + self.scale.exp() * self.frozen


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


Run = Callable[[Net, Callable[[int], Tensor]], list[Any]]
"""Runs a program, given the model and a function from a seed to its input; returns what is to be compared."""


def backward(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    model(batch(0)).square().sum().backward()
    return gradients(model)


def accumulation(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    for seed in range(3):
        model(batch(seed)).square().mean().backward()
    return gradients(model)


def several_passes_over_one_graph(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    loss = model(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    first = [None if g is None else g.clone() for g in gradients(model)]
    model.zero_grad()
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    return first + gradients(model)


def two_losses(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    a, b = model(batch(0)).square().sum(), model(batch(1)).sin().sum()
    b.backward()
    a.backward()
    return gradients(model)


def chosen_inputs(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    model(batch(0)).square().sum().backward(inputs=[model.second.weight, model.scale])
    return gradients(model)


def autograd_grad(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    loss = model(batch(0)).square().sum()
    got = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert gradients(model) == [None] * len(list(model.parameters()))
    return list(got)


def second_derivative(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    loss = model(batch(0)).square().sum()
    weights = [model.first.weight, model.scale]
    penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, weights, create_graph=True))
    penalty.backward()
    return gradients(model)


def negate(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.neg_()


def hooks_of_leaves(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    seen: dict[int, Tensor] = {}
    model.first.weight.register_hook(lambda g: seen.update({0: g.clone()}))
    model.scale.register_hook(lambda g: g.clamp(-1, 1))  # not linear: it must see the whole gradient
    model.second.bias.register_post_accumulate_grad_hook(negate)
    several = [model.first.bias, model.norm.weight]
    torch.autograd.graph.register_multi_grad_hook(several, lambda gs: seen.update(enumerate(gs, 1)))
    model(batch(0)).square().sum().backward()
    assert all(type(g) is Tensor for g in seen.values())
    return [seen[i] for i in range(3)] + gradients(model)


def optimizer_in_hooks(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    def step(p: Tensor) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        model(batch(seed)).square().mean().backward()
    return [p.detach() for p in model.parameters()]


def checkpoints(use_reentrant: bool) -> Run:
    def run(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
        x = model.first(batch(0))
        y = checkpoint(lambda h: model.second(model.norm(h).tanh()), x, use_reentrant=use_reentrant)
        (y * model.scale).square().sum().backward()
        return gradients(model)

    return run


def backward_inside_of_backward(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    x = model.norm(model.first(batch(0)))

    @torch.enable_grad()
    def another(_: Tensor) -> None:
        model.second(batch(1)[:, :1].expand(-1, 6)).sum().backward()

    x.register_hook(another)
    model.second(x).square().sum().backward()
    return gradients(model)


def after_an_error(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("in the middle of a backward pass")

    x = model.first(batch(0))
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model.second(model.norm(x)).sum().backward()
    model.zero_grad()
    return backward(model, batch)


def several_dtypes(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    model.first.float()
    x = model.first(batch(0).float()).double()
    model.second(model.norm(x)).square().sum().backward()
    return gradients(model)


def training(model: Net, batch: Callable[[int], Tensor]) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    norms = []
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(seed)).square().mean()).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    return norms + [p.detach() for p in model.parameters()]


RUNS: dict[str, Run] = {
    run.__name__: run
    for run in (
        backward,
        accumulation,
        several_passes_over_one_graph,
        two_losses,
        chosen_inputs,
        autograd_grad,
        second_derivative,
        hooks_of_leaves,
        optimizer_in_hooks,
        backward_inside_of_backward,
        after_an_error,
        several_dtypes,
        training,
    )
} | {"checkpoint": checkpoints(False), "reentrant checkpoint": checkpoints(True)}


def sharded(mesh: DeviceMesh) -> Callable[[int], Tensor]:
    return lambda seed: sc.distribute_tensor(rows(seed), mesh, [Shard(0)], sharding_shapes={0: ROWS[mesh.size()]})


def plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, sc.ShardTensor) else value


def compare(got: list[Any], want: list[Any]) -> None:
    got = [plain(g) for g in got]
    assert [type(g) for g in got] == [type(w) for w in want]
    torch.testing.assert_close([g for g in got if g is not None], [w for w in want if w is not None])


@pytest.fixture(autouse=True)
def without_fully_shard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets that other tests of this process have used `fully_shard`, after which gradients do not wait."""
    if "fully_shard" not in request.node.name:
        monkeypatch.setattr(compat, "gradients_are_read_while_backward_runs", lambda: False)


@pytest.fixture(params=[0, 100, 25 << 20], ids=["each alone", "small buckets", "one bucket"])
def size(request: pytest.FixtureRequest) -> Iterator[int]:
    with sc.config.patch(gradient_bucket_bytes=request.param):
        yield request.param


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("run", RUNS)
def test_as_in_plain_pytorch(run: str, size: int) -> None:
    compare(RUNS[run](net(), sharded(init_device_mesh("cpu", (3,)))), RUNS[run](net(), rows))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", ["backward", "hooks_of_leaves", "training", "reentrant checkpoint"])
def test_on_processes(run: str, size: int) -> None:
    compare(RUNS[run](net(), sharded(init_device_mesh("cpu", (2,)))), RUNS[run](net(), rows))


@pytest.mark.ranks(3, processes=False)
def test_hooks_of_one_rank_are_no_matter_to_the_others(size: int) -> None:
    model, seen = net(), []
    if rank() == 0:  # as a logger of the first rank registers them
        for p in (model.first.weight, model.scale):
            p.register_hook(lambda g: seen.append(float(g.norm())))
    got = backward(model, sharded(init_device_mesh("cpu", (3,))))
    want = backward(net(), rows)
    compare(got, want)
    if rank() == 0:
        assert sorted(seen) == pytest.approx(sorted(float(want[i].norm()) for i in (0, 3)))


@pytest.mark.ranks(2, processes=False)
@pytest.mark.parametrize(("size", "collectives"), [(25 << 20, 1), (200, 2), (0, 6)], indirect=["size"])
def test_collectives_of_a_backward_pass(size: int, collectives: int) -> None:
    model, x = net(), sharded(init_device_mesh("cpu", (2,)))(0)
    with CommDebugMode() as comm:
        y = model.second(model.norm(model.first(x)))
        y.backward(torch.ones_like(y))
    assert comm.get_total_counts() == collectives


@pytest.mark.ranks(2, processes=False)
def test_gradients_of_what_plain_ops_make_of_leaves_are_reduced_with_others() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3))).double()
    x = sharded(init_device_mesh("cpu", (2,)))(0)
    if rank() == 0:  # a node of Python, which the other rank does not have
        for layer in layers:
            layer.parametrizations.weight.register_full_backward_hook(lambda *_: None)
    with CommDebugMode() as comm:
        y = layers(x)
        y.backward(torch.ones_like(y))
    assert comm.get_total_counts() == 1
    got = gradients(layers)
    layers.zero_grad()
    layers(rows()).sum().backward()
    compare(got, gradients(layers))


@pytest.mark.ranks(2, processes=False)
def test_gradients_that_reach_sharded_tensors_do_not_wait() -> None:
    model, x = net(), sharded(init_device_mesh("cpu", (2,)))(0)
    hidden = model.first(x)
    y = model.norm(hidden) * hidden.sum(0).full_tensor().tanh()
    with CommDebugMode() as comm:
        y.backward(torch.ones_like(y))
    assert (
        comm.get_total_counts() == 2
    )  # that of the sum, which the backward pass of the first layer needs, and a bucket
    compare_with = net()
    hidden = compare_with.first(rows())
    (compare_with.norm(hidden) * hidden.sum(0).tanh()).sum().backward()
    compare(gradients(model), gradients(compare_with))


@pytest.mark.ranks(2, processes=False)
def test_gradients_have_memory_of_their_own() -> None:
    model = net()
    backward(model, sharded(init_device_mesh("cpu", (2,))))
    for p in model.parameters():
        if p.grad is not None:
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
            assert p.grad._base is None


@pytest.mark.ranks(4)
def test_inside_of_ddp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    sizes = {0: [6, 1]}
    seed = mesh.get_local_rank("data")
    x = sc.distribute_tensor(rows(seed), mesh["domain"], [Shard(0)], sharding_shapes=sizes)
    want = [net() for _ in range(2)]
    for s, model in enumerate(want):
        model(rows(s)).square().sum().backward()
    mean = [None if a is None else (a + b) / 2 for a, b in zip(*map(gradients, want), strict=True)]  # type: ignore[operator]

    model = net()
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("data"), find_unused_parameters=True)
    ddp(x).square().sum().backward()
    got = gradients(model)
    got[list(dict(model.named_parameters())).index("unused")] = None  # DDP gives it zeros
    compare(got, mean)


@pytest.mark.ranks(4)
def test_fully_shard_finds_the_gradients_that_it_reads_while_backward_runs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    x = sc.distribute_tensor(rows(mesh.get_local_rank("data")), mesh["domain"], [Shard(0)], sharding_shapes={0: [6, 1]})
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    copies = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(2)]
    for s, copy in enumerate(copies):
        copy.load_state_dict(layers.state_dict())
        copy(rows(s)).square().sum().backward()
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer, mesh=mesh["data"])
    layers(x).square().sum().backward()
    for p, a, b in zip(layers.parameters(), *(c.parameters() for c in copies), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), (a.grad + b.grad) / 2)  # type: ignore[union-attr]


def test_a_backward_pass_by_way_of_another_device_is_refused() -> None:
    backward_pass = _BackwardPass()
    backward_pass.start()
    late: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(3, 2))
    with pytest.raises(UnsupportedOpError, match=r"shape \(3, 2\) on cuda:0.*gradient_bucket_bytes = 0"):
        backward_pass.deposit(late)
