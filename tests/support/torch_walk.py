"""What of torch is replaced: attributes of its modules and classes, and entries of its tables, before and after.

It is run as a program, since an import can be watched only in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

Snapshot = dict[str, Any]
_TABLES = (dict, list)
_LARGEST_TABLE = 5000


def snapshot() -> Snapshot:
    """All attributes of torch's loaded modules and their classes, and the entries of their tables, by name."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == "torch" or name.startswith("torch.")):
            for place, value in _of_module(name, module):
                found[place] = value
    return found


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(module).items()):
        if attribute.startswith("__"):
            continue
        place = f"{name}.{attribute}"
        yield place, value
        if isinstance(value, type) and value.__module__ == name:
            for member, of_class in list(vars(value).items()):
                yield f"{place}.{member}", of_class
        elif type(value) is dict and len(value) < _LARGEST_TABLE:
            for key, entry in list(value.items()):
                if isinstance(key, str) or callable(key):
                    yield f"{place}[{key}]", entry


def replaced(before: Snapshot, after: Snapshot) -> set[str]:
    """The names of functions that are something else than before, or gone, and of those that classes have gained."""
    gone = object()
    changed = {name for name, value in before.items() if _is_function(value) and after.get(name, gone) is not value}
    gained = {
        name
        for name, value in after.items()
        if name not in before and _is_function(value) and isinstance(before.get(name.rpartition(".")[0]), type)
    }
    return (changed | gained) - _BY_TORCH


def _is_function(value: object) -> bool:
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


_BY_TORCH = {"torch.fx.graph_module._forward_from_src"}
"""What torch itself replaces while it runs."""
