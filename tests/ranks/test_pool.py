"""The pool of ranks itself. Each generated file below runs once, in a pytest of its own, and many tests read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardcompile
from shardcompile.testing.messages import Kind, Outcome
from shardcompile.testing.pool import RankPools
from shardcompile.testing.report import describe, rank_to_blame

# Each test reads what a pytest of its own did, with pools of its own.
pytestmark = [pytest.mark.rank_processes, pytest.mark.alone]

HEADER = """
import os, signal, subprocess, sys, time, warnings
from pathlib import Path
import pytest
import torch
import torch.distributed as dist
from shardcompile.testing import mesh, rank, world_size

HERE = Path(__file__).parent

def note(text):
    with open(HERE / "notes.txt", "a") as file:
        file.write(text + "\\n")

def sum_over_ranks():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
"""

# Waits that are long enough on a busy machine would make the tests below slow.
CONFTEST = """
from shardcompile.testing import pool
pool.GRACE_SECONDS = 1.5
pool.SYNCHRONISE_SECONDS = 3.0
"""

GENTLE = """
@pytest.fixture
def unsendable():
    return lambda: 0

@pytest.fixture
def seven():
    return 7

@pytest.mark.ranks(2)
def test_passes():
    note(f"passes {rank()} {os.getpid()}")
    assert sum_over_ranks() == 2

@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [3, 4])
def test_parametrized(factor, seven, tmp_path):
    note(f"parametrized {factor} {seven} {tmp_path.name} {os.getpid()}")

class Partition(tuple):
    pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition", [Partition((3, 5))], ids=str)
def test_own_class(partition):
    assert isinstance(partition, Partition)
    assert partition == (3, 5)

@pytest.mark.ranks(2, 3)
def test_sizes():
    note(f"sizes {rank()} of {world_size()}: {sum_over_ranks():.0f}")

class TestInClass:
    @pytest.mark.ranks(2)
    def test_method(self, seven):
        note(f"method {type(self).__name__} {seven}")

@pytest.mark.ranks(2)
def test_patches(monkeypatch):
    monkeypatch.setenv("PATCHED_BY_TEST", "1")
    note(f"patched {os.environ.get('PATCHED_BY_TEST')}")

@pytest.mark.ranks(2)
def test_makes_a_mess():
    note(f"before the mess {os.environ.get('PATCHED_BY_TEST')} {torch.rand(()).item()}")
    dist.new_group([0, 1])
    torch.rand(3)

@pytest.mark.ranks(2)
def test_after_mess():
    note(f"groups {len(dist.distributed_c10d._world.pg_map)}")
    note(f"after the mess {torch.rand(()).item()}")

@pytest.mark.ranks(2)
def test_unsendable_fixture(unsendable):
    pass

@pytest.mark.ranks(4, mesh=(2, 2))
def test_mesh():
    note(f"mesh {tuple(mesh(['a', 'b']).shape)}")

@pytest.mark.ranks(2)
def test_no_mesh():
    note(f"no mesh {tuple(mesh().shape)}")

@pytest.mark.ranks(3, mesh=(2, 2))
def test_wrong_mesh():
    pass

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:as bad as an error")
def test_warns():
    warnings.warn("as bad as an error")

@pytest.mark.ranks(2)
def test_all_skip():
    pytest.skip("nobody wants this")

@pytest.mark.ranks(2)
def test_one_skips():
    if rank() == 1:
        pytest.skip("not here")

@pytest.mark.ranks(2)
def test_all_xfail():
    pytest.xfail("known upstream")

@pytest.mark.ranks(2)
def test_all_fail_together():
    print(f"printed by {rank()}")
    os.write(2, b"written to stderr")
    note(f"together {os.getpid()}")
    assert sum_over_ranks() == rank() + 17

@pytest.mark.ranks()
def test_no_size():
    pass

@pytest.mark.ranks(2, 0)
def test_size_zero():
    pass

@pytest.mark.ranks(2, time=3)
def test_unknown_keyword():
    pass

@pytest.mark.ranks(2)
async def test_async():
    pass
"""

ROUGH = """
@pytest.mark.ranks(2)
def test_rank_1_asserts():
    note(f"asserts {os.getpid()}")
    if rank() == 1:
        time.sleep(0.3)  # rank 0 already waits
        ranks = [rank()]
        assert ranks == [5]
    sum_over_ranks()

@pytest.mark.ranks(2)
def test_after_assert():
    note(f"after assert {os.getpid()}")
    assert sum_over_ranks() == 2

@pytest.mark.ranks(2)
def test_rank_1_is_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(f"child {child.pid}")
    sum_over_ranks()
    if rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    sum_over_ranks()

@pytest.mark.ranks(2, timeout=2)
def test_hangs():
    note(f"hangs {os.getpid()}")
    if rank() == 1:
        while True:
            time.sleep(0.01)

@pytest.mark.ranks(2)
def test_rank_1_sends_to_nobody():
    note(f"nobody {os.getpid()}")
    if rank() == 1:
        dist.all_reduce(torch.ones(1), async_op=True)

@pytest.mark.ranks(2)
def test_last():
    note(f"last {os.getpid()}")
    assert sum_over_ranks() == 2
"""

WAITING = """
@pytest.mark.ranks(2)
def test_waits():
    note(f"waits {os.getpid()}")
    time.sleep(600)
"""


@dataclass(frozen=True)
class Result:
    """How one generated test ended."""

    status: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Session:
    """A finished pytest of a generated file."""

    results: dict[str, Result]
    notes: list[str]

    def noted(self, start: str) -> list[str]:
        """What generated tests noted after these words, sorted, because ranks write in any order."""
        return sorted(line.removeprefix(f"{start} ") for line in self.notes if line.startswith(f"{start} "))

    def pids(self, start: str) -> set[int]:
        """The process ids at the end of those notes."""
        return {int(line.split()[-1]) for line in self.noted(start)}


@pytest.fixture(scope="module")
def gentle(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return run_to_end(tmp_path_factory.mktemp("gentle"), GENTLE, "importlib")


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return run_to_end(tmp_path_factory.mktemp("rough"), ROUGH, "prepend")


# --- ordinary tests


def test_passing_test_ran_on_both_ranks(gentle: Session) -> None:
    assert gentle.results["test_passes"].status == "passed"
    assert [line.split()[0] for line in gentle.noted("passes")] == ["0", "1"]
    assert len(gentle.pids("passes")) == 2


def test_processes_stay_from_test_to_test(gentle: Session) -> None:
    assert gentle.pids("parametrized") == gentle.pids("passes")


def test_failure_on_all_ranks_keeps_the_pool(gentle: Session) -> None:
    assert gentle.pids("together") == gentle.pids("passes")


def test_parameters_and_fixture_values_arrive_on_every_rank(gentle: Session) -> None:
    values = [line.rpartition(" ")[0] for line in gentle.noted("parametrized")]
    assert values == ["3 7 test_parametrized_3_0"] * 2 + ["4 7 test_parametrized_4_0"] * 2


def test_parameter_may_be_of_a_class_of_the_test_module(gentle: Session) -> None:
    assert gentle.results["test_own_class[(3, 5)]"].status == "passed"


def test_each_world_size_is_a_test_with_its_own_world(gentle: Session) -> None:
    assert gentle.results["test_sizes[ranks=2]"].status == "passed"
    assert gentle.results["test_sizes[ranks=3]"].status == "passed"
    assert gentle.noted("sizes") == ["0 of 2: 2", "0 of 3: 3", "1 of 2: 2", "1 of 3: 3", "2 of 3: 3"]


def test_method_runs_on_an_instance(gentle: Session) -> None:
    assert gentle.results["test_method"].status == "passed"
    assert gentle.noted("method") == ["TestInClass 7"] * 2


def test_monkeypatch_patches_the_rank_for_one_test(gentle: Session) -> None:
    assert gentle.noted("patched") == ["1", "1"]
    assert {line.split()[0] for line in gentle.noted("before the mess")} == {"None"}


def test_random_numbers_start_anew_and_alike(gentle: Session) -> None:
    before = {line.split()[1] for line in gentle.noted("before the mess")}
    assert len(before) == 1
    assert set(gentle.noted("after the mess")) == before


def test_groups_end_with_their_test(gentle: Session) -> None:
    assert gentle.results["test_makes_a_mess"].status == "passed"
    assert gentle.noted("groups") == ["1", "1"]


def test_fixture_that_does_not_pickle_is_named(gentle: Session) -> None:
    result = gentle.results["test_unsendable_fixture"]
    assert result.status == "failure"
    assert "the argument `unsendable` cannot be sent to the ranks" in result.text


def test_warning_filters_hold_on_the_ranks(gentle: Session) -> None:
    result = gentle.results["test_warns"]
    assert result.status == "failure"
    assert "rank 0 of 2 failed: UserWarning: as bad as an error" in result.text


def test_skip_on_all_ranks_is_a_skip(gentle: Session) -> None:
    assert gentle.results["test_all_skip"].status == "skipped"
    assert "nobody wants this" in gentle.results["test_all_skip"].text


def test_skip_on_one_rank_is_a_failure(gentle: Session) -> None:
    result = gentle.results["test_one_skips"]
    assert result.status == "failure"
    assert "the ranks disagree" in result.text
    assert "rank 0: passed\n  rank 1: skipped: not here" in result.text


def test_xfail_on_all_ranks_is_an_xfail(gentle: Session) -> None:
    assert gentle.results["test_all_xfail"].status == "skipped"  # junit's word for it
    assert "known upstream" in gentle.results["test_all_xfail"].text


def test_failure_shows_traceback_summary_and_outputs(gentle: Session) -> None:
    text = gentle.results["test_all_fail_together"].text
    assert "rank 0 of 2 failed: AssertionError: assert 2.0 == (0 + 17)" in text
    assert 'test_generated.py", line' in text
    assert "worker.py" not in text
    assert "rank 1: failed: AssertionError: assert 2.0 == (1 + 17)" in text
    assert "printed by 1\nwritten to stderr" in text


def test_mesh_is_of_the_shape_that_is_asked_for(gentle: Session) -> None:
    assert gentle.noted("mesh") == ["(2, 2)"] * 4
    assert gentle.noted("no mesh") == ["(2,)"] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_no_size", "needs one or more world sizes"),
        ("test_size_zero[ranks=2]", "needs one or more world sizes"),
        ("test_unknown_keyword", "unexpected keyword argument 'time'"),
        ("test_wrong_mesh", "a mesh of shape (2, 2) has 4 ranks, not 3"),
    ],
)
def test_wrong_mark_is_an_error_of_its_test(gentle: Session, name: str, message: str) -> None:
    assert gentle.results[name].status == "error"
    assert message in gentle.results[name].text


def test_async_test_is_refused(gentle: Session) -> None:
    assert gentle.results["test_async"].status == "error"
    assert "only plain functions and methods" in gentle.results["test_async"].text


# --- tests that break the pool


def test_assertion_on_one_rank_fails_while_the_other_waits(rough: Session) -> None:
    result = rough.results["test_rank_1_asserts"]
    assert result.status == "failure"
    assert "rank 1 of 2 failed: AssertionError: assert [1] == [5]" in result.text
    assert "rank 0: still running" in result.text
    assert "in sum_over_ranks" in result.text, "the stack of rank 0 is missing"
    assert result.seconds < 60, "rank 0 was waited for until the timeout of the test"


def test_a_new_pool_serves_the_next_test(rough: Session) -> None:
    assert rough.results["test_after_assert"].status == "passed"
    assert rough.pids("after assert").isdisjoint(rough.pids("asserts"))


def test_killed_rank_is_named_before_the_peers_that_lost_it(rough: Session) -> None:
    result = rough.results["test_rank_1_is_killed"]
    assert result.status == "failure"
    assert "rank 1 of 2 died: killed by SIGKILL" in result.text
    assert "rank 0: failed: RuntimeError" in result.text
    assert "last words" in result.text


def test_hang_fails_at_the_timeout(rough: Session) -> None:
    result = rough.results["test_hangs"]
    assert result.status == "failure"
    assert "rank 1 of 2 still running: killed after 2." in result.text
    assert "rank 0: passed" in result.text
    assert "in test_hangs" in result.text, "the stack of rank 1 is missing"


def test_collective_without_partner_fails_its_own_test(rough: Session) -> None:
    result = rough.results["test_rank_1_sends_to_nobody"]
    assert result.status == "failure"
    assert "did not meet in a barrier" in result.text
    assert rough.results["test_last"].status == "passed"
    assert rough.pids("last").isdisjoint(rough.pids("nobody"))


def test_no_process_stays_behind(gentle: Session, rough: Session) -> None:
    named = ["asserts", "after assert", "child", "hangs", "nobody", "last"]
    pids = gentle.pids("passes").union(*(rough.pids(name) for name in named))
    assert len(pids) == 14
    assert wait_for(lambda: not any(map(is_running, pids)), seconds=5)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_ranks_end_with_pytest(stop: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, WAITING, "importlib")
    try:
        assert wait_for(lambda: len(read_notes(tmp_path)) == 2, seconds=120), "the ranks did not start"
        ranks = [int(line.split()[-1]) for line in read_notes(tmp_path)]
        assert all(map(is_running, ranks))
        process.send_signal(stop)
        process.wait(30)
        assert wait_for(lambda: not any(map(is_running, ranks)), seconds=10)
    finally:
        process.kill()
        process.wait()


FEW = """
@pytest.mark.ranks(2)
def test_one():
    note(f"one {os.environ.get('PYTEST_XDIST_WORKER')}")

@pytest.mark.ranks(2)
def test_two():
    note("two")
    assert sum_over_ranks() == 3

@pytest.mark.ranks(2)
def test_three():
    note("three")
"""


@pytest.mark.nightly
def test_with_xdist_last_failed_and_keywords(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    path = tmp_path / "test_few.py"
    path.write_text(HEADER + FEW)

    def run(*options: str) -> str:
        plugin = ["-p", "no:shardcompile", "-p", "shardcompile.testing.plugin"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *options, path.name]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300).stdout

    assert "1 failed, 1 passed" in run("-n", "2", "-k", "one or two")
    assert sorted(read_notes(tmp_path)) in (["one gw0", "one gw0", "two", "two"], ["one gw1", "one gw1", "two", "two"])
    assert "1 failed" in run("--lf", "-x")
    assert sorted(read_notes(tmp_path))[-4:] == ["two"] * 4


# --- the parts that need no process

PASSED = Outcome(Kind.PASSED)
RUNNING = Outcome(Kind.RUNNING)
DIED = Outcome(Kind.DIED, "exit code 3")
WRONG = Outcome(Kind.FAILED, "AssertionError: no", "Traceback of the assertion")
LONELY = Outcome(Kind.FAILED, "RuntimeError: gloo", "RuntimeError: [gloo/transport] Connection closed by peer")


@pytest.mark.parametrize(
    ("outcomes", "blamed"),
    [
        ([PASSED, PASSED], None),
        ([PASSED, Outcome(Kind.SKIPPED)], None),
        ([PASSED, WRONG], 1),
        ([WRONG, WRONG], 0),
        ([RUNNING, WRONG], 1),
        ([LONELY, LONELY, DIED], 2),
        ([LONELY, WRONG, DIED], 1),
        ([LONELY, LONELY], 0),
        ([PASSED, RUNNING, RUNNING], 1),
    ],
)
def test_rank_to_blame(outcomes: list[Outcome], blamed: int | None) -> None:
    assert rank_to_blame(outcomes) == blamed


def test_report_text() -> None:
    assert describe([LONELY, WRONG, PASSED, DIED]).splitlines() == [
        "rank 1 of 4 failed: AssertionError: no",
        "",
        "Traceback of the assertion",
        "",
        "  rank 0: failed: RuntimeError: gloo",
        "  rank 2: passed",
        "  rank 3: died: exit code 3",
    ]


class StubPool:
    """A pool without processes."""

    def __init__(self, world_size: int, backend: str) -> None:
        self.usable = True
        self.killed = False

    def last_words(self) -> str:
        return "out of memory"

    def kill(self) -> None:
        self.killed = True


def test_pool_that_died_between_tests_is_replaced_with_a_warning() -> None:
    pools: Any = RankPools(StubPool)  # type: ignore[arg-type]
    first = pools.get(2, "gloo")
    assert pools.get(2, "gloo") is first
    assert pools.get(3, "gloo") is not first
    first.usable = False
    with pytest.warns(UserWarning, match="a rank died between two tests, a new pool starts:\nout of memory"):
        second = pools.get(2, "gloo")
    assert first.killed and second is not first
    assert pools.get(2, "gloo") is second


@pytest.mark.parametrize(("module", "loads_torch"), [("plugin", False), ("cleanup", True)])
def test_only_the_ranks_side_loads_torch(module: str, loads_torch: bool, tmp_path: Path) -> None:
    code = f"import sys, shardcompile.testing.{module}; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths_to_testing_only(tmp_path))}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True)
    assert output.strip() == str(loads_torch)


# --- helpers


_HEEDING_CTRL_C = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""


def start(folder: Path, tests: str, import_mode: str) -> subprocess.Popen[str]:
    """Start a pytest of the generated tests, which sees nothing of this one."""
    (folder / "test_generated.py").write_text(HEADER + tests)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --import-mode={import_mode} --strict-markers\n")
    # The plugin is blocked under its installed name and loaded by its module: it need not be installed.
    plugin = ["-p", "no:shardcompile", "-p", "shardcompile.testing.plugin"]
    options = ["-p", "no:cacheprovider", "--junitxml=result.xml", "-o", "junit_logging=all"]
    return subprocess.Popen(
        # Python raises no KeyboardInterrupt if it is started with SIGINT ignored, as by a shell in the background.
        [sys.executable, "-c", _HEEDING_CTRL_C, *plugin, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths_to_testing_only(folder)), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def paths_to_testing_only(folder: Path) -> list[str]:
    """Where `shardcompile.testing` is found without the rest, which each of a dozen ranks would load."""
    package = folder / "stand_in" / "shardcompile"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__ = {[*shardcompile.__path__]!r}\n")
    return [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]


def run_to_end(folder: Path, tests: str, import_mode: str) -> Session:
    """Run the generated tests and read what they left."""
    process = start(folder, tests, import_mode)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1, output  # some generated tests fail on purpose
    return Session(read_results(folder), read_notes(folder))


def read_results(folder: Path) -> dict[str, Result]:
    cases = ElementTree.parse(folder / "result.xml").iter("testcase")
    return {case.attrib["name"]: read_result(case) for case in cases}


def read_result(case: ElementTree.Element) -> Result:
    status = next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")
    text = "\n".join([*(part.attrib.get("message", "") for part in case), *case.itertext()])
    return Result(status, text, float(case.attrib["time"]))


def read_notes(folder: Path) -> list[str]:
    path = folder / "notes.txt"
    return path.read_text().splitlines() if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # Killed children of a dead parent may stay zombies where nobody reaps them, as in some containers.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
