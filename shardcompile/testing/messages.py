"""The messages between pytest and its ranks: picklable data without torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """The first message to a rank: its rank, and the port of the store for the rendezvous of the process group."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    pytest_args: tuple[str, ...]


@dataclass(frozen=True)
class RunTest:
    """A request to run one test function.

    Attributes:
        path: the file of the test module.
        names: the attributes from the module to the function, such as `("TestPlan", "test_moves")`.
        arguments: the arguments of the function, each pickled by itself.
        sys_path: pytest's `sys.path`, so that the test finds the same helper modules.
        mesh_shape: the shape of the mesh that the mark of the test states, or None.
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
    """A request to call a function with a mesh over all ranks.

    Attributes:
        payload: the function and its other arguments, pickled by cloudpickle.
        sources: the entries of `linecache` for code without a file, such as notebook cells.
        sys_path: the `sys.path` for the imports of the function.
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
    """How a test ended on one rank, as reports show it."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    RUNNING = "still running"
    DIED = "died"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test on one rank.

    Attributes:
        kind: how the test ended.
        detail: one line: the exception, the reason of a skip, or the cause of death.
        traceback: the text of the traceback, for `FAILED`.
        result: the result and the output of a `RunFunction`, pickled.
    """

    kind: Kind
    detail: str = ""
    traceback: str = ""
    result: bytes = b""
