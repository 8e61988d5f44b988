"""Patches of torch as objects: each has a name, a reason, the versions that need it, and what it replaces.

A new one is stated in the module that it belongs to, and listed in `patches` if it holds during a compilation; one that
stays until the process ends is put in by `put_in_once`. `leave_out` switches one off by its name, for tests.

A patch is put in with the versions of torch that need it. With a version that is newer than all `KNOWN_VERSIONS` it is
put in if what it replaces is as it was in the newest known one, by `fingerprints`. Otherwise it is left out, and a
warning says so once.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardcompile.compat.fingerprints import (
    KNOWN_VERSIONS,
    Version,
    fingerprint,
    is_known,
    recorded,
    running_version,
    version_of,
)

Kind = Literal["bug", "sizes", "sharing"]
State = Literal["in place", "when compiling", "not needed", "left out"]


@dataclass(frozen=True)
class Patch:
    """A change to torch.

    Attributes:
        name: the name of the patch.
        what: the name in torch that is replaced.
        reason: what goes wrong without the patch.
        upstream: an issue or pull request of PyTorch about it. If none was found, the text that an issue would have, or
            "None: " and why it is no fault of torch.
        versions: the versions of torch that need it, as far as is known.
        put_in: makes the change. It gets a stack that undoes the change. For a patch of a trace it gets the trace's
            `ShapeEnv`, which lives as long as the trace.
        kind: "bug", "sizes" (keeps a shard's size from being specialised), or "sharing" (one rank compiles for all).
    """

    name: str
    what: str
    reason: str
    upstream: str
    versions: str
    put_in: Callable[[Any], None]
    kind: Kind = "bug"

    @property
    def is_needed(self) -> bool:
        """Whether the running version of torch needs it; a newer one than is known needs what the newest known does."""
        return self.is_needed_by(min(running_version(), version_of(KNOWN_VERSIONS[-1])))

    def is_needed_by(self, version: Version) -> bool:
        """Whether a known version of torch needs it."""
        first, _, last = self.versions.partition(" - ")
        return version_of(first) <= version <= version_of(last or first)


class Changed(Exception):
    """What a patch replaces is not what it was in a known version of torch."""


LEFT_OUT: set[str] = set()
"""The names of patches that `leave_out` has switched off."""

UNFIT: dict[str, str] = {}
"""By name, why patches do not fit the running version of torch."""

_IN_PLACE: dict[str, tuple[Patch, contextlib.ExitStack]] = {}
_REPLACED: dict[tuple[int, object], object] = {}
"""What torch had in places that are replaced now, by owner and name."""


def put_in(patches: Sequence[Patch], where: object) -> None:
    """Put in the patches that this version of torch needs, fit it, and are not left out."""
    for patch in patches:
        if patch.name not in LEFT_OUT and patch.is_needed and patch.name not in UNFIT:
            _put_in_if_it_fits(patch, where)


def _put_in_if_it_fits(patch: Patch, where: object) -> None:
    if is_known():
        patch.put_in(where)
        return
    with contextlib.ExitStack() as meanwhile:
        try:
            patch.put_in(meanwhile if isinstance(where, contextlib.ExitStack) else where)
        except (Changed, AttributeError, ImportError, KeyError) as error:
            _leave_out_unfit(patch, error)
        if isinstance(where, contextlib.ExitStack):
            where.push(meanwhile.pop_all())


def _leave_out_unfit(patch: Patch, error: Exception) -> None:
    first = not UNFIT
    UNFIT[patch.name] = str(error)
    if first:
        warnings.warn(
            f"shardcompile is not known to work with torch {'.'.join(map(str, running_version()))}: a change to torch "
            f"that it needs does not fit ({patch.name}: {error}), and is left out. `python -m shardcompile doctor` "
            "lists all such changes, and what goes wrong without them",
            stacklevel=2,
        )


def put_in_once(patch: Patch) -> None:
    """Put in a patch that stays until the process ends, unless it is in place. One that is left out comes later."""
    if patch.name not in _IN_PLACE:
        _IN_PLACE[patch.name] = patch, contextlib.ExitStack()
        put_in([patch], _IN_PLACE[patch.name][1])


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
            put_in([_IN_PLACE[name][0]], _IN_PLACE[name][1])


def state_of(patch: Patch) -> State:
    """Whether a patch is in place, is put in while a graph is compiled, is not needed, or does not fit."""
    if not patch.is_needed:
        return "not needed"
    if patch.name in UNFIT or patch.name in LEFT_OUT:
        return "left out"
    return "in place" if patch.name in _IN_PLACE else "when compiling"


def replace(stack: contextlib.ExitStack, owner: object, name: str, by: Callable[[Any], object]) -> None:
    """Replace an attribute until a stack is closed.

    Args:
        stack: restores the attribute. A static method of a class is restored as one.
        owner: a module, a class or another object.
        name: the name of the attribute.
        by: gets the value of the attribute, and returns the new value.
    """
    found = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    require(owner, name)
    _note(stack, owner, name, found)
    setattr(owner, name, by(getattr(owner, name)))
    stack.callback(setattr, owner, name, found)


def replace_entry(
    stack: contextlib.ExitStack, name: str, table: dict[Any, Any], key: object, by: Callable[[Any], object]
) -> None:
    """Replace an entry of a table, which has a name in torch, as `replace` does an attribute."""
    found = table[key]
    _check(f"{name}[{key}]", _REPLACED.get((id(table), key), found))
    _note(stack, table, key, found)
    table[key] = by(found)
    stack.callback(table.__setitem__, key, found)


def require(owner: object, name: str) -> None:
    """Note that a patch replaces, or relies on, what an attribute is.

    Raises:
        Changed: with a version of torch that is not known, if it is not what it was.
    """
    found = _REPLACED.get((id(owner), name), getattr(owner, name))
    module = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{getattr(owner, '__qualname__', '')}"
    _check(f"{module}.{name}", found)


def _note(stack: contextlib.ExitStack, owner: object, name: object, found: object) -> None:
    place = id(owner), name
    if place not in _REPLACED:
        _REPLACED[place] = found
        stack.callback(_REPLACED.pop, place)


def _check(place: str, found: object) -> None:
    if _SEEN is not None:
        _SEEN[place] = fingerprint(found)
    elif not is_known() and recorded(KNOWN_VERSIONS[-1]).get(place) != fingerprint(found):
        raise Changed(f"{place} has changed since torch {KNOWN_VERSIONS[-1]}")


_SEEN: dict[str, str] | None = None


def fingerprints_of(patches: Sequence[Patch], make_trace: Callable[[], object]) -> dict[str, str]:
    """The fingerprints of what patches replace in the running version of torch, by name.

    Args:
        patches: each is put in, and taken out again, if it is needed.
        make_trace: makes what patches of a trace are put into.
    """
    global _SEEN
    _SEEN = {}
    try:
        for patch in patches:
            if patch.is_needed:
                with contextlib.ExitStack() as stack:
                    patch.put_in(stack if _takes_stack(patch) else make_trace())
        return dict(sorted(_SEEN.items()))
    finally:
        _SEEN = None


def _takes_stack(patch: Patch) -> bool:
    return "shape_env" not in inspect.signature(patch.put_in).parameters
