"""The pytest plugin: `@pytest.mark.ranks(n)` runs a test function on every rank of a standing pool.

    @pytest.mark.ranks(4)                                     # on four ranks
    @pytest.mark.ranks(2, 3)                                  # on two, then on three
    @pytest.mark.ranks(4, backend="gloo", timeout=120)        # the defaults, in seconds
    @pytest.mark.ranks(4, mesh=(2, 2))                        # the shape of `shardcompile.testing.mesh()`
    @pytest.mark.ranks(4, processes=False)                    # all four in pytest's own process

The function runs in other processes. They start at their first use, in seconds, and are reused, so that later tests
start in milliseconds. The default process group has exactly `n` ranks. Fixtures, `setup_method` and the like run
once, in pytest's process. The values of fixtures and of `parametrize` are pickled and sent to the ranks, so every
rank gets the same `tmp_path`. `monkeypatch` patches the rank that uses it.

Before a test, a rank seeds its random number generators with 0. After it, the rank resets Dynamo, and destroys the
process groups that the test made, also those of meshes of several dims. Do not cache these.

With ``processes=False`` the ranks are in-process: threads of pytest's process that take turns. No process starts,
and nothing is pickled. A breakpoint stops one rank while the others wait. A rank uses the code that another rank
compiled, unless the code depends on the rank. A deadlock raises an error at once. The test's name decides which
rank runs first. The values of fixtures are copied for each rank. `monkeypatch` is shared, and undone after all
ranks have ended.

Tests whose ranks are processes have the mark ``rank_processes``. ``pytest -n 2 -m "not rank_processes"`` runs the
other tests in parallel.

An exception on any rank fails the test with that rank's traceback. So do a rank that dies, a rank that still runs
at the timeout, and a collective that only some ranks joined. A skip or an xfail counts if all ranks agree.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import pickle
import shlex
import sys
import tempfile
import unittest
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardcompile.testing.inline import apply_notes
from shardcompile.testing.messages import Kind, Outcome, RunTest
from shardcompile.testing.pool import PoolStartError, RankPool, RankPools, RunResult
from shardcompile.testing.report import describe

if TYPE_CHECKING:
    from shardcompile.testing.one_process import RankThreads

_MARK = (
    "ranks(*world_sizes, backend='gloo', timeout=120, mesh=None, processes=True): run the test on every rank of a "
    "pool, or, with processes=False, on all ranks in this process."
)
_PROCESSES = "rank_processes"
_WORLD_SIZE = "_ranks_world_size"
_POOLS = pytest.StashKey[RankPools]()
_THREADS = pytest.StashKey[dict[int, "RankThreads"]]()
_NOTES = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_UPDATE = "SHARDCOMPILE_UPDATE_SNAPSHOTS"  # as in `shardcompile.testing.snapshot`, which imports torch


@dataclass(frozen=True)
class _Ranks:
    """The arguments of the mark."""

    world_sizes: tuple[int, ...]
    backend: str = "gloo"
    timeout: float = 120.0
    mesh: tuple[int, ...] | None = None
    processes: bool = True

    def __post_init__(self) -> None:
        if not self.world_sizes or not all(isinstance(n, int) and n > 0 for n in self.world_sizes):
            raise ValueError("the mark needs one or more world sizes, such as ranks(2, 3)")
        if not self.processes and self.backend != "gloo":
            raise ValueError(f"processes=False goes with backend='gloo', not {self.backend!r}; leave one of them out")
        if self.timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, not {self.timeout}")
        if self.mesh is not None and self.world_sizes != (math.prod(self.mesh),):
            ranks = " or ".join(map(str, self.world_sizes))
            raise ValueError(f"a mesh of shape {tuple(self.mesh)} has {math.prod(self.mesh)} ranks, not {ranks}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardcompile")
    group.addoption(
        "--update-snapshots",
        action="store_true",
        help="write the snapshots that shardcompile.testing.assert_graph finds, to files and inline texts",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    config.addinivalue_line("markers", f"{_PROCESSES}: set by the plugin: each rank of the test is a process.")
    # Torch's records for tlparse have no text. A failed test that compiles would show hundreds of empty lines.
    logging.getLogger("torch.__trace").propagate = False
    if config.getoption("--update-snapshots") and _UPDATE not in os.environ:
        config.stash[_NOTES] = notes = tempfile.TemporaryDirectory(prefix="shardcompile-snapshots-")
        os.environ[_UPDATE] = notes.name  # for the ranks, too
    args = _pytest_args(config)
    config.stash[_THREADS] = {}
    config.stash[_POOLS] = RankPools(lambda world_size, backend: RankPool(world_size, backend, args))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _POOLS in config.stash:
        config.stash[_POOLS].close()
    if _NOTES in config.stash:
        del os.environ[_UPDATE]
        with config.stash[_NOTES] as folder:
            for problem in apply_notes(Path(folder)):
                print(f"snapshot not updated: {problem}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Wrong arguments fail at the test's setup. An error here would fail the whole file.
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and len(mark.args) > 1:
        metafunc.fixturenames.append(_WORLD_SIZE)
        metafunc.parametrize(_WORLD_SIZE, mark.args, ids=[f"ranks={n}" for n in mark.args])


def pytest_itemcollected(item: pytest.Item) -> None:
    mark = item.get_closest_marker("ranks")
    if mark is not None and mark.kwargs.get("processes", True):
        item.add_marker(_PROCESSES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Without this check, such a test would run in pytest's own process, on no rank at all.
    if _read_mark(item) is not None and not _is_plain_function(item):
        pytest.fail(
            "ranks: only plain functions and methods run on ranks, not unittest, async or doctest", pytrace=False
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    ranks = _read_mark(pyfuncitem)
    if ranks is None:
        return None
    world_size = _world_size(pyfuncitem, ranks)
    if not ranks.processes:
        _run_in_this_process(pyfuncitem, ranks, world_size)
        return True
    _skip_without_gpus(world_size, ranks.backend)
    test = _message(pyfuncitem, ranks)
    try:
        pool = pyfuncitem.config.stash[_POOLS].get(world_size, ranks.backend)
    except PoolStartError as error:
        pytest.fail(str(error), pytrace=False)
    run = pool.run(test, ranks.timeout)
    _hand_over_outputs(pyfuncitem, run.outputs)
    _judge(run)
    return True


def _run_in_this_process(item: pytest.Function, ranks: _Ranks, world_size: int) -> None:
    # The import of torch takes seconds, and pytest loads this plugin for all tests.
    from shardcompile.testing.one_process import RankThreads, raise_worst

    pools = item.config.stash[_THREADS]
    if world_size not in pools or not pools[world_size].usable:
        pools[world_size] = RankThreads(world_size)
    names = [name for name in inspect.signature(item.obj).parameters if name in item.funcargs]

    def run(rank: int) -> None:
        function = item.obj if item.cls is None else getattr(item.cls(), item.originalname)
        function(**{name: _copy(item.funcargs[name]) for name in names})

    # Not always rank 0: the first rank compiles for all ranks, with the sizes of its local shard, which may be empty.
    first = zlib.crc32(item.nodeid.encode()) % world_size
    ends = pools[world_size].run(run, ranks.timeout, ranks.mesh, first)
    errors = [end.error for end in ends]
    if not any(end.running for end in ends):
        _judge_exceptions(errors)
    raise_worst(ends)


def _copy(value: object) -> object:
    """Copies an argument for one rank, as pickling does for a rank in its own process."""
    try:
        return value if isinstance(value, pytest.MonkeyPatch) else copy.deepcopy(value)
    except Exception:  # a class that cannot be copied may raise anything
        return value


def _judge_exceptions(errors: Sequence[BaseException | None]) -> None:
    """Skips or xfails the test if all ranks do."""
    first = errors[0]
    if isinstance(first, pytest.skip.Exception) and all(isinstance(e, pytest.skip.Exception) for e in errors):
        raise first
    if isinstance(first, pytest.xfail.Exception) and all(isinstance(e, pytest.xfail.Exception) for e in errors):
        raise first
    quit_early = (pytest.skip.Exception, pytest.xfail.Exception)
    kinds = {type(e) for e in errors}
    if len(kinds) > 1 and all(e is None or isinstance(e, quit_early) for e in errors):
        ends = ["passed" if e is None else f"{type(e).__name__}: {e}" for e in errors]
        lines = [f"  rank {rank}: {end}" for rank, end in enumerate(ends)]
        pytest.fail("\n".join(["the ranks disagree about how the test ended", *lines]), pytrace=False)


def _pytest_args(config: pytest.Config) -> tuple[str, ...]:
    """Returns the command line for the pytest inside each rank: the options for the import of test modules."""
    return (
        f"--rootdir={config.rootpath}",
        f"--import-mode={config.getoption('importmode')}",
        f"--assert={config.getoption('assertmode')}",
        f"--config-file={os.devnull}",
        f"--override-ini=python_files={shlex.join(config.getini('python_files'))}",
        f"--override-ini=consider_namespace_packages={config.getini('consider_namespace_packages')}",
        "--noconftest",
        "--capture=no",
        "-pno:cacheprovider",
    )


def _read_mark(item: pytest.Item) -> _Ranks | None:
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return _Ranks(mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        pytest.fail(f"ranks: {error}", pytrace=False)


def _is_plain_function(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.function):
        return False
    return item.cls is None or not issubclass(item.cls, unittest.TestCase)


def _world_size(item: pytest.Function, ranks: _Ranks) -> int:
    if len(ranks.world_sizes) == 1:
        return ranks.world_sizes[0]
    callspec = getattr(item, "callspec", None)
    if callspec is None or _WORLD_SIZE not in callspec.params:
        # pytest applies such a mark after it has parametrized the tests.
        pytest.fail("ranks: a mark inside `pytest.param` takes one world size", pytrace=False)
    return int(callspec.params[_WORLD_SIZE])


def _skip_without_gpus(world_size: int, backend: str) -> None:
    if "nccl" not in backend:
        return
    # The import of torch takes seconds, and pytest loads this plugin for all tests.
    import torch

    from shardcompile.collectives.transport import gpus

    if not gpus.are_enough(world_size):
        found = torch.cuda.device_count()
        pytest.skip(f"{backend} needs {world_size} GPUs, found {found}; {gpus.SHARE}=1 lets ranks share one")


def _message(item: pytest.Function, ranks: _Ranks) -> RunTest:
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return RunTest(
        path=str(item.path),
        names=(*classes, item.originalname),
        arguments=_pickled_arguments(item),
        sys_path=tuple(sys.path),
        mesh_shape=None if ranks.mesh is None else tuple(ranks.mesh),
        warning_filters=_warning_filters(item),
    )


def _pickled_arguments(item: pytest.Function) -> dict[str, bytes]:
    names = [name for name in inspect.signature(item.obj).parameters if name in item.funcargs]
    pickled = {}
    for name in names:
        value = item.funcargs[name]
        if isinstance(value, pytest.MonkeyPatch):
            value = pytest.MonkeyPatch()  # the fixture's patches are for this process; each rank has its own
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:  # the value's `__reduce__` may raise anything
            pytest.fail(_unpicklable(name, error), pytrace=False)
    return pickled


def _unpicklable(name: str, error: Exception) -> str:
    return (
        f"ranks: the argument `{name}` cannot be sent to the ranks: {type(error).__name__}: {error}\n"
        "A fixture runs in pytest's process, and its value is pickled for the ranks. "
        "Make this value inside the test, or in a helper function that the test calls."
    )


def _warning_filters(item: pytest.Function) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    config = item.config
    # The marks closest to the test come first, but the last filter wins.
    marks = [text for mark in item.iter_markers("filterwarnings") for text in mark.args]
    return (
        tuple(config.getini("filterwarnings")),
        tuple(config.getoption("pythonwarnings") or ()),
        tuple(reversed(marks)),
    )


def _hand_over_outputs(item: pytest.Function, outputs: Sequence[str]) -> None:
    for rank, output in enumerate(outputs):
        if output:
            # `--show-capture` and junit classify a section by its first word.
            item.add_report_section("call", f"stdout and stderr of rank {rank}", output)
            if item.config.getoption("capture") == "no":
                print(f"--- rank {rank}\n{output}", end="")


def _judge(run: RunResult) -> None:
    kinds = {outcome.kind for outcome in run.outcomes}
    if kinds == {Kind.SKIPPED}:
        raise pytest.skip.Exception(_reason(run.outcomes), _use_item_location=True)
    if kinds == {Kind.XFAILED}:
        pytest.xfail(_reason(run.outcomes))
    if kinds != {Kind.PASSED}:
        pytest.fail(describe(run.outcomes), pytrace=False)
    if not run.in_step:
        pytest.fail(_OUT_OF_STEP, pytrace=False)


def _reason(outcomes: Sequence[Outcome]) -> str:
    return outcomes[0].detail


_OUT_OF_STEP = (
    "the test passed on every rank, but the ranks did not meet in a barrier after it: some rank started a "
    "collective that others did not join, or lost its process group, as its output then says"
)
