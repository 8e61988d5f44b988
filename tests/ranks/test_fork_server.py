"""Ranks that are forked from a process that has imported everything, and ranks that are started afresh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from shardcompile.testing import LocalRanks, fork_server, process

pytestmark = [
    pytest.mark.rank_processes,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone"),
]


def origin(mesh: Any) -> tuple[int, int, str | None]:
    return os.getppid(), os.getpid(), os.environ.get("COLOUR")


def ends(mesh: Any, how: str) -> None:
    if mesh.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSEGV)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_pools_have_one_parent_and_leave_nothing_behind() -> None:
    with LocalRanks(2) as two, LocalRanks(3) as three:
        parents, pids, _ = zip(*(two(origin) + three(origin)), strict=True)
        assert len(set(parents)) == 1 and parents[0] != os.getpid()
        assert len(set(pids)) == 5
    deadline = time.monotonic() + 10
    while any(is_there(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_there(pid)]  # not even as zombies


@pytest.mark.parametrize(("how", "told"), [("exit", "rank 1 of 2 died: exit code 7"), ("signal", "killed by SIGSEGV")])
def test_how_a_forked_rank_has_ended_is_told(how: str, told: str) -> None:
    with LocalRanks(2) as ranks, pytest.raises(RuntimeError, match=told):
        ranks(ends, how)


def test_another_environment_is_not_that_of_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules read it when they are imported."""
    with LocalRanks(1) as ranks:
        parent, _, colour = ranks(origin)[0]
    monkeypatch.setenv("COLOUR", "red")
    with LocalRanks(1) as ranks:
        other_parent, _, other_colour = ranks(origin)[0]
    assert colour is None and other_colour == "red"
    assert parent != other_parent


def test_ranks_outlive_their_fork_server_and_the_next_ones_have_another() -> None:
    with LocalRanks(2) as ranks:
        before = ranks(origin)
        parent = before[0][0]
        os.kill(parent, signal.SIGKILL)
        os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
        assert [pid for _, pid, _ in ranks(origin)] == [pid for _, pid, _ in before]
        with LocalRanks(2) as others:
            assert others(origin)[0][0] not in (parent, 1)
        with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
            ranks(ends, "exit")


def test_where_nothing_can_be_forked_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "fork_server_for", lambda environment: None)
    with LocalRanks(2) as ranks:
        assert {parent for parent, _, _ in ranks(origin)} == {os.getpid()}
        with pytest.raises(RuntimeError, match="rank 1 of 2 died: exit code 7"):
            ranks(ends, "exit")


@pytest.mark.nightly
def test_a_process_with_threads_does_not_fork() -> None:
    code = """if True:
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        from shardcompile.testing import fork_server
        print(fork_server._import_what_ranks_need())
    """
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert shown.stdout == "False\n", shown.stderr


def test_a_fork_server_that_does_not_come_up_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_BOOT", "raise SystemExit(1)")
    assert not fork_server.ForkServer(dict(os.environ)).forks
