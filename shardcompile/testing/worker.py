"""The main loop of a rank: a process that runs test functions until pytest closes the connection."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import linecache
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

# pytest has no public way to import a module, or to filter warnings, as it does itself (seen in 8.2 to 9.2).
from _pytest.config import apply_warning_filters, parse_warning_filter
from _pytest.pathlib import import_path
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not declare that it exports it

from shardcompile.collectives.transport import device_type, gpus
from shardcompile.testing.cleanup import Cleaner, seed
from shardcompile.testing.current import default_mesh, set_mesh_shape
from shardcompile.testing.messages import Kind, Outcome, Reply, Request, RunFunction, RunTest, Setup

# pytest enforces the timeout of each test and kills the rank. This timeout only has to be longer.
_GROUP_TIMEOUT = timedelta(hours=2)


def main(connection_fd: int) -> NoReturn:
    """Serves tests until pytest sends `Request.LEAVE` or ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # pytest asks a hung rank for its stack
    os.set_inheritable(connection_fd, False)
    connection: Connection[Any, Any] = Connection(connection_fd)
    setup = connection.recv()
    # A whole pytest, configured like the parent's, is needed for its assertion rewriting alone.
    code = pytest.main([*setup.pytest_args], plugins=[_Serve(setup, connection)])
    os._exit(int(code) or 1)  # `_Serve` never returns: pytest could not start


class _Serve:
    """The pytest plugin that serves pytest's messages, instead of collecting and running tests."""

    def __init__(self, setup: Setup, connection: Connection[object, object]) -> None:
        self._setup = setup
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> NoReturn:
        inbox = _listen(self._connection)
        _join(self._setup)
        cleaner = Cleaner()
        self._connection.send(Reply.READY)
        while True:
            message = inbox.get()
            if isinstance(message, (RunTest, RunFunction)):
                self._connection.send(_run(message, config))
            elif message is Request.SYNCHRONISE:
                dist.barrier()
                self._connection.send(Reply.SYNCHRONISED)
                cleaner.after_test()
            else:
                dist.barrier()
                os._exit(0)  # the interpreter's exit would destroy the gloo group, which sometimes aborts


def _listen(connection: Connection[object, object]) -> queue.SimpleQueue[object]:
    """Receives messages in a thread, which notices the end of pytest even while a test runs."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            _die()

    threading.Thread(target=receive, name="shardcompile-rank-inbox", daemon=True).start()
    return inbox


def _die() -> NoReturn:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # including the processes that the test started
    os._exit(1)


def _join(setup: Setup) -> None:
    torch.set_num_threads(1)
    if device_type(setup.backend) == "cuda":
        gpus.take(setup.rank, setup.world_size)
    store = TCPStore("127.0.0.1", setup.store_port, is_master=False)
    dist.init_process_group(
        setup.backend, store=store, rank=setup.rank, world_size=setup.world_size, timeout=_GROUP_TIMEOUT
    )
    dist.barrier()


def _run(test: RunTest | RunFunction, config: pytest.Config) -> Outcome:
    seed()
    sys.path[:] = test.sys_path
    set_mesh_shape(None if isinstance(test, RunFunction) else test.mesh_shape)
    try:
        if isinstance(test, RunFunction):
            return Outcome(Kind.PASSED, result=_result_of(test))
        with _warning_filters(test):
            _call(test, config)
    except pytest.skip.Exception as skipped:
        return Outcome(Kind.SKIPPED, skipped.msg or "")
    except pytest.xfail.Exception as xfailed:
        return Outcome(Kind.XFAILED, xfailed.msg or "")
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, since the rank must survive its test
        return _failure(error)
    finally:
        _flush()
    return Outcome(Kind.PASSED)


@contextlib.contextmanager
def _warning_filters(test: RunTest) -> Iterator[None]:
    from_ini, from_command_line, from_marks = test.warning_filters
    with warnings.catch_warnings():
        apply_warning_filters(from_ini, from_command_line)
        for text in from_marks:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        yield


def _call(test: RunTest, config: pytest.Config) -> None:
    function = _find(test, config)
    arguments = {name: pickle.loads(value) for name, value in test.arguments.items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The fixture `monkeypatch` patches pytest's process. The test's one must patch this process, and undo it.
        replaced = {name: monkeypatch for name, value in arguments.items() if isinstance(value, pytest.MonkeyPatch)}
        function(**(arguments | replaced))


def _result_of(message: RunFunction) -> bytes:
    linecache.cache.update(message.sources)
    function, arguments = pickle.loads(message.payload)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = function(default_mesh(), *arguments)
    except BaseException:
        print(printed.getvalue(), end="")
        raise
    return pickle.dumps((result, printed.getvalue()))


def _find(test: RunTest, config: pytest.Config) -> Callable[..., None]:
    found: Any = import_path(
        Path(test.path),
        mode=config.getoption("importmode"),
        root=config.rootpath,
        consider_namespace_packages=config.getini("consider_namespace_packages"),
    )
    for name in test.names:
        owner = found() if isinstance(found, type) else found
        found = getattr(owner, name)
    return found  # type: ignore[no-any-return]


def _failure(error: BaseException) -> Outcome:
    error = error.with_traceback(_without_own_frames(error.__traceback__))
    return Outcome(
        Kind.FAILED,
        detail="".join(traceback.format_exception_only(error)).strip().partition("\n")[0],
        traceback="".join(traceback.format_exception(error)),
    )


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # the output of C code
