"""Patches of torch as objects: each has a name, a reason, and the versions that need it.

A new one is stated in the module that it belongs to, and listed in `patches` if it holds during a compilation; one that
stays until the process ends is put in by `put_in_once`. `leave_out` switches one off by its name, for tests.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A change to torch.

    Attributes:
        name: the name of the patch.
        what: the name in torch that is replaced.
        reason: what goes wrong without the patch.
        upstream: an issue or pull request of PyTorch about it. If none was found, the text that an issue would have.
        versions: the versions of torch that need it, as far as is known.
        put_in: makes the change. It gets a stack that undoes the change. For a patch of a trace it gets the trace's
            `ShapeEnv`, which lives as long as the trace.
    """

    name: str
    what: str
    reason: str
    upstream: str
    versions: str
    put_in: Callable[[Any], None]


LEFT_OUT: set[str] = set()
"""The names of patches that `leave_out` has switched off."""

_IN_PLACE: dict[str, tuple[Patch, contextlib.ExitStack]] = {}


def put_in(patches: Sequence[Patch], where: object) -> None:
    """Put in the patches that are not left out."""
    for patch in patches:
        if patch.name not in LEFT_OUT:
            patch.put_in(where)


def put_in_once(patch: Patch) -> None:
    """Put in a patch that stays until the process ends, unless it is in place. One that is left out comes later."""
    if patch.name not in _IN_PLACE:
        _IN_PLACE[patch.name] = patch, contextlib.ExitStack()
        if patch.name not in LEFT_OUT:
            patch.put_in(_IN_PLACE[patch.name][1])


def in_place() -> tuple[Patch, ...]:
    """The patches that `put_in_once` has put in."""
    return tuple(patch for patch, _ in _IN_PLACE.values())


@contextlib.contextmanager
def leave_out(name: str) -> Iterator[None]:
    """Inside the context, a patch is not in place, even one that was put in for good. Tests ask so if it is needed."""
    LEFT_OUT.add(name)
    if name in _IN_PLACE:
        _IN_PLACE[name][1].close()
    try:
        yield
    finally:
        LEFT_OUT.discard(name)
        if name in _IN_PLACE:
            patch, stack = _IN_PLACE[name]
            patch.put_in(stack)


def replace(stack: contextlib.ExitStack, owner: object, name: str, by: Callable[[Any], object]) -> None:
    """Replace an attribute until a stack is closed.

    Args:
        stack: restores the attribute. A static method of a class is restored as one.
        owner: a module, a class or another object.
        name: the name of the attribute.
        by: gets the value of the attribute, and returns the new value.
    """
    found = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, by(getattr(owner, name)))
    stack.callback(setattr, owner, name, found)


def replace_entry(stack: contextlib.ExitStack, table: dict[Any, Any], key: object, by: Callable[[Any], object]) -> None:
    """Replace an entry of a table as `replace` does an attribute."""
    found = table[key]
    table[key] = by(found)
    stack.callback(table.__setitem__, key, found)
