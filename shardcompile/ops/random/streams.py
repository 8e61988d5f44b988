"""Streams of random numbers: runs any random op on local shards.

The default CPU generator, or the generator of the call, generates one seed per call on every rank. Over mesh dims that
replicate, the seed of the first rank is broadcast. Over mesh dims that shard, the coordinate of the rank is mixed into
the seed. The op then draws from a generator with this seed. So the generators of all ranks advance by the same amount,
whatever the shard sizes.

In a graph, a random op becomes an op of the namespace ``shardcompile`` that takes the seed as a tensor. It is defined
from the schema of the op when the op is first called.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import wait
from shardcompile.compat import OpOverload
from shardcompile.compat.own_ops import define_op
from shardcompile.ops.registry import record_of
from shardcompile.ops.support.global_meta import tensors_of

_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: adjacent coordinates get unrelated seeds
_GENERATOR = re.compile(r"Generator\? \w+(=None)?(, )?")


def drawn(op: OpOverload, mesh: DeviceMesh, sharded: Sequence[int]) -> Callable[..., object]:
    """Returns the function that runs a random op on local shards, with the arguments of the op.

    Args:
        op: the op.
        mesh: the mesh of ranks.
        sharded: mesh dims over which ranks draw independently; over the others they draw the same numbers.
    """
    position = next((i for i, a in enumerate(op._schema.arguments) if _is_generator(a)), None)
    name = None if position is None else op._schema.arguments[position].name
    seeded = _seeded(op)

    def run(*args: object, **kwargs: object) -> object:
        generator = None
        if position is not None and name is not None:
            generator = kwargs.pop(name, None)
            if len(args) > position:
                generator, args = args[position], args[:position] + args[position + 1 :]
        assert generator is None or isinstance(generator, torch.Generator)
        seed = _shared_seed(mesh, sharded, _device(args, kwargs), generator)
        return seeded(seed, [compat.group_name_of(mesh, m) for m in sharded], *args, **kwargs)

    return run


def kernel_on_shards(op: OpOverload, mesh: DeviceMesh, sharded: Sequence[int]) -> Callable[..., object]:
    """Returns the function that runs any op, random or not, on local shards."""
    return drawn(op, mesh, sharded) if record_of(op).is_random else op


def _shared_seed(
    mesh: DeviceMesh, sharded: Sequence[int], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Returns a seed that is the same on all ranks along the mesh dims that replicate."""
    draw_device = "cpu" if generator is None else generator.device
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, generator=generator, device=draw_device)
    groups = [compat.group_name_of(mesh, m) for m in range(mesh.ndim) if m not in sharded]
    if not groups:
        return seed
    seed = seed.to(device)
    for group in groups:
        seed = wait(torch.ops._c10d_functional.broadcast(seed, 0, group))
    return seed


@functools.cache
def _seeded(op: OpOverload) -> OpOverload:
    """Returns the seeded version of a random op, which takes the seed and the groups that shard as first arguments."""
    name = "seeded_" + re.sub(r"\W", "_", op.name())
    arguments, returns = str(op._schema).split("(", 1)[1].rsplit(" -> ", 1)
    arguments = _GENERATOR.sub("", arguments.rsplit(")", 1)[0]).rstrip(" ,*")
    # Inductor makes an `inspect.Signature` of the schema, in which a name must not be a keyword of Python.
    arguments = re.sub(r"\bfrom\b", "from_", arguments)
    schema = f"{name}(Tensor seed, str[] group_names, {arguments}) -> {returns}"
    generator_name = next((a.name for a in op._schema.arguments if _is_generator(a)), None)
    record = record_of(op)
    kernel = record.kernel or op

    def run(seed: Tensor, group_names: list[str], *args: object, **kwargs: object) -> object:
        coordinate = 0
        for group_name in group_names:
            group = compat.process_group(group_name)
            coordinate = coordinate * group.size() + group.rank()
        rank_seed = (int(seed.item()) + coordinate * _MIX) % (1 << 63)
        device = _device(args, kwargs)
        if generator_name is not None:
            generator = torch.Generator(device)
            generator.manual_seed(rank_seed)
            return _without_aliases(kernel(*args, **kwargs, **{generator_name: generator}), args)
        with _default_generators_seeded(device, rank_seed):
            return _without_aliases(kernel(*args, **kwargs), args)

    def fake(seed: Tensor, group_names: list[str], *args: object, **kwargs: object) -> object:
        shape_kernel: Callable[..., object] = record.shape_kernel or op
        return _without_aliases(shape_kernel(*args, **kwargs), args)

    return define_op(schema, run, fake, any_strides=False)  # not capturable, as the seed is read on the CPU


def _is_generator(argument: torch._C.Argument) -> bool:
    return "Generator" in str(argument.type)


def _device(args: Sequence[object], kwargs: dict[str, object]) -> torch.device:
    """Returns the device on which an op draws."""
    named = kwargs.get("device")
    if isinstance(named, (str, torch.device)):
        return torch.device(named)
    found = next(tensors_of([*args, *kwargs.values()]), None)
    return torch.device("cpu") if found is None else found.device


def _without_aliases(out: object, args: Sequence[object]) -> object:
    """Clones results of an op that are one of its arguments, since results of a custom op must not alias its inputs."""
    if isinstance(out, Tensor):
        return out.clone() if any(out is a for a in args) else out
    return type(out)(_without_aliases(o, args) for o in out) if isinstance(out, (list, tuple)) else out


@contextlib.contextmanager
def _default_generators_seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the default generators inside the context and restores their states afterwards."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append(module.default_generators[module.current_device() if device.index is None else device.index])
    states = [g.get_state() for g in generators]
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)
