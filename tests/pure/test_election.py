"""One rank makes what several need; the others get it, or learn why not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from shardcompile import election
from shardcompile.election import Leadership, elect, published

WHAT = "a thing"


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "_LOST", {})


def in_threads(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()
    return results


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), 1)
    if request.param == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return PrefixStore("group", HashStore()) if request.param == "prefix" else HashStore()


@pytest.mark.parametrize("content", [b"", b"x" * 1000, None])
def test_one_leads_and_the_others_get_what_it_publishes(
    store: Store, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "_PART", 7)
    led = elect(store, "key", 0, WHAT)
    assert isinstance(led, Leadership)
    assert published(store, "key") is None

    def publish() -> None:
        time.sleep(0.1)
        led.publish(content)

    assert in_threads(publish, *[lambda r=r: elect(store, "key", r, WHAT) for r in (1, 2)])[1:] == [content, content]
    assert published(store, "key") == content
    assert isinstance(elect(store, "other key", 2, WHAT), Leadership)


def test_a_leader_that_leads_again_is_waited_for(store: Store) -> None:
    led = elect(store, "key", 0, WHAT)
    assert isinstance(led, Leadership)
    led.fail("out of memory")
    again = elect(store, "key", 0, WHAT)
    assert isinstance(again, Leadership)
    assert published(store, "key") is None

    def publish() -> None:
        time.sleep(0.1)
        again.publish(b"second")

    assert in_threads(publish, lambda: elect(store, "key", 1, WHAT))[1] == b"second"
    assert elect(store, "key", 0, WHAT) == b"second"


def test_the_others_learn_why_a_leader_failed(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    led = elect(store, "key", 0, WHAT)
    assert isinstance(led, Leadership)
    led.fail("ValueError: no way")
    assert elect(store, "key", 1, WHAT) is None
    assert "rank 0 could not make a thing for all ranks: ValueError: no way" in caplog.text


def test_another_rank_leads_if_one_is_silent(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    led = elect(store, "key", 0, WHAT)
    assert isinstance(led, Leadership)
    led._ended.set()  # no beat any more, and no result
    results: list[object] = []

    def follow(rank: int) -> None:
        result = elect(store, "key", rank, WHAT, silence=0.5)
        if isinstance(result, Leadership):
            time.sleep(0.8)  # longer than the silence: beats tell that it is alive
            result.publish(b"by another")
        results.append(result)

    begin, beat = time.monotonic(), election._BEAT
    election._BEAT = 0.1
    try:
        in_threads(lambda: follow(1), lambda: follow(2))
    finally:
        election._BEAT = beat
    assert sum(isinstance(r, Leadership) for r in results) == 1 and b"by another" in results
    assert time.monotonic() - begin < 5
    assert "rank 0, which makes a thing for all ranks, has not answered" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_rank_that_was_lost_is_not_waited_for_again_until_it_beats(store: Store) -> None:
    for key in ("key", "other key"):
        led = elect(store, key, 0, WHAT)
        assert isinstance(led, Leadership)
        led._ended.set()
    assert isinstance(elect(store, "key", 1, WHAT, silence=0.3), Leadership)
    begin = time.monotonic()
    assert isinstance(elect(store, "other key", 1, WHAT, silence=30), Leadership)
    assert time.monotonic() - begin < 5
    back = elect(store, "third key", 0, WHAT)
    assert isinstance(back, Leadership)
    results: list[object] = []

    def publish() -> None:
        time.sleep(0.2)
        back.publish(b"by rank 0")

    in_threads(publish, lambda: results.append(elect(store, "third key", 1, WHAT)))
    assert results == [b"by rank 0"]


def test_a_rank_goes_on_alone_without_a_store(caplog: pytest.LogCaptureFixture) -> None:
    class Ended(HashStore):
        def compare_set(self, *args: object) -> bytes:
            raise RuntimeError("the connection was reset")

    assert elect(Ended(), "key", 3, WHAT) is None
    assert "the connection was reset" in caplog.text and "rank 3" in caplog.text
