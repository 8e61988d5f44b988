"""Signatures of ops as named tuples: the type is the signature, and an instance holds the arguments of one call.

The same record type serves at run time (tensors and ints), in a trace (fake tensors and symbols), and in a graph
(nodes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

from torch import Tensor

from shardcompile.sharding import (
    GroupPartition,
    IntLike,
    read_group_partition,
    read_group_partitions,
    write_group_partition,
    write_group_partitions,
)
from shardcompile.sharding.codec import PARTITION_WIDTH, PARTITIONS_WIDTH, partition_schema, partitions_schema

A = TypeVar("A", bound="tuple[Any, ...]")
"""The type of an op's arguments: a `NamedTuple`."""

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    int: "int",
    list[int]: "int[]",
    IntLike: "SymInt",
    list[IntLike]: "SymInt[]",
    float: "float",
    float | None: "float?",
    list[float]: "float[]",
    str: "str",
}


class Signature(Generic[A]):
    """Converts records of one type to the flat arguments of an op, and back.

    Args:
        record: a `NamedTuple` whose field types determine the schema. A field of type `GroupPartition` becomes three
            arguments, whose names begin with the field's name unless that is ``partition``; a list of partitions
            becomes four.

    Attributes:
        record: the record type.
        tensors: positions of the op's arguments that are tensors; lists of tensors are not included.
    """

    def __init__(self, record: type[A]) -> None:
        self.record = record
        self._hints = get_type_hints(record)
        self._parts = [_PARTS.get(hint, _ONE) for hint in self._hints.values()]
        self._partitions = [(at, part) for at, part in enumerate(self._parts) if part is not _ONE]
        self._partitions_from_last = self._partitions[::-1]
        self.tensors: list[int] = []
        at = 0
        for hint, (width, _, _) in zip(self._hints.values(), self._parts, strict=True):
            if hint in (Tensor, Tensor | None):
                self.tensors.append(at)
            at += width

    @property
    def schema(self) -> str:
        """The argument list of the op's schema."""
        return ", ".join(_schema(name, hint) for name, hint in self._hints.items())

    def read(self, arguments: Sequence[Any]) -> A:
        """Returns the record for an op's flat arguments."""
        if not self._partitions:
            return self.record(*arguments)
        fields = list(arguments)
        for at, (width, read, _) in self._partitions:  # the fields before are already one entry each
            fields[at : at + width] = [read(fields[at : at + width])]
        return self.record(*fields)

    def write(self, record: A) -> tuple[object, ...]:
        """Returns a record as the op's flat arguments."""
        if not self._partitions:
            return record
        arguments: list[object] = list(record)
        for at, (_, _, write) in self._partitions_from_last:  # from the last: positions before it stay valid
            arguments[at : at + 1] = write(record[at])
        return tuple(arguments)


_Part = tuple[int, Callable[[Sequence[Any]], Any], Callable[[Any], Sequence[Any]]]
_ONE: _Part = (1, lambda arguments: arguments[0], lambda field: (field,))
_PARTS: dict[Any, _Part] = {
    GroupPartition: (PARTITION_WIDTH, read_group_partition, write_group_partition),
    list[GroupPartition]: (PARTITIONS_WIDTH, read_group_partitions, write_group_partitions),
}
"""Maps the type of a field to its number of arguments, its reader and its writer."""


def _schema(name: str, hint: object) -> str:
    if hint is GroupPartition:
        return partition_schema("" if name == "partition" else f"{name}_")
    return partitions_schema() if hint == list[GroupPartition] else f"{_TYPES[hint]} {name}"


def map_arguments(function: Callable[[Any], object], record: A) -> A:
    """Applies a function to every leaf of a record, also within lists and partitions."""
    return type(record)(*(_map(function, field) for field in record))


def _map(function: Callable[[Any], Any], field: Any) -> Any:
    if isinstance(field, GroupPartition):
        return GroupPartition(_map(function, field.sizes), function(field.key), _map(function, field.grouping))
    if isinstance(field, (list, tuple)):
        return [_map(function, f) for f in field]
    return function(field)
