"""The arguments of an op by name. A named tuple is the op's signature, and holds the arguments of a call.

One such record serves everywhere: at run time with tensors and numbers in it, in a trace with fake tensors and symbols,
in a graph with nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

from torch import Tensor

from shardcompile.sharding import (
    GroupPartition,
    IntLike,
    read_partition,
    read_partitions,
    write_partition,
    write_partitions,
)
from shardcompile.sharding.arguments import PARTITION_WIDTH, PARTITIONS_WIDTH, partition_schema, partitions_schema

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
    """How records of one type are written as an op's arguments.

    Args:
        record: a `NamedTuple`, of which the types of fields say those of arguments. A field that is a `GroupPartition`
            is three arguments, of which the names begin with the field's name, unless that is ``partition``; a list of
            partitions is four.

    Attributes:
        record: the type.
        tensors: which of the op's arguments are tensors, lists of them left out.
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
        """The arguments as an op's schema has them."""
        return ", ".join(_schema(name, hint) for name, hint in self._hints.items())

    def read(self, arguments: Sequence[Any]) -> A:
        """The record that an op's arguments say."""
        if not self._partitions:
            return self.record(*arguments)
        fields = list(arguments)
        for at, (width, read, _) in self._partitions:  # each is one field by then
            fields[at : at + width] = [read(fields[at : at + width])]
        return self.record(*fields)

    def write(self, record: A) -> tuple[object, ...]:
        """A record as an op's arguments."""
        if not self._partitions:
            return record
        arguments: list[object] = list(record)
        for at, (_, _, write) in self._partitions_from_last:  # those before it have their places still
            arguments[at : at + 1] = write(record[at])
        return tuple(arguments)


_Part = tuple[int, Callable[[Sequence[Any]], Any], Callable[[Any], Sequence[Any]]]
_ONE: _Part = (1, lambda arguments: arguments[0], lambda field: (field,))
_PARTS: dict[Any, _Part] = {
    GroupPartition: (PARTITION_WIDTH, read_partition, write_partition),
    list[GroupPartition]: (PARTITIONS_WIDTH, read_partitions, write_partitions),
}
"""By a field's type: how many arguments it is, how it is read, and how it is written."""


def _schema(name: str, hint: object) -> str:
    if hint is GroupPartition:
        return partition_schema("" if name == "partition" else f"{name}_")
    return partitions_schema() if hint == list[GroupPartition] else f"{_TYPES[hint]} {name}"


def map_arguments(function: Callable[[Any], object], record: A) -> A:
    """A record with a function applied to all that is in it, in lists and partitions as well."""
    return type(record)(*(_map(function, field) for field in record))


def _map(function: Callable[[Any], Any], field: Any) -> Any:
    if isinstance(field, GroupPartition):
        return GroupPartition(_map(function, field.sizes), function(field.key), _map(function, field.grouping))
    if isinstance(field, (list, tuple)):
        return [_map(function, f) for f in field]
    return function(field)
