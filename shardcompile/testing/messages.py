"""What pytest and its ranks say to each other. Plain data, no torch: both sides pickle it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """First message to a rank: who it is, and where the ranks meet."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    pytest_args: tuple[str, ...]


@dataclass(frozen=True)
class RunTest:
    """Run one test function.

    Attributes:
        path: the file of the test module.
        names: attributes from the module to the function, such as `("TestPlan", "test_moves")`.
        arguments: each argument of the function, pickled on its own.
        sys_path: pytest's `sys.path`, so that the test finds the same helper modules.
        mesh_shape: of the mesh that the test asks for, if it states one.
        warning_filters: the filters of the ini file, of the command line, and of the test's own marks.
    """

    path: str
    names: tuple[str, ...]
    arguments: dict[str, bytes]
    sys_path: tuple[str, ...]
    mesh_shape: tuple[int, ...] | None
    warning_filters: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class RunFunction:
    """Call a function with a mesh of all ranks.

    Attributes:
        payload: the function and its other arguments, pickled by cloudpickle.
        sources: entries of `linecache` for code that is in no file.
        sys_path: where the function finds what it imports.
    """

    payload: bytes
    sources: dict[str, Any]
    sys_path: tuple[str, ...]


class Request(enum.Enum):
    """Messages to a rank that carry no data."""

    SYNCHRONISE = "synchronise"
    LEAVE = "leave"


class Reply(enum.Enum):
    """Messages from a rank that carry no data."""

    READY = "ready"
    SYNCHRONISED = "synchronised"


class Kind(enum.Enum):
    """How a test ended on one rank; the value is how a report words it."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    RUNNING = "still running"
    DIED = "died"


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank.

    Attributes:
        detail: one line: the exception, the reason of a skip, what the process died of.
        traceback: the text of the traceback, for `FAILED`.
        result: what a `RunFunction` returned, and what it printed, pickled.
    """

    kind: Kind
    detail: str = ""
    traceback: str = ""
    result: bytes = b""
