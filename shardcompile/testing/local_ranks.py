"""`LocalRanks`: ranks on this machine for notebooks and consoles, whose functions other processes cannot import."""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any, Literal

import cloudpickle

from shardcompile.testing.messages import Kind, Outcome, RunFunction
from shardcompile.testing.one_process import RankThreads, raise_worst, standing_mesh
from shardcompile.testing.pool import RankPool
from shardcompile.testing.report import describe


class LocalRanks:
    """Ranks on this machine that call functions. Each rank is a process, which starts once, in seconds, and is reused.

        ranks = LocalRanks(3)

        def rows(mesh, n):
            x = sc.ShardTensor.from_local(torch.ones(mesh.get_rank() + n, 2), mesh, [Shard(0)])
            return x.sum().full_tensor().item()

        ranks(rows, 4)          # [30.0, 30.0, 30.0]: one result for each rank

    Functions, and all that they use, may be defined in cells of a notebook. Each call starts with the same seed, and
    without the compiled code of earlier calls. The ranks end with this process, with `close`, or at the end of a
    ``with``.

    With ``processes=False`` the ranks are threads of this process that take turns. Then no process starts and nothing
    is pickled. A breakpoint stops one rank while the others wait. A deadlock raises an error at once. See
    docs/testing.md.
    """

    def __init__(
        self, world_size: int, backend: str = "gloo", *, processes: bool = True, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        """Starts the ranks.

        Args:
            world_size: the number of ranks.
            backend: the backend of the process group, if each rank is a process.
            processes: whether each rank is a process. Otherwise all ranks are threads of this process.
            device: the type of the tensors' devices, if ranks are threads. They may share a GPU. If each rank is a
                process, the device follows from the backend.

        Raises:
            PoolStartError: a rank does not start.
        """
        self._world_size, self._backend, self._processes, self._device = world_size, backend, processes, device
        self._pool = self._start()

    def _start(self) -> RankPool | RankThreads:
        if not self._processes:
            return RankThreads(self._world_size, self._device)
        quiet = ("--noconftest", "--capture=no", "-pno:cacheprovider", f"--config-file={os.devnull}", "--rootdir=.")
        return RankPool(self._world_size, self._backend, quiet)

    def __call__(self, fn: Callable[..., object], *args: object, timeout: float = 120.0) -> list[Any]:
        """Calls ``fn(mesh, *args)`` on every rank, with a mesh of one dim over all ranks.

        Args:
            fn: a function. Its output is printed in this process, rank after rank; if a rank fails, with its warnings.
            args: its arguments after the mesh, the same on every rank. Ranks in one process share them.
            timeout: seconds after which ranks that still run are killed, or abandoned if they are threads. Time in a
                debugger does not count.

        Returns:
            One result for each rank. Results of processes must be picklable: return a local shard or a full tensor, not
            a sharded tensor.

        Raises:
            RuntimeError: a rank raised, died or hung; the text has its traceback. The next call starts new ranks. If
                ranks are threads, the exception of the function is raised, with a note that names the rank.
        """
        if not self._pool.usable:
            self._pool = self._start()
        if isinstance(self._pool, RankThreads):
            ends = self._pool.run(lambda _: fn(standing_mesh(), *args), timeout)
            raise_worst(ends)
            return [end.result for end in ends]
        run = self._pool.run(RunFunction(_pickle((fn, args)), _sources_of_cells(), tuple(sys.path)), timeout)
        if not run.in_step or any(outcome.kind is not Kind.PASSED for outcome in run.outcomes):
            _show(run.outputs)
            raise RuntimeError(_what_went_wrong(run.outcomes))
        results, printed = zip(*(pickle.loads(outcome.result) for outcome in run.outcomes), strict=True)
        _show(printed)
        return list(results)

    def close(self) -> None:
        """Ends the ranks."""
        self._pool.close()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:  # such as torch.ops
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):  # since 3.1.3 cloudpickle drops the file name, which tracebacks need
            _, arguments = self.dispatch_table[CodeType](obj)
            return _code_from, (obj.co_filename, arguments)
        return super().reducer_override(obj)


def _code_from(file: str, arguments: tuple[Any, ...]) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def _pickle(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _sources_of_cells() -> dict[str, object]:
    """Returns the sources of notebook cells, which are in no file, for tracebacks and reports on the ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _show(outputs: Iterable[str]) -> None:
    for rank, output in enumerate(outputs):
        if output:
            print(f"--- rank {rank}\n{output}", end="")


def _what_went_wrong(outcomes: Sequence[Outcome]) -> str:
    if all(outcome.kind is Kind.PASSED for outcome in outcomes):
        return (
            "all ranks returned, but some rank started a collective that others did not join: run the same collectives "
            "on every rank"
        )
    return describe(outcomes)
