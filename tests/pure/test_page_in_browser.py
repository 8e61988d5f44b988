"""The page of a report in a browser: opened from the disk, driven over Chromium's debugging pipe."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompile.inspect import Compilation, GraphReport, Report
from tests.support.written_report import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (on Debian: apt install chromium)")

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
]
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""A program that becomes Chromium, which reads from 3 and writes to 4."""

FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Until what was asked for is drawn."""


class Browser:
    """Chromium behind two pipes: messages are JSON that ends with a zero byte (--remote-debugging-pipe)."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]  # none of them is 3 or 4
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ends), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *ends):
            os.close(fd)
        self._numbers = itertools.count(1)
        self._read = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        for fd in (self._out, self._in):
            os.close(fd)
        self._process.terminate()
        self._process.wait(30)

    def __call__(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def until(self, method: str, session: str) -> None:
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._next(60))

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """An open page: what it says, and all that it has asked for or complained about."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self._browser, self.url = browser, path.as_uri()
        target = browser("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self.resize(1280)
        self("Page.navigate", url=self.url)
        browser.until("Page.loadEventFired", self._session)
        self.js(FRAME)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser(method, self._session, **params)

    def resize(self, width: int) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def js(self, expression: str) -> Any:
        """What an expression comes to; of a promise, what it is kept with."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def go_to(self, graph: int) -> None:
        """Choose a graph, and wait until it is shown."""
        self.js(f"document.querySelector('a[href=\"#g{graph}\"]').click()")
        self.js("new Promise((done) => setTimeout(done))")
        self.js(FRAME)
        assert self.js(f"document.querySelector('a[href=\"#g{graph}\"]').getAttribute('aria-current')") == "true"

    def hover(self, selector: str) -> None:
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{shard: 'center'}})")
        self.js(FRAME)
        x, y = self.js(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.mouse("mouseMoved", x, y)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.js(FRAME)

    def key(self, key: str) -> None:
        self("Input.dispatchKeyEvent", type="keyDown", key=key)
        self("Input.dispatchKeyEvent", type="keyUp", key=key)

    def texts(self, selector: str) -> list[str]:
        return list(self.js(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"))

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({selector!r}).length"))

    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[Any]:
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Security.certificateError")
        return [e["params"] for kind in kinds for e in self._events(kind)]

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [e for e in self._browser.events if e.get("method") == method and e.get("sessionId") == self._session]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def opened(browser: Browser, path: Path, shown: Report) -> Page:
    path.write_text(shown.to_html(), encoding="utf-8")
    page = Page(browser, path)
    return page


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """On its second graph, the backward one."""
    page = opened(browser, tmp_path_factory.mktemp("page") / "report.html", report())
    page.go_to(1)
    return page


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with the page, it neither complains nor asks for anything but itself."""
    yield
    if "page" in request.fixturenames:
        page: Page = request.getfixturevalue("page")
        assert page.complaints() == []
        assert set(page.requests()) <= {page.url, "data:,"}


def test_that_complaints_and_requests_are_seen(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text('<img src="other.png"><script>console.error("no"); undefined_name()</script>', encoding="utf-8")
    page = Page(browser, path)
    assert page.requests() == [page.url, (tmp_path / "other.png").as_uri()]
    assert len(page.complaints()) >= 2


def test_a_bar_for_each_span(page: Page) -> None:
    graph = report().graphs[1]
    assert page.count(".timeline rect.bar") == len(graph.spans)
    assert page.count(".timeline rect.wait") == 3
    assert page.texts(".timeline .lanes text") == ["compute", "group 0: ranks 0-3", "group 7: ranks 0-3"]
    width = page.js("document.querySelector('.timeline').clientWidth")
    shown = page.js("[...document.querySelectorAll('.timeline rect.bar.compute')].map((r) => r.width.baseVal.value)")
    assert sum(shown) == pytest.approx(width * graph.compute / graph.total, rel=0.01)


def test_nothing_of_the_report_became_an_element(page: Page) -> None:
    assert page.js("document.title") == "rank 1 of 4 · shardcompile report"
    assert page.count("script") == 2 and page.count("img") == 0


@pytest.mark.parametrize("width", [700, 1280])
def test_the_page_fits(page: Page, width: int) -> None:
    page.resize(width)
    try:
        assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    finally:
        page.resize(1280)


def test_hovering_shows_a_tooltip(page: Page) -> None:
    assert page.js("document.getElementById('tip').hidden")
    page.hover(".timeline rect.bar.gather")
    assert page.js("document.getElementById('tip').hidden") is False
    (said,) = page.texts("#tip")
    for part in (
        "bucket",
        "all_gather_bucket",
        "0-3 (4)",
        "5 KiB together",
        "15 µs, from 5 µs to 20 µs",
        "2 mm, attention",
        "model.py",
    ):
        assert part in said
    assert "11 µs that compute waits" in said
    page.mouse("mouseMoved", 5, 5)
    assert page.js("document.getElementById('tip').hidden")


def test_keys_go_from_bar_to_bar_and_to_the_text(page: Page) -> None:
    page.js("document.querySelector('.timeline').focus()")
    page.key("ArrowRight")
    assert page.texts("#tip strong") == ["mm"]
    assert "aten.mm.default" in page.texts("#said")[0]
    page.key("ArrowDown")
    assert page.texts("#tip strong") == ["bucket"]
    page.key("ArrowRight")
    assert page.texts("#tip strong") == ["sum"]
    page.key("ArrowUp")
    page.key("Enter")
    assert page.texts(".cell.found .code")[0].strip().startswith("add:")


def test_zooming_and_moving(page: Page) -> None:
    left = "[...document.querySelectorAll('.timeline rect.bar')].map((r) => [r.x.baseVal.value, r.width.baseVal.value])"
    page.js("document.querySelector('.timeline').scrollIntoView({shard: 'center'})")
    page.js("document.querySelector('button[title=\"Show all\"]').click()")
    page.js(FRAME)
    before = page.js(left)
    x, y = page.js("(({ x, y }) => [x, y])(document.querySelector('.timeline').getBoundingClientRect())")
    page.mouse("mouseWheel", x + 5, y + 60, deltaX=0, deltaY=-200, modifiers=2)
    zoomed = page.js(left)
    assert zoomed[0][1] > 1.5 * before[0][1]
    page.mouse("mousePressed", x + 600, y + 60, button="left", buttons=1)
    page.mouse("mouseMoved", x + 400, y + 60, button="left", buttons=1)
    page.mouse("mouseReleased", x + 400, y + 60, button="left")
    assert page.js(left) != zoomed
    page.js("document.querySelector('button[title=\"Show all\"]').click()")
    page.js(FRAME)
    assert page.js(left) == before


def test_sorting_and_filtering(page: Page) -> None:
    kinds = ".collectives tbody td:nth-child(2)"
    assert page.texts(kinds) == ["all_gather_bucket", "all_reduce", "all_to_all_v"]
    head = "[...document.querySelectorAll('.collectives th button')].find((b) => b.textContent === 'global')"
    page.js(f"{head}.click()")
    assert page.texts(kinds) == ["all_reduce", "all_gather_bucket", "all_to_all_v"]
    assert page.js(f"{head}.parentNode.getAttribute('aria-sort')") == "descending"
    page.js(f"{head}.click()")
    assert page.texts(kinds) == ["all_to_all_v", "all_gather_bucket", "all_reduce"]
    page.js("document.querySelector('input[type=search]').value = 'MODEL.PY reduce'")
    page.js("document.querySelector('input[type=search]').dispatchEvent(new Event('input'))")
    assert page.texts(kinds) == ["all_reduce"]
    page.js("document.querySelectorAll('input[type=radio]')[1].click()")
    assert page.texts(kinds) == ["all_reduce", "all_reduce"]
    assert "dropped by share_equal_collectives" in page.texts(".collectives tbody")[0]


def test_two_stages_side_by_side(page: Page) -> None:
    for graph in (0, 1):
        page.go_to(graph)
    assert page.texts(".texts .removed mark") == ["2"] and page.texts(".texts .added mark") == ["3"]
    assert page.texts(".texts .moved .code")[0].strip().startswith("add:")
    assert page.count(".fold") == 1
    page.js("document.querySelector('.fold').click()")
    assert page.count(".fold") == 0
    assert page.count(".cell:nth-child(odd) .number") == len(report().graphs[1].stages["aot"].splitlines())
    options = page.texts(".tools select:first-of-type option")
    assert options[: len(options) // 2] == ["dynamo", "aot", "schedule_overlap", "code"]


@pytest.mark.parametrize("graphs", [None, 0, 1], ids=["nothing", "out of a cache", "a graph of nothing"])
def test_reports_of_little(browser: Browser, tmp_path: Path, graphs: int | None) -> None:
    empty = GraphReport("inference", 0, {}, (), (), (), (), 0.0, 0.0, 0.0, 0.0, 0)
    shown = Report() if graphs is None else Report(compilations=[Compilation("f", "", "0/0", {}, [empty] * graphs)])
    page = opened(browser, tmp_path / "empty.html", shown)
    assert page.count("h1") == 1 and page.count(".timeline") == (graphs or 0)
    assert page.complaints() == []


def test_long_texts_and_many_bars_stay_fast(browser: Browser, tmp_path: Path) -> None:
    numbers = random.Random(0)
    lines = [f"    n{i} = torch.ops.aten.add.Tensor(n{i - 1}, n{numbers.randrange(i)})" for i in range(1, 5001)]
    other = [line.replace("add", "mul") if numbers.random() < 0.1 else line for line in lines]
    for _ in range(500):
        other.insert(numbers.randrange(5000), other.pop(numbers.randrange(5000)))
    long = report()
    graph = long.graphs[1]
    spans = tuple(replace(graph.spans[0], label=f"n{i}", start=i * 1e-8, end=(i + 1) * 1e-8) for i in range(5000))
    stages = {"aot": "\n".join(lines), "passes": "\n".join(other), "code": "\n".join(numbers.sample(lines, 5000))}
    long.compilations[0].graphs[:] = [replace(graph, spans=spans, stages=stages)]
    page = opened(browser, tmp_path / "long.html", long)
    assert page.count(".timeline rect.bar") == 5000
    took = page.js("(() => { const t = performance.now(); showGraph(0); return performance.now() - t; })()")
    shuffled = page.js(
        "(() => { const t = performance.now(); const g = data.graphs[0]; sideBySide(g.stages[1][1], g.stages[3][1]); "
        "return performance.now() - t; })()"
    )
    print(f"a graph of 5,000 lines and bars: {took:.0f} ms; 5,000 lines in another order: {shuffled:.0f} ms")
    assert took < 10_000 and shuffled < 10_000
    assert page.complaints() == []
