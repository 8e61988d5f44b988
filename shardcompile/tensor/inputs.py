"""Checks of the tensors that constructors take. If ranks exchange anything, every rank learns what all have passed.

An error is therefore raised on all ranks, and no rank waits for another one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import all_gather_even
from shardcompile.collectives.transport import as_bytes
from shardcompile.errors import LayoutError
from shardcompile.sharded import Sharded
from shardcompile.sharding import digest_of

MAX_DIMS = 16
"""The most dims of a tensor whose shape can be exchanged."""

_HINTS = {
    "None": "Every rank passes a tensor; scatter_tensor scatters one that a single rank holds",
    "no tensor": "First torch.as_tensor(values)",
    "a DTensor": "ShardTensor.from_dtensor makes it a ShardTensor",
    "a ShardTensor": "x.redistribute gives it another layout, and x.to_local() is this rank's local shard",
    "a nested tensor": "Pass its values(), or torch.nested.to_padded_tensor",
    "a sparse tensor": "First to_dense()",
    "a quantized tensor": "First dequantize()",
    "a tensor on another device": "First to(mesh.device_type)",
    "a result of autograd": "distribute_tensor takes leaves of the autograd graph; from_local(x, mesh) is "
    "differentiable",
    f"a tensor of more than {MAX_DIMS} dims": "The shapes of such tensors cannot be exchanged",
}
"""The inputs that are refused, and what to do instead."""

DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
"""All dtypes, in the same order on all ranks."""

Row = TypeVar("Row")
Coordinate = tuple[int, ...]
"""The coordinate of a rank in a mesh."""

_KINDS = ["a dense tensor", *_HINTS]

DENSE = 0
"""The kind of input that every constructor takes. Kinds are integers, so that ranks can exchange them."""

SHARDED = _KINDS.index("a ShardTensor")
"""The kind of input that only `distribute_tensor` takes, if every rank passes it."""


def kind_of(x: object, mesh: DeviceMesh | None = None, leaf: bool = False) -> int:
    """Returns the kind of an input; `DENSE` for a dense plain tensor, also on the meta device.

    Args:
        x: the input.
        mesh: the mesh whose device the tensor must have; None if any device is accepted.
        leaf: whether it must be a leaf of the autograd graph.
    """
    if x is None:
        return _KINDS.index("None")
    if not isinstance(x, Tensor):
        return _KINDS.index("no tensor")
    # Nested and sparse tensors do not support more queries than these.
    found = {
        "a ShardTensor": isinstance(x, Sharded),
        "a DTensor": hasattr(x, "device_mesh"),
        "a nested tensor": x.is_nested,
        "a sparse tensor": x.layout is not torch.strided,
        "a quantized tensor": x.is_quantized,
        "a tensor on another device": mesh is not None
        and not x.is_meta
        and not compat.is_fake(x)
        and x.device.type != mesh.device_type,
        "a result of autograd": leaf and not x.is_leaf,
    }
    kind = next((_KINDS.index(name) for name, is_so in found.items() if is_so), DENSE)
    if kind == DENSE and x.ndim > MAX_DIMS:
        return _KINDS.index(f"a tensor of more than {MAX_DIMS} dims")
    return kind


def check_kind(constructor: str, kind: int, where: str = "on this rank") -> None:
    """Refuses an input that is not a dense plain tensor.

    Args:
        constructor: the function that was called.
        kind: the kind of its input, see `kind_of`.
        where: the rank that has passed it, as part of the message.

    Raises:
        LayoutError: the same on every rank, if `kind` and `where` are.
    """
    if kind != DENSE:
        name = _KINDS[kind]
        raise LayoutError(f"{constructor} takes a dense plain tensor, got {name} {where}. {_HINTS[name]}")


class Given(NamedTuple):
    """The arguments of a rank as a row of integers, which ranks exchange."""

    request: int
    kind: int
    is_meta: int = 0
    dtype: int = -1
    ndim: int = -1
    shape: tuple[int, ...] = (0,) * MAX_DIMS

    @classmethod
    def of(cls, request: str, x: object, kind: int) -> Given:
        """Encodes a tensor, unless its kind is refused, and the other arguments of the call as text."""
        if kind != DENSE or not isinstance(x, Tensor):
            return cls(digest_of(request), kind)
        shape = (*x.shape, *[0] * (MAX_DIMS - x.ndim))
        return cls(digest_of(request), kind, x.is_meta, DTYPES.index(x.dtype), x.ndim, shape)

    def sizes(self) -> tuple[int, ...]:
        """Returns the shape without its padding."""
        return self.shape[: self.ndim]


def as_tuple(shape: object) -> object:
    """Returns a shape as a tuple, for a request; other values are unchanged, so that ranks compare them."""
    return tuple(shape) if isinstance(shape, Sequence) else shape


def gather_rows(row: Sequence[int], mesh: DeviceMesh) -> list[list[int]]:
    """Gathers one row of integers from each rank of a mesh, in the order of the mesh."""
    table = torch.tensor([row], dtype=torch.int64, device=mesh.device_type)
    for mesh_dim in reversed(range(mesh.ndim)):
        table = all_gather_even(table, mesh.get_group(mesh_dim))
    rows: list[list[int]] = table.tolist()
    return rows


def exchange(row: Sequence[int], mesh: DeviceMesh) -> dict[Coordinate, list[int]]:
    """Gathers one row of integers from each rank, by mesh coordinate."""
    return dict(zip(itertools.product(*map(range, mesh.shape)), gather_rows(row, mesh), strict=True))


def checksum(x: Tensor) -> int:
    """Returns a hash of 56 bits of the values, the same in every process; 0 for a tensor without values."""
    if x.is_meta:
        return 0
    data = as_bytes(x.detach().resolve_conj().resolve_neg().contiguous().cpu())
    return int.from_bytes(hashlib.blake2b(data.numpy().tobytes(), digest_size=7).digest(), "big")


def exchange_given(given: Given, mesh: DeviceMesh) -> dict[Coordinate, Given]:
    """Gathers the arguments of all ranks, by mesh coordinate."""
    *fields, shape = given
    rows = exchange([*fields, *shape], mesh)
    return {c: Given._make([*r[:-MAX_DIMS], tuple(r[-MAX_DIMS:])]) for c, r in rows.items()}


def check_given(constructor: str, given: Mapping[Coordinate, Given]) -> None:
    """Refuses, on all ranks, an input that any rank has passed and that is not a dense plain tensor."""
    for coordinate, g in given.items():
        check_kind(constructor, g.kind, f"at mesh coordinate {coordinate}")
    require_same(given, "is_meta", "a tensor on another device", lambda g: "meta" if g.is_meta else "not meta")


def require_same(rows: Mapping[Coordinate, Row], field: str, what: str, show: Callable[[Row], str]) -> None:
    """Refuses, on all ranks, rows that differ in a field.

    Args:
        rows: named tuples, by mesh coordinate.
        field: the field that has to be the same in all of them.
        what: the words for a different value, such as "another dtype".
        show: describes a row in the message.

    Raises:
        LayoutError: they differ.
    """
    first = next(iter(rows))
    for coordinate, row in rows.items():
        if getattr(row, field) != getattr(rows[first], field):
            raise LayoutError(
                f"the shards do not belong together: mesh coordinate {coordinate} has {what} than {first} "
                f"({show(row)} against {show(rows[first])})"
            )


class Agreed(NamedTuple):
    """What all ranks know about the tensor that is distributed.

    Attributes:
        shape: its global shape.
        dtype: its element type.
        is_meta: whether it is on the meta device, and has no values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool


def agreed_metadata(tensor: object, source: Coordinate | None, mesh: DeviceMesh, request: str) -> Agreed:
    """Returns the metadata of the source's tensor for `scatter_tensor`, after comparing the arguments of all ranks.

    Args:
        tensor: the argument of this rank; used on the source only.
        source: mesh coordinate of the source; None if it is not in the mesh.
        mesh: the mesh.
        request: the other arguments of the call, as text.

    Raises:
        LayoutError: on every rank.
    """
    is_source = compat.coordinate(mesh) == source
    local = Given.of(request, tensor, kind_of(tensor)) if is_source else Given.of(request, None, DENSE)
    given = exchange_given(local, mesh)
    _require_same_request(given, request)
    if source is None:
        raise LayoutError(f"the source is not in the mesh {mesh}")
    announced = given[source]
    check_kind("scatter_tensor", announced.kind, f"from the source at mesh coordinate {source}")
    return Agreed(announced.sizes(), DTYPES[announced.dtype], bool(announced.is_meta))


def agreed_copies(tensor: object, source: Coordinate, mesh: DeviceMesh, request: str) -> Agreed | None:
    """Returns the metadata of the tensor that all ranks pass to `distribute_tensor`; None if it is a ShardTensor.

    Args:
        tensor: the argument of this rank.
        source: mesh coordinate of the rank whose values are distributed.
        mesh: the mesh.
        request: the other arguments of the call, as text.

    Raises:
        LayoutError: on every rank, if the ranks do not pass the same.
    """
    given = exchange_given(Given.of(request, tensor, kind_of(tensor, leaf=True)), mesh)
    if all(g.kind == SHARDED for g in given.values()):
        _require_same_request(given, request)
        return None
    check_given("distribute_tensor", given)
    _require_same_request(given, request)
    announced = given[source]
    for coordinate, g in given.items():
        if (g.sizes(), g.dtype) != (announced.sizes(), announced.dtype):
            raise LayoutError(
                f"the ranks hold different tensors: {DTYPES[g.dtype]} of shape {g.sizes()} at mesh coordinate "
                f"{coordinate}, {DTYPES[announced.dtype]} of shape {announced.sizes()} at {source}"
            )
    return Agreed(announced.sizes(), DTYPES[announced.dtype], bool(announced.is_meta))


def _require_same_request(given: Mapping[Coordinate, Given], request: str) -> None:
    require_same(given, "request", "other arguments", lambda g: f"digest {g.request:x}; here {request}")
