"""The checks that `shardcompile.testing` offers for models and rules of others: each of them passes, and each can fail."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
import shardcompile.testing
from shardcompile import ShardTensor
from shardcompile.testing import agreement, assert_matches_single_device, check_rule, rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm, self.down = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.down(torch.tanh(self.norm(self.up(x))))
        return {"loss": (out - y).square().mean(), "out": out}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> list[Tensor]:
    return [values(7, 5), values(7, 2, seed=1)]


def failing(check: Any, *args: Any, error: type[Exception] = AssertionError, **kwargs: Any) -> str:
    """The text with which a check fails: the same on every rank, or `together` fails."""
    with pytest.raises(error) as raised:
        check(*args, **kwargs)
    return agreement.together("the text", lambda: str(raised.value), facts=str)


# assert_matches_single_device


@pytest.mark.ranks(2, 3)
def test_a_model_matches() -> None:
    assert_matches_single_device(
        Net(),
        inputs(),
        [Shard(0), Shard(0)],
        backend="aot_eager",  # test_docs.py has Inductor
        steps=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )


@pytest.mark.ranks(3, processes=False)
def test_parameters_in_shards_match() -> None:
    def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
        def shard(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, p in list(part.named_parameters(recurse=False)):
                if p.shape[0] == 8:
                    setattr(part, key, nn.Parameter(sc.distribute_tensor(p.detach(), mesh, [Shard(0)])))

        sc.distribute_module(module, mesh, shard)

    assert_matches_single_device(
        Net(), inputs(), [Shard(0), None], parallelize=parallelize, steps=2, backend="aot_eager"
    )  # fmt: skip


@pytest.mark.ranks(4, processes=False)
def test_a_function_matches_on_a_mesh_of_two_dims_with_named_inputs_and_stated_sizes() -> None:
    def function(x: Tensor, *, scale: Tensor, power: int) -> tuple[Tensor, int]:
        return (x * scale) ** power, power

    assert_matches_single_device(
        lambda **kwargs: function(kwargs["x"], scale=kwargs["scale"], power=kwargs["power"]),
        {"x": values(7, 5), "scale": values(5), "power": 2},
        {"x": [Shard(0), Shard(-1)], "scale": [Partial("sum"), Replicate()], "power": None},
        sharding_shapes={"x": {0: [7, 0]}, "scale": None, "power": None},
        mesh=init_device_mesh("cpu", (2, 2)),
        backend=["eager", "aot_eager"],
    )


class GradTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, ShardTensor)


WRONG: dict[str, tuple[Any, list[str]]] = {
    "value": (
        lambda x: x.relu() + (1e-3 if is_sharded(x) else 0.0),
        [
            "eager: output is wrong on rank 0 (ranks 1, 2 as well)",
            "35 of 35 elements differ by more than atol=1e-07 plus rtol=1e-07",
            "largest absolute difference 0.001 at index (",
            "largest relative difference inf at index (",
            "): expected 0.0, got 0.001",
        ],
    ),
    "dtype": (lambda x: {"y": x.float() if is_sharded(x) else x}, ["output 'y' is wrong", "expected dtype float64, got float32"]),
    "shape": (lambda x: [x, x[:-1] if is_sharded(x) else x], ["output 1 is wrong", "expected global shape (7, 5), got (6, 5)"]),
    "number": (lambda x: (x, 1 + is_sharded(x)), ["output 1 is wrong", "expected 1, got 2"]),
    "structure": (lambda x: (x, x) if is_sharded(x) else [x, x], ["structure of the output is wrong"]),
    "missing": (lambda x: {"a": x} if is_sharded(x) else {"a": x, "b": {"c": x}}, ["output['b']['c'] is wrong", "got nothing"]),
    "gradient": (
        lambda x: GradTwice.apply(x) if is_sharded(x) else x * 1,
        ["eager: grad of input 0 is wrong on rank 0", "relative difference 1 at index ("],
    ),
    "no gradient": (lambda x: x.detach() if is_sharded(x) else x, ["no result requires a gradient"]),
    "on one rank": (
        lambda x: x.full_tensor() + (1e-3 if rank() == 1 else 0.0) if is_sharded(x) else x,
        ["eager: output is wrong on rank 1\n"],
    ),
    "layouts differ": (
        lambda x: ShardTensor.from_local(x.to_local(), x.device_mesh, [Shard(0)], {0: [1, 6 + rank() // 2, 0]}) if is_sharded(x) else x,
        ["eager: the ranks disagree", "ranks 0, 1 have output: f64[7, 5] 0: S(0)[1,6,0]", "rank 2 has output: f64[8, 5]"],
    ),
    "an error": (lambda x: x.to_local().view(3, 3) if is_sharded(x) else x, ["eager: RuntimeError: shape '[3, 3]' is invalid"]),
}  # fmt: skip


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_told(name: str) -> None:
    function, told = WRONG[name]
    text = failing(assert_matches_single_device, function, [values(7, 5)], [Shard(0)], compiled=False)
    assert all(part in text for part in told), text


@pytest.mark.ranks(2, processes=False)
def test_what_is_wrong_only_in_compiled_code_is_told() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    text = failing(assert_matches_single_device, function, [values(7)], [Shard(0)], backend="aot_eager")
    assert "compiled with aot_eager: output is wrong on rank 0 (rank 1 as well)" in text, text


class Counting(Net):
    """Right in its first step."""

    steps = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        self.calls += 1 if self.steps == 1 or type(x) is Tensor else 2
        return super().forward(x, y)


@pytest.mark.ranks(2, processes=False)
def test_buffers_and_parameters_after_a_step_are_compared() -> None:
    rates = iter([0.1, 0.2])

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=next(rates))

    text = failing(assert_matches_single_device, Counting(), inputs(), [Shard(0), Shard(0)], steps=2, compiled=False)
    assert "eager, step 2: buffer calls after the step is wrong on rank 0 (rank 1 as well)" in text, text
    assert "expected 2.0, got 3.0" in text, text
    text = failing(
        assert_matches_single_device, Net(), inputs(), [Shard(0), Shard(0)], optimizer=optimizer, compiled=False
    )
    assert "eager: up.weight after the step is wrong" in text and "down.bias after the step is wrong" in text, text


class WrongWeightGradient(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if is_sharded(x):
            self.up.weight.register_hook(lambda g: g + torch.eye(8, 5, dtype=g.dtype).roll(2, 0) * 0.5)
        return super().forward(x, y)


@pytest.mark.ranks(2, processes=False)
def test_a_wrong_gradient_of_a_parameter_is_located() -> None:
    net = WrongWeightGradient()
    text = failing(assert_matches_single_device, net, inputs(), [Shard(0), Shard(0)], compiled=False)
    assert "eager: grad of up.weight is wrong on rank 0 (rank 1 as well)\n  5 of 40 elements" in text, text
    assert "largest absolute difference 0.5 at index (" in text, text


class Recompiling(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.ranks(2, processes=False)
def test_more_than_one_graph_is_an_error() -> None:
    args: Any = (Recompiling(), [values(7)], [Shard(0)])
    text = failing(assert_matches_single_device, *args, backend="aot_eager", steps=3)
    assert "compiled with aot_eager: 3 graphs were compiled, expected one graph, on rank 0 (rank 1 as well)" in text, (
        text
    )
    assert_matches_single_device(*args, backend="aot_eager", steps=3, max_graphs=3)

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    text = failing(assert_matches_single_device, broken, [values(7)], [Shard(0)], backend="aot_eager")
    assert "compiled with aot_eager: " in text and "graph_break" in text, text


@pytest.mark.ranks(3, processes=False)
def test_what_differs_between_ranks_is_named_before_anything_runs() -> None:
    x = values(7, 5, seed=int(rank() == 2))
    text = failing(assert_matches_single_device, Net(), [x, values(7, 2)], [Shard(0), None], error=ValueError)
    assert "same on every rank" in text and "  ranks 0, 1 have input 0: torch.float64 (7, 5) with digest" in text, text
    assert "  rank 2 has input 0: torch.float64" in text, text
    net = Net()
    if rank() == 1:
        nn.init.ones_(net.down.weight)
    text = failing(assert_matches_single_device, net, inputs(), [Shard(0), None], error=ValueError)
    assert "  ranks 0, 2 have down.weight: " in text and "  rank 1 has down.weight: " in text, text


MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "placements": ({"placements": [Shard(0)]}, "there are placements for [0], but inputs [0, 1]"),
    "sizes": ({"sharding_shapes": [{0: [1, 2]}, None]}, "add up to 3, but tensor dim 0 has size 7"),
    "dim": ({"placements": [Shard(2), None]}, "S(2) is out of range"),
    "steps": ({"steps": 0}, "steps must be 1 or more"),
    "optimizer": ({"optimizer": torch.optim.SGD, "backward": False}, "an optimizer needs gradients"),
    "function": ({"module_or_fn": torch.add, "optimizer": torch.optim.SGD}, "are for modules"),
    "text": ({"inputs": ["x", values(7, 2)]}, "input 0 is a str, which cannot be sharded"),
}


@pytest.mark.ranks(2, processes=False)
@pytest.mark.parametrize("name", list(MISUSES))
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    changed, told = MISUSES[name]
    arguments = {"module_or_fn": Net(), "inputs": inputs(), "placements": [Shard(0), None]} | changed
    text = failing(assert_matches_single_device, error=ValueError, **arguments)
    assert told in text, text


@pytest.mark.ranks(2, processes=False)
def test_sharded_arguments_and_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = sc.distribute_tensor(values(7, 5), mesh, [Shard(0)])
    text = failing(assert_matches_single_device, Net(), [x, values(7, 2)], [Shard(0), None], error=ValueError)
    assert "input 0 is a ShardTensor; inputs are plain, full tensors" in text, text
    text = failing(assert_matches_single_device, Net(), inputs()[:1], [Shard(0)], error=ValueError)
    assert "on plain tensors: TypeError: " in text and "missing 1 required positional argument: 'y'" in text, text
    net = Net()
    net.up.bias = nn.Parameter(sc.distribute_tensor(values(8), mesh, [Shard(0)]))
    text = failing(assert_matches_single_device, net, inputs(), [Shard(0), None], error=ValueError)
    assert "up.bias: pass a module with plain parameters" in text, text


@pytest.mark.ranks(2)
def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    before = torch.get_rng_state()
    assert_matches_single_device(lambda x: x + torch.rand(7).sum(), [values(7)], [Shard(0)], compiled=False)
    assert torch.equal(before, torch.get_rng_state())


# Agreement


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 20.0)

    def action() -> None:
        if rank() == 1:
            raise KeyError("a key")
        time.sleep(2)  # as in a collective that rank 1 has not joined

    with pytest.raises(agreement.RanksFailedError) as raised:
        agreement.together("here", action)
    assert str(raised.value).startswith("here: KeyError: 'a key' on rank 1\n  Traceback"), str(raised.value)
    assert raised.value.in_step == (rank() != 1)
    late = "ranks 0, 2 did not reach this check within 0.3 s, and probably wait in a collective for rank 1"
    assert (late in str(raised.value)) == (rank() == 1)
    agreement.together("afterwards", lambda: None)


@pytest.mark.ranks(3)
def test_a_rank_that_fails_while_the_others_are_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.5)

    def function(x: Tensor) -> Tensor:
        if is_sharded(x) and rank() == 1:
            raise KeyError("only here")
        if is_sharded(x):
            dist.barrier()
        return x * 1

    with pytest.raises(AssertionError) as raised:
        assert_matches_single_device(function, [values(7)], [Shard(0)], compiled=False)
    text = str(raised.value)
    assert text.startswith("eager: KeyError: 'only here' on rank 1\n  Traceback"), text
    assert 'raise KeyError("only here")' in text and "shardcompile/testing" not in text, text
    assert ("probably wait in a collective for rank 1" in text) == (rank() == 1), text
    if rank() == 1:
        dist.barrier()  # lets them go; in a real failure the pool ends them


def test_checks_are_loaded_when_they_are_used() -> None:
    assert "same_collectives_on_every_rank" not in vars(shardcompile.testing)
    assert all(hasattr(shardcompile.testing, name) for name in shardcompile.testing.__all__)
    assert not hasattr(shardcompile.testing, "nothing")


# check_rule


@torch.library.custom_op("shardcompile_kit::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


CENTRED = torch.ops.shardcompile_kit.centred.default


@pytest.fixture
def samples() -> list[Any]:
    return [((values(7, 3),), {})]


@pytest.mark.ranks(3, processes=False)
def test_a_right_rule_passes_and_the_report_says_how_it_served(samples: list[Any]) -> None:
    @sc.register_sharding(CENTRED)
    def rule(x: Any) -> list[Any]:
        return [([Shard(1)], [Shard(1)]), ([Partial("sum")], [Partial("sum")])]

    report = check_rule(CENTRED, samples, backward=False)
    assert report.served == {"local": 5, "reduced": 0, "exchanged": 3, "gathered": 0} and not report.wrong
    assert str(report).splitlines() == [
        "shardcompile_kit.centred.default: 8 runs on 3 ranks, 0 wrong",
        "inputs  runs  local  reduced  exchanged  gathered",
        "S(0)       3      0        0          3         0",
        "S(1)       3      3        0          0         0",
        "R          1      1        0          0         0",
        "P(sum)     1      1        0          0         0",
    ]


@pytest.mark.ranks(3, processes=False)
def test_a_wrong_rule_is_named_with_its_layouts(samples: list[Any]) -> None:
    @sc.register_sharding(CENTRED)
    def rule(x: Any) -> list[Any]:
        return [([Shard(d)], [Shard(d)]) for d in range(x.ndim)]  # the mean goes over all rows

    text = failing(check_rule, CENTRED, samples, backward=False)
    assert text.startswith("shardcompile_kit.centred.default is wrong in 3 of 8 runs on 3 ranks\n\n"), text
    assert "sample 0, inputs S(0)[1,6,0]: result 0 is wrong on rank 0 (ranks 1, 2 as well)\n" in text, text
    assert "largest absolute difference" in text and "inputs S(0)[3,3,1]: result 0" in text, text


@pytest.mark.ranks(3, processes=False)
def test_a_rule_that_is_wrong_about_shards_does_not_hang(samples: list[Any]) -> None:
    @sc.register_sharding(CENTRED)
    def rule(x: Any) -> list[Any]:
        return [([Shard(0)], [Shard(1)])]

    text = failing(check_rule, CENTRED, samples, backward=False)
    assert "result is malformed" in text and "the shard is torch.float64" in text, text


@pytest.mark.ranks(2, 3, processes=False)
def test_an_op_of_two_tensors_and_a_list_in_every_layout() -> None:
    report = check_rule(torch.mm, [((values(5, 4), values(4, 3)), {})])
    assert len(report.runs) == 44 and report.left_out == 0 and not report.wrong
    report = check_rule(torch.cat, [(([values(3, 2), values(4, 2)],), {"dim": 0})], limit=10)
    assert len(report.runs) == 10 and report.left_out == 34 and "34 left out" in str(report)


@pytest.mark.ranks(2, processes=False)
def test_a_wrong_gradient_a_refusal_and_misuses_of_check_rule() -> None:
    def twice(x: Tensor) -> Tensor:
        return GradTwice.apply(x) if is_sharded(x) else x * 1

    text = failing(check_rule, twice, [((values(5),), {})])
    assert text.startswith("twice is wrong in 5 of 5 runs") and "gradient of input 0 is wrong on rank 0" in text, text

    def refused(x: Tensor) -> Tensor:
        if is_sharded(x):
            raise sc.UnsupportedOpError("not today")
        return x

    text = failing(check_rule, refused, [((values(5),), {})])
    assert "UnsupportedOpError: not today on rank 0 (rank 1 as well)" in text, text
    assert "there are no samples" in failing(check_rule, twice, [], error=ValueError)
    assert "no argument is a tensor" in failing(check_rule, twice, [((1,), {})], error=ValueError)
    assert "the ranks disagree" in failing(check_rule, twice, [((values(5, seed=rank()),), {})], error=ValueError)
    text = failing(check_rule, CENTRED, [((values(5, 2),), {})], error=ValueError)
    assert "on plain tensors" in text and "autograd" in text, text
