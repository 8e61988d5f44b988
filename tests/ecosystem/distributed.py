"""DTensor, tensor parallelism and data parallelism around sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shardcompile as sc
from tests.ecosystem.case import NOT_IN_TORCH, NOTHING, Case, Setting, gradients, values


class Layer(nn.Module):
    """A layer of a user: Dynamo compiles no frame of torch.nn's own on its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


def _layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(Layer(4, 6), Layer(6, 6), Layer(6, 4)).double()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.norm(self.a(x))))


def _normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Normed().double()


def _styled(plan: Callable[[], dict[str, Any]], same: bool) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        model = _normed()
        if here.mesh is not None:
            model = parallelize_module(model, here.over if same else here.mesh["model"], plan())
        # DTensor takes it that all ranks have as many rows, so that `model` has to divide them.
        x, y = here.partition(values(8, 4)), here.partition(values(8, 4, seed=1))
        loss = here.compile(lambda x, y: (model(x) - y).square().mean())(x, y)
        loss.backward()
        return loss, gradients(model)

    return run


STYLES: dict[str, Callable[[], dict[str, Any]]] = {
    "`ColwiseParallel`, `RowwiseParallel`": lambda: {
        "a": ColwiseParallel(output_layouts=Replicate()),
        "b": RowwiseParallel(input_layouts=Replicate()),
    },
    "`SequenceParallel`": lambda: {
        "a": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "b": RowwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    },
    "`PrepareModuleInput`": lambda: {
        "a": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
    },
    "`PrepareModuleOutput`": lambda: {
        "a": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    },
    "`PrepareModuleInputOutput`": lambda: {
        "a": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Replicate(),
        )
    },
}


def _wrapped_as_dtensor(placement: Any) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        x = here.partition(values(7, 4))

        def total(x: Any) -> Any:
            if here.mesh is not None:
                x = DTensor.from_local(x, here.over, [placement])
            return (x * 2).sum()

        return here.compile(total)(x)

    return run


def _wrapped_over_another(here: Setting) -> Any:
    model = here.mesh["model"] if here.mesh is not None else None

    def total(x: Any) -> Any:
        return ((DTensor.from_local(x, model, [Replicate()]) if model is not None else x) * 2).sum()

    return here.compile(total)(here.partition(values(7, 4)))


def _distributed_as_dtensor(here: Setting) -> Any:
    over = here.over

    def run(x: Any) -> Any:
        return distribute_tensor(x, over, [Shard(0)]) if over is not None else x

    return here.compile(run)(here.partition(values(7, 4)))


def _parameter_is_dtensor(placement: Any) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        x, w = here.partition(values(7, 4)), values(4, 5, seed=2)
        if here.mesh is not None:
            w = distribute_tensor(w, here.over, [placement])
        w.requires_grad_()
        loss = here.compile(lambda x, w: (x @ w).tanh().sum())(x, w)
        loss.backward()
        return loss, w.grad

    return run


def _parameter_over_another(here: Setting) -> Any:
    x, w = here.partition(values(7, 4)), values(4, 5, seed=2)
    if here.mesh is not None:
        w = distribute_tensor(w, here.mesh["model"], [Shard(0)])
    return here.compile(lambda x, w: (x @ w).tanh().sum())(x, w)


def _converted(here: Setting) -> Any:
    """What the refusal names as the way out, for the other input as well."""
    model = _normed()
    x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
    if here.mesh is not None:
        model = parallelize_module(model, here.over, STYLES["`ColwiseParallel`, `RowwiseParallel`"]())
        x = x.redistribute(sharding_shapes={0: [3, 3, 1]}).to_dtensor()
    loss = here.compile(lambda x, y: (model(x) - y).square().mean())(x, y)
    loss.backward()
    return loss, gradients(model)


def _gathered_first(here: Setting) -> Any:
    model = _normed()
    x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
    if here.mesh is not None:
        model = parallelize_module(model, here.over, STYLES["`ColwiseParallel`, `RowwiseParallel`"]())
        x = x.full_tensor()
    loss = here.compile(lambda x, y: (model(x) - y).square().mean())(x, y)
    loss.backward()
    return loss, gradients(model)


def _from_strided(first: bool) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        full = values(8, 3)
        if here.mesh is None:
            return full * 2
        model = nn.Linear(3, 8, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(full)
        parallelize_module(model, here.mesh["model"], ColwiseParallel())
        fully_shard(model, mesh=here.mesh["data"])
        weight: Any = model.weight
        if first:
            weight = weight.redistribute(placements=[Replicate(), Shard(0)])
        return here.compile(lambda w: sc.ShardTensor.from_dtensor(w) * 2)(weight)

    return run


def _trained(here: Setting, model: nn.Module, wrap: Callable[[nn.Module], Any], how: str) -> Any:
    """Loss and gradients of a model under a wrapper.

    Args:
        here: where.
        model: plain.
        wrap: puts the wrapper around it.
        how: where the compiled run compiles: "inside" of the wrapper each layer, or "around" it, with graph breaks.
    """
    x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
    if here.mesh is None:
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss, gradients(model)
    if here.compiled and how == "inside":
        for layer in model:
            layer.compile(fullgraph=True, backend="aot_eager")
            here.compilations += 1
    wrapped = wrap(model)
    call = here.compile(wrapped, fullgraph=False) if how == "around" else wrapped
    loss = (call(x) - y).square().mean()
    loss.backward()
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            return loss, [p.grad.clone() for p in wrapped.parameters()]
    return loss, gradients(wrapped)


def _ddp(how: str = "inside", same: bool = True, sharded: bool = False) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        model = here.shard_parameters(_layers()) if sharded else _layers()

        def wrap(model: nn.Module) -> Any:
            return DistributedDataParallel(model, process_group=None if same else here.mesh.get_group("model"))

        return _trained(here, model, wrap, how)

    return run


def _fsdp1(
    how: str = "inside", over: str = "same", sharded: bool = False, strategy: Any = ShardingStrategy.FULL_SHARD
) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        model = here.shard_parameters(_layers()) if sharded else _layers()

        def wrap(model: nn.Module) -> Any:
            return FullyShardedDataParallel(
                model,
                device_mesh=_mesh(here, over),
                sharding_strategy=strategy,
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )

        return _trained(here, model, wrap, how)

    return run


def _fsdp2(how: str = "inside", over: str = "same", sharded: bool = False) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        model: Any = here.shard_parameters(_layers()) if sharded else _layers()

        def wrap(model: Any) -> Any:
            fully_shard(model[0], mesh=_mesh(here, over))
            return fully_shard(model, mesh=_mesh(here, over))

        return _trained(here, model, wrap, how)

    return run


def _beside_shards(wrapper: str) -> Callable[[Setting], Any]:
    """Sharded parameters beside plain ones that a wrapper manages: what the refusal names as the way out."""

    def run(here: Setting) -> Any:
        model: Any = _layers()
        here.shard_parameters(model[0])

        def wrap(model: Any) -> Any:
            own = set(model[0].parameters())
            if wrapper == "fsdp2":
                return fully_shard(model, mesh=here.over, ignored_params=own)
            if wrapper == "fsdp1":
                return FullyShardedDataParallel(
                    model,
                    device_mesh=here.over,
                    use_orig_params=True,
                    ignored_states=own,
                    device_id=torch.device("cpu"),
                )
            model[2] = DistributedDataParallel(model[2])
            return model

        return _trained(here, model, wrap, "inside")

    return run


def _mesh(here: Setting, over: str) -> Any:
    return {"same": here.over, "both": here.mesh}.get(over) or here.mesh["model"]


def _raw_collective(here: Setting) -> Any:
    def run(x: Any) -> Any:
        if here.mesh is not None:
            dist.all_reduce(x)
        return x

    return here.compile(run)(here.partition(values(7, 4)))


def _functional_collective(here: Setting) -> Any:
    import torch.distributed._functional_collectives as funcol

    over = here.over

    def run(x: Any) -> Any:
        return funcol.all_reduce(x, "sum", over) if over is not None else x

    return here.compile(run)(here.partition(values(7, 4)))


def _broadcast(here: Setting) -> Any:
    def run(x: Any) -> Any:
        if here.sharded or here.compiled:  # also of plain tensors, to see that torch cannot compile it
            dist.broadcast(x, 0)
        return x

    return here.compile(run)(here.partition(values(7, 4)))


def _gathered(here: Setting) -> Any:
    def run(x: Any) -> Any:
        if here.mesh is None:
            return x
        out = [torch.empty(7, 4, dtype=torch.float64) for _ in range(3)]
        dist.all_gather(out, x)
        return out[0]

    return here.compile(run)(here.partition(values(7, 4)))


OTHER_SHARDS = (
    "these ranks hold different shards of it, and a DTensor would take each for a complete local tensor. The styles of "
    "parallelize_module wrap their inputs so. Pass x.to_dtensor() where the partition is torch.chunk's (redistribute "
    "with sharding_shapes gives that), x.full_tensor() for Replicate(), or parallelize over another mesh dim than the "
    "one that shards x"
)
TWO_MESHES = "bring them to one mesh first (full_tensor() and distribute_tensor())"
OTHER_ORDER = (
    "its shards are in another order than that of the mesh dims, as for parameters that FSDP2 shards after tensor "
    "parallelism. First x.redistribute(placements=[Replicate(), Shard(dim=0)])"
)
IN_SHARDS = (
    "it would shard this rank's local shard as if that were the full parameter. Sharded parameters get complete gradients "
    "without a wrapper; exclude them by ignored_params, or leave them plain and let fully_shard shard them"
)
FLATTENED = "Attempted to call resize_() on an invalid python storage."
SENT = (
    "it would send each rank's local shard as if that were the whole tensor. x.full_tensor() is all of it, on every rank; "
    "x.redistribute(placements=...) gives another layout; to send this rank's local shard as such, take x.to_local()"
)
DT, TP, DP, CC = "DTensor", "Tensor parallelism, `parallelize_module`", "Data parallelism", "Collectives called by hand"
CASES = [
    *[
        Case(DT, f"`DTensor.from_local(sharded, mesh, [{p}])`", _wrapped_as_dtensor(q), OTHER_SHARDS, OTHER_SHARDS)
        for p, q in [("Replicate()", Replicate()), ("Shard(0)", Shard(0)), ("Partial()", Partial())]
    ],
    Case(DT, "`DTensor.from_local` over another mesh dim", _wrapped_over_another, ranks=4),
    Case(DT, "`torch.distributed.tensor.distribute_tensor(sharded, mesh, ...)`", _distributed_as_dtensor, SENT, SENT),
    *[
        Case(
            DT,
            f"sharded activation, DTensor parameter, `{p}`",
            _parameter_is_dtensor(p),
            processes=True,
        )
        for p in (Replicate(), Shard(0), Shard(1))
    ],
    Case(
        DT,
        "sharded activation, DTensor parameter over another mesh dim",
        _parameter_over_another,
        TWO_MESHES,
        TWO_MESHES,
        ranks=4,
    ),
    Case(
        DT,
        "`from_dtensor` of a parameter of FSDP2 over tensor parallelism (`_StridedShard`)",
        _from_strided(False),
        OTHER_ORDER,
        OTHER_ORDER,
        ranks=4,
    ),
    Case(DT, "the same, redistributed first", _from_strided(True), ranks=4, processes=True),
    Case(
        TP,
        "`ColwiseParallel`, `RowwiseParallel`, mesh dim that shards the input, given `x.to_dtensor()`",
        _converted,
        processes=True,
    ),
    Case(
        TP,
        "`ColwiseParallel`, `RowwiseParallel`, mesh dim that shards the input, given `x.full_tensor()`",
        _gathered_first,
    ),
    *[
        Case(TP, f"{name}, mesh dim that shards the input", _styled(plan, True), OTHER_SHARDS, OTHER_SHARDS)
        for name, plan in STYLES.items()
    ],
    *[
        Case(
            TP,
            f"{name}, another mesh dim",
            _styled(plan, False),
            ranks=4,
            # Ranks that are threads have no process groups that DTensor could keep from one test to the next.
            processes="SequenceParallel" in name,
        )
        for name, plan in STYLES.items()
    ],
    *[
        Case(DP, f"{name} over {place}", make(**{key: value}), ranks=ranks, processes=name == "DDP")
        for name, make, key, values_ in [
            ("DDP", _ddp, "same", (True, False)),
            ("FSDP1", _fsdp1, "over", ("same", "other")),
            ("FSDP2 (`fully_shard`)", _fsdp2, "over", ("same", "other")),
        ]
        for place, value, ranks in [
            ("the ranks that hold the shards", values_[0], 3),
            ("another mesh dim", values_[1], 4),
        ]
    ],
    Case(
        DP,
        "FSDP1, hybrid, over both mesh dims",
        _fsdp1(over="both", strategy=ShardingStrategy.HYBRID_SHARD),
        ranks=4,
    ),
    Case(DP, "FSDP2, HSDP over both mesh dims", _fsdp2(over="both"), ranks=4),
    *[
        Case(
            DP,
            f"{name}, `torch.compile` around it, graph breaks allowed",
            make("around"),
            eager=NOTHING,
            processes=True,
        )
        for name, make in [("DDP", _ddp), ("FSDP1", _fsdp1), ("FSDP2", _fsdp2)]
    ],
    Case(DP, "DDP, parameters sharded", _ddp(sharded=True), SENT, SENT),
    Case(DP, "FSDP1, parameters sharded", _fsdp1(sharded=True), FLATTENED, FLATTENED),
    Case(DP, "FSDP2, parameters sharded", _fsdp2(sharded=True), IN_SHARDS, IN_SHARDS),
    Case(
        DP,
        "FSDP2 over another mesh dim, parameters sharded",
        _fsdp2(over="other", sharded=True),
        IN_SHARDS,
        IN_SHARDS,
        ranks=4,
    ),
    Case(DP, "DDP of a part, the rest of the parameters sharded", _beside_shards("ddp"), processes=True),
    Case(DP, "FSDP1, `ignored_states` sharded", _beside_shards("fsdp1")),
    Case(DP, "FSDP2, `ignored_params` sharded", _beside_shards("fsdp2")),
    Case(CC, "`dist.all_reduce(sharded)`", _raw_collective, SENT, SENT, processes=True),
    Case(CC, "`dist.broadcast(sharded, 0)`", _broadcast, SENT, NOT_IN_TORCH),
    Case(CC, "`dist.all_gather(list, sharded)`", _gathered, SENT, SENT),
    Case(CC, "functional `all_reduce(sharded, ...)`", _functional_collective, SENT, SENT),
]
