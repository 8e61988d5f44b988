"""The inputs of `assert_matches_single_device`: full values and their layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardcompile.collectives.transport import as_bytes
from shardcompile.sharding import normalize_placements
from shardcompile.testing.arrange import lay_out, seed_of, sizes_in_style

Placements = Placement | Sequence[Placement] | None
Sizes = Mapping[int, Sequence[int]] | None

_FIRST_STYLE = 1  # one shard has one row, another is empty: see `uneven_sizes`


@dataclass(frozen=True)
class _Input:
    """One argument of the call.

    Attributes:
        name: a name for messages.
        value: the full value.
        placements: None if the value stays plain.
        sizes: the shard sizes that the user stated; None if they follow from the step.
    """

    name: str
    value: Any
    placements: tuple[Placement, ...] | None
    sizes: Sizes


class Arguments:
    """The arguments of a call, positional or by name.

    Args:
        inputs: full values; a mapping passes them by name.
        placements: the placements of each input.
        sharding_shapes: for each input the shard sizes by mesh dim. By default they change with every step.
        mesh: the mesh.
        want_grads: whether floating-point tensors require gradients.

    Raises:
        ValueError: lengths or names differ, or an input that is no plain tensor has placements.
    """

    def __init__(
        self,
        inputs: Sequence[object] | Mapping[str, object],
        placements: Sequence[Placements] | Mapping[str, Placements],
        sharding_shapes: Sequence[Sizes] | Mapping[str, Sizes] | None,
        mesh: DeviceMesh,
        want_grads: bool,
    ) -> None:
        self.mesh = mesh
        self._want_grads = want_grads
        values = _by_key(inputs)
        wanted = _with_keys_of(values, placements, "placements")
        sizes = dict.fromkeys(values) if sharding_shapes is None else _with_keys_of(values, sharding_shapes, "sizes")
        self._inputs = {key: _input(key, values[key], wanted[key], sizes[key], mesh) for key in values}

    def plain(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and the named arguments as plain, full values. Tensors are new autograd leaves."""
        return _split({k: self._leaf(i.value.detach().clone()) if isinstance(i.value, Tensor) else i.value
                       for k, i in self._inputs.items()})  # fmt: skip

    def sharded(self, step: int) -> tuple[list[Any], dict[str, Any]]:
        """Returns the same arguments with the layouts of a step."""
        return _split({key: self._lay_out(each, step) for key, each in self._inputs.items()})

    def digests(self) -> list[str]:
        """Returns a line for each argument that identifies its value."""
        return [digest(each.name, each.value) for each in self._inputs.values()]

    def _lay_out(self, each: _Input, step: int) -> object:
        if not isinstance(each.value, Tensor):
            return each.value
        value = each.value.detach().to(self.mesh.device_type)
        if each.placements is None:
            return self._leaf(value.clone())
        sizes = sizes_in_style(value.shape, self.mesh, each.placements, _FIRST_STYLE + step)
        sizes.update({m: list(s) for m, s in (each.sizes or {}).items()})
        return self._leaf(lay_out(value, self.mesh, each.placements, sizes, seed_of(each.name)))

    def _leaf(self, x: Tensor) -> Tensor:
        x = x.to(self.mesh.device_type)
        return x.requires_grad_(self._want_grads and (x.is_floating_point() or x.is_complex()))


def _by_key(given: object) -> dict[object, object]:
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"inputs, placements and sharding_shapes are lists or mappings, got {type(given).__name__}")
    return dict(enumerate(given))


def _with_keys_of(values: dict[object, object], given: object, what: str) -> dict[Any, Any]:
    found = _by_key(given)
    if found.keys() != values.keys():
        raise ValueError(f"there are {what} for {list(found)}, but inputs {list(values)}")
    return found


def _input(key: object, value: object, placements: Placements, sizes: Sizes, mesh: DeviceMesh) -> _Input:
    name = f"input {key!r}"
    if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{name} is a {type(value).__name__}; inputs are plain, full tensors")
    if placements is None:
        return _Input(name, value, None, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be sharded: its placements must be None")
    several = [placements] if isinstance(placements, Placement) else list(placements)
    return _Input(name, value, normalize_placements(several, mesh, value.ndim), sizes)


def _split(values: dict[object, object]) -> tuple[list[object], dict[str, object]]:
    positional = [v for k, v in values.items() if isinstance(k, int)]
    return positional, {k: v for k, v in values.items() if isinstance(k, str)}


def digest(name: str, value: object) -> str:
    """Returns a line that identifies a value: equal values have the same line on every rank."""
    if not isinstance(value, Tensor):
        has_stable_repr = value is None or isinstance(value, (bool, int, float, complex, str))
        return f"{name}: {value!r}" if has_stable_repr else f"{name}: {type(value).__name__}"
    flat = as_bytes(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
    content = hashlib.blake2b(flat.numpy().tobytes(), digest_size=6).hexdigest()
    return f"{name}: {value.dtype} {tuple(value.shape)} with digest {content}"
