"""Pools of rank processes, which are reused from test to test."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from shardcompile.testing.messages import Kind, Outcome, Reply, Request, RunFunction, RunTest, Setup
from shardcompile.testing.process import RankProcess
from shardcompile.testing.report import rank_to_blame

START_SECONDS = 300.0
GRACE_SECONDS = 5.0  # for the other ranks to end after one has failed
SYNCHRONISE_SECONDS = 10.0
LEAVE_SECONDS = 5.0
_STACK_SECONDS = 0.3  # for a hung rank to print its stack
_POLL_SECONDS = 0.1  # a child of a dead rank may hold its connection open, so the process is polled, too


class PoolStartError(RuntimeError):
    """Some rank did not start. The text contains its output."""


@dataclass(frozen=True)
class RunResult:
    """The result of a test on every rank of a pool.

    Attributes:
        outcomes: the outcome on each rank.
        outputs: the output of each rank, stdout and stderr together.
        in_step: whether all ranks ended and completed a barrier afterwards. If not, the pool has been killed.
    """

    outcomes: tuple[Outcome, ...]
    outputs: tuple[str, ...]
    in_step: bool


class RankPool:
    """One process for each rank, all in one process group."""

    def __init__(self, world_size: int, backend: str, pytest_args: Sequence[str] = ()) -> None:
        """Starts the ranks and waits until the process group exists.

        Args:
            world_size: the number of ranks.
            backend: the backend for `torch.distributed.init_process_group`.
            pytest_args: the command line for the pytest inside each rank.

        Raises:
            PoolStartError: a rank dies, or has not started after `START_SECONDS`.
        """
        # Imported here, so that the pytest plugin does not load torch.
        from torch._C._distributed_c10d import TCPStore

        # This process holds the store, and not rank 0, so that its port is known before any rank starts.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[RankProcess] = []
        with self._killed_on_error():
            for rank in range(world_size):
                self._ranks.append(RankProcess(rank, world_size))
            for rank, process in enumerate(self._ranks):
                process.send(Setup(rank, world_size, backend, self._store.port, tuple(pytest_args)))
            self._check_all_ready(self._collect(START_SECONDS))

    @property
    def usable(self) -> bool:
        """Whether the pool can run another test."""
        return bool(self._ranks) and all(process.alive for process in self._ranks)

    def run(self, test: RunTest | RunFunction, timeout: float) -> RunResult:
        """Runs a test or a function on all ranks. If the ranks are not in step afterwards, the pool is killed.

        Args:
            test: the test or the function.
            timeout: seconds after which ranks that still run are killed.
        """
        with self._killed_on_error():
            for process in self._ranks:
                process.clear_output()
            self._send_all(test)
            start = time.monotonic()
            replies = self._collect(timeout, GRACE_SECONDS)
            outcomes = _outcomes(replies, time.monotonic() - start)
            in_step = self._synchronise(outcomes)
            self._print_stacks(outcomes)
            outputs = tuple(process.output() for process in self._ranks)
        if not in_step:
            self.kill()
        return RunResult(outcomes, outputs, in_step)

    def last_words(self) -> str:
        """Returns the exit status and the output of each rank that died between two tests."""
        dead = [(rank, process) for rank, process in enumerate(self._ranks) if not process.alive]
        return "\n".join(f"rank {rank}: {process.cause_of_death()}\n{process.output()}" for rank, process in dead)

    def close(self) -> None:
        """Lets the ranks leave together, and kills those that do not leave."""
        if self.usable:
            self._send_all(Request.LEAVE)
            deadline = time.monotonic() + LEAVE_SECONDS
            for process in self._ranks:
                process.wait(deadline)
        self.kill()

    def kill(self) -> None:
        """Kills the ranks, and the processes that they started."""
        while self._ranks:
            self._ranks.pop().kill()

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C too
            self.kill()
            raise

    def _send_all(self, message: object) -> None:
        for process in self._ranks:
            process.send(message)

    def _collect(self, timeout: float, grace: float = START_SECONDS) -> list[object]:
        """Collects one reply from each rank: a message, a `DIED` outcome, or None at the timeout.

        Args:
            timeout: the seconds to wait for all replies.
            grace: the seconds to wait for the other replies after one rank has failed or died.
        """
        deadline = time.monotonic() + timeout
        replies: list[object] = [None] * len(self._ranks)
        missing = set(range(len(self._ranks)))
        while missing and (left := deadline - time.monotonic()) > 0:
            wait([self._ranks[rank].connection for rank in missing], min(left, _POLL_SECONDS))
            for rank in sorted(missing):
                replies[rank] = self._ranks[rank].reply()
                if _is_failure(replies[rank]):
                    deadline = min(deadline, time.monotonic() + grace)
            missing = {rank for rank in missing if replies[rank] is None}
        return replies

    def _check_all_ready(self, replies: Sequence[object]) -> None:
        if all(reply is Reply.READY for reply in replies):
            return
        outcomes = [Outcome(Kind.PASSED) if reply is Reply.READY else reply for reply in replies]
        rank = rank_to_blame(_outcomes(outcomes, START_SECONDS))
        assert rank is not None, "a rank that is not ready is to blame"
        reply = replies[rank]
        state = reply.detail if isinstance(reply, Outcome) else f"nothing heard for {START_SECONDS:.0f} s"
        raise PoolStartError(f"rank {rank} did not start: {state}\n{self._ranks[rank].output()}")

    def _synchronise(self, outcomes: Sequence[Outcome]) -> bool:
        if any(outcome.kind in (Kind.RUNNING, Kind.DIED) for outcome in outcomes):
            return False
        # A collective that only some ranks joined would be matched with one of the next test. A barrier detects it.
        self._send_all(Request.SYNCHRONISE)
        replies = self._collect(SYNCHRONISE_SECONDS, grace=0.5)
        return all(reply is Reply.SYNCHRONISED for reply in replies)

    def _print_stacks(self, outcomes: Sequence[Outcome]) -> None:
        hung = [self._ranks[rank] for rank, outcome in enumerate(outcomes) if outcome.kind is Kind.RUNNING]
        for process in hung:
            process.print_stack()
        if hung:
            time.sleep(_STACK_SECONDS)


class RankPools:
    """The pools of a pytest session, by world size and backend. Each pool starts at its first use."""

    def __init__(self, start: Callable[[int, str], RankPool]) -> None:
        self._start = start
        self._pools: dict[tuple[int, str], RankPool] = {}

    def get(self, world_size: int, backend: str) -> RankPool:
        """Returns a usable pool, which is started if there is none.

        Raises:
            PoolStartError: the pool does not start.
        """
        pool = self._pools.get((world_size, backend))
        if pool is None or not pool.usable:
            if pool is not None:
                _discard(pool)
            pool = self._pools[world_size, backend] = self._start(world_size, backend)
        return pool

    def close(self) -> None:
        """Closes all pools."""
        while self._pools:
            self._pools.popitem()[1].close()


def _discard(pool: RankPool) -> None:
    if last_words := pool.last_words():
        warnings.warn(f"a rank died between two tests, a new pool starts:\n{last_words}", stacklevel=3)
    pool.kill()


def _outcomes(replies: Sequence[object], seconds: float) -> tuple[Outcome, ...]:
    running = Outcome(Kind.RUNNING, f"killed after {seconds:.1f} s; its output ends with its stack")
    return tuple(reply if isinstance(reply, Outcome) else running for reply in replies)


def _is_failure(reply: object) -> bool:
    return isinstance(reply, Outcome) and reply.kind in (Kind.FAILED, Kind.DIED)
