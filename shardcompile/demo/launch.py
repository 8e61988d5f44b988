"""Runs a function on several ranks of this machine, each a process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not declare that it exports it

from shardcompile.collectives.transport import device_type, gpus

Work = Callable[[Any], Any]
"""The function that a rank runs. It takes the argument, and returns a picklable result."""


class RankFailedError(RuntimeError):
    """A rank raised an exception, or died."""


@dataclass(frozen=True)
class _Job:
    """The message to a rank."""

    rank: int
    ranks: int
    backend: str
    store_port: int
    work: Work
    argument: Any


@dataclass(frozen=True)
class _Failure:
    traceback: str


def launch(work: Work, argument: object, ranks: int, backend: str) -> list[Any]:
    """Runs `work(argument)` on every rank of a process group, and returns the result of each rank.

    The ranks print to this process's output. They have ended when this returns or raises, also after Ctrl-C.

    Args:
        work: a module-level function, so that it can be pickled.
        argument: the same for all ranks; must be picklable.
        ranks: the number of processes.
        backend: ``gloo``, or ``nccl`` with one GPU for each rank (or shared GPUs: `transport.gpus`).

    Raises:
        RankFailedError: a rank raised or died. The message has its traceback.
    """
    # This process hosts the store, so that its port is known before a rank starts.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [_Job(rank, ranks, backend, store.port, work, argument) for rank in range(ranks)]
    processes: list[SpawnProcess] = []
    try:
        with _settings_of_ranks(ranks):
            started = [_start(job, processes) for job in jobs]
        results = _collect(started, processes)
        for process in processes:
            process.join()
        return results
    finally:
        for process in processes:
            process.kill()


@contextlib.contextmanager
def _settings_of_ranks(ranks: int) -> Iterator[None]:
    """Sets the environment and the signals that processes started inside the context inherit."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        # The C++ kernels of a graph compile in parallel, in threads. No pool of compile processes starts in advance.
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCH_WARM_POOL": "0",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    # Ctrl-C reaches every process of the terminal. The ranks ignore it, and this process ends them.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for name in added:
            del os.environ[name]


def _start(job: _Job, processes: list[SpawnProcess]) -> Connection[object, object]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, theirs), name=f"rank {job.rank}")
    process.start()
    processes.append(process)
    theirs.close()
    return ours


def _collect(connections: Sequence[Connection[object, object]], processes: Sequence[SpawnProcess]) -> list[object]:
    """Waits for the results of all ranks, or for the first failure, and returns them in the order of the ranks."""
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        ready = wait([c for rank, c in enumerate(connections) if rank not in results])
        for rank in (rank for rank, c in enumerate(connections) if c in ready):
            results[rank] = _receive(rank, connections[rank], processes[rank])
    return [results[rank] for rank in range(len(connections))]


def _receive(rank: int, connection: Connection[object, object], process: SpawnProcess) -> object:
    try:
        result = connection.recv()
    except EOFError:
        process.join()
        raise RankFailedError(f"rank {rank} died, exit code {process.exitcode}") from None
    if isinstance(result, _Failure):
        raise RankFailedError(f"rank {rank} failed\n{result.traceback}")
    return result


# ------------------------------------------------------------------------------------- in a rank's process


def _rank_main(job: _Job, connection: Connection[object, object]) -> NoReturn:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _join(job)
        result = job.work(job.argument)
        if device_type(job.backend) == "cuda":
            torch.cuda.synchronize()
        connection.send(result)
        dist.barrier()
    except BaseException:
        connection.send(_Failure(traceback.format_exc()))
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # the interpreter's exit would destroy the gloo group, which sometimes aborts


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by `launch`"
    wait([parent.sentinel])
    os._exit(1)


def _join(job: _Job) -> None:
    if device_type(job.backend) == "cuda":
        gpus.take(job.rank, job.ranks)
    store = TCPStore("127.0.0.1", job.store_port, is_master=False)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.ranks)
