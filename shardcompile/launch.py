"""Runs a function on several ranks of this machine, each a process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not declare that it exports it
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from shardcompile.collectives.transport import device_type, gpus

Work = Callable[[Any], Any]
"""The function that a rank runs. It takes the argument, and returns a picklable result."""


class RankFailedError(RuntimeError):
    """A rank raised an exception, or died."""


def backend_of(wanted: str, ranks: int) -> str:
    """Returns the backend of a process group: ``auto`` is NCCL if there is a GPU for each rank, else gloo.

    Raises:
        ValueError: NCCL is wanted, and there are too few GPUs.
    """
    enough = gpus.are_enough(ranks)
    if wanted == "nccl" and not enough:
        found, workaround = torch.cuda.device_count(), f"{gpus.SHARE}=1 lets them share one"
        raise ValueError(f"--backend nccl needs a GPU for each of the {ranks} ranks, found {found}; {workaround}")
    if wanted == "auto":
        return "nccl" if enough else "gloo"
    return wanted


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
    with _settings_of_ranks(ranks):
        arguments = (ranks, backend, store.port, work, argument)
        context = start_processes(_rank_main, arguments, ranks, join=False, start_method="spawn")
    try:
        while not context.join():
            pass
    except ProcessRaisedException as error:
        raise RankFailedError(f"rank {error.error_index} failed\n{error}") from None
    except ProcessExitedException as error:
        raise RankFailedError(f"rank {error.error_index} died, exit code {error.exit_code}") from None
    finally:
        for process in context.processes:
            process.kill()
    return [pickle.loads(store.get(_result_key(rank))) for rank in range(ranks)]


def _result_key(rank: int) -> str:
    return f"result of rank {rank}"


@contextlib.contextmanager
def _settings_of_ranks(ranks: int) -> Iterator[None]:
    """Sets the environment that processes started inside the context inherit."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        # The C++ kernels of a graph compile in parallel, in threads. No pool of compile processes starts in advance.
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCH_WARM_POOL": "0",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _rank_main(rank: int, ranks: int, backend: str, port: int, work: Work, argument: object) -> NoReturn:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    on_gpu = device_type(backend) == "cuda"
    if on_gpu:
        gpus.take(rank, ranks)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    result = work(argument)
    if on_gpu:
        torch.cuda.synchronize()
    store.set(_result_key(rank), pickle.dumps(result))  # type: ignore[arg-type]  # torch declares str, and takes bytes
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's exit would destroy the gloo group, which sometimes aborts


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by `launch`"
    wait([parent.sentinel])
    os._exit(1)
