"""A patch of torch: an object with a name, a reason, and the versions that need it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """Something of torch that is replaced.

    Attributes:
        name: of the patch.
        what: the name that is replaced.
        reason: what goes wrong without it.
        upstream: an issue or pull request of PyTorch about it; where none was found, the text that an issue would have.
        versions: of torch that need it, as far as is known.
        put_in: replaces it. It is given a stack that puts things back; for a patch of a trace the symbols of the trace,
            which live as long as it does.
    """

    name: str
    what: str
    reason: str
    upstream: str
    versions: str
    put_in: Callable[[Any], None]


LEFT_OUT: set[str] = set()
"""Names of patches that are not put in."""

_IN_PLACE: dict[str, tuple[Patch, contextlib.ExitStack]] = {}


def put_in(patches: Sequence[Patch], where: object) -> None:
    """Put in those that are not left out."""
    for patch in patches:
        if patch.name not in LEFT_OUT:
            patch.put_in(where)


def put_in_for_good(*patches: Patch) -> None:
    """Put in what stays for as long as the process lives."""
    for patch in patches:
        stack = contextlib.ExitStack()
        patch.put_in(stack)
        _IN_PLACE[patch.name] = patch, stack


def put_in_once(patch: Patch) -> None:
    """Put in what stays for as long as the process lives, where it is not in place or left out."""
    if patch.name not in LEFT_OUT and patch.name not in _IN_PLACE:
        put_in_for_good(patch)


def in_place() -> tuple[Patch, ...]:
    """What was put in for good."""
    return tuple(patch for patch, _ in _IN_PLACE.values())


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Do without a patch, to see whether it is needed. One that was put in for good is taken out meanwhile."""
    LEFT_OUT.add(name)
    patch, stack = _IN_PLACE.get(name, (None, None))
    if stack is not None:
        stack.close()
    try:
        yield
    finally:
        LEFT_OUT.discard(name)
        if patch is not None:
            put_in_for_good(patch)


def replace(stack: contextlib.ExitStack, owner: object, name: str, by: Callable[[Any], object]) -> None:
    """Replace something by what a function makes of it, until the stack is closed.

    Args:
        stack: puts it back as it was, a static method of a class included.
        owner: a module, a class or another object.
        name: of what is replaced.
        by: gets what was found, and returns what is put in its place.
    """
    found = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, by(getattr(owner, name)))
    stack.callback(setattr, owner, name, found)
