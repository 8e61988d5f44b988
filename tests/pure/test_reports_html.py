"""How a report shows outside of the terminal: a page, a table for notebooks, a Chrome trace."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from shardcompile.inspect import Report
from shardcompile.inspect.timeline import chrome_trace, idle_times, lanes
from tests.support.written_report import HOSTILE, report

ALLOWED = {"html", "head", "meta", "title", "link", "style", "body", "a", "main", "div", "noscript", "pre", "script"}


class _Elements(HTMLParser):
    """The elements of a page, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)


def test_the_page_holds_the_report_and_nothing_that_the_report_made_up() -> None:
    found = _Elements(report().to_html())
    assert set(found.tags) <= ALLOWED
    assert found.tags["script"] == 2
    data = json.loads(found.scripts[0])
    assert HOSTILE in data["lines"] and data["graphs"][1]["traced"][0]["source"] == HOSTILE
    assert data["error"] == data["graphBreaks"][0] == HOSTILE
    assert not set("<>&") & set(found.scripts[0])
    assert "taken over" in "".join(found.words)  # in the text for browsers without scripts, as a text


def test_the_page_asks_for_nothing() -> None:
    text = report().to_html()
    found = _Elements(text)
    assert not [a for a in found.attributes if a[1] in ("src", "action", "srcset")]
    assert {v for _, name, v in found.attributes if name == "href"} == {"#graph", "data:,"}
    ours = "".join(_part(name) for name in ("page.css", "page.js", "page.html"))
    assert set(re.findall(r"\w+://[^\s\"']+", ours)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in ours.replace("url(#hatch)", "") and "@import" not in ours
    (policy,) = (v or "" for tag, name, v in found.attributes if tag == "meta" and (v or "").startswith("default-src"))
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_the_script_and_the_style_end_where_they_should() -> None:
    assert "</script" not in _part("page.js") and "<!--" not in _part("page.js")
    assert "</style" not in _part("page.css")
    assert ".innerHTML" not in _part("page.js") and "insertAdjacentHTML" not in _part("page.js")


def _part(name: str) -> str:
    return (files("shardcompile.inspect") / name).read_text("utf-8")


def test_lines_that_stages_share_are_in_the_page_once() -> None:
    made = report()
    graph = made.graphs[1]
    line = "    n17 = torch.ops.aten.neg.default(n16)"
    assert sum(line in text for text in graph.stages.values()) == 2
    assert made.to_html().count(line.strip()) == 1


def test_stages_are_whole() -> None:
    data = json.loads(_Elements(report().to_html()).scripts[0])
    written = {"dynamo": HOSTILE} | report().graphs[1].stages
    assert [name for name, _ in data["graphs"][1]["stages"]] == list(written)
    for name, numbers in data["graphs"][1]["stages"]:
        assert [data["lines"][i] for i in numbers] == written[name].removesuffix("\n").split("\n")


def test_a_report_of_nothing_has_a_page() -> None:
    assert "rank 0 of 1" in Report().to_html()
    assert "nothing compiled" in Report()._repr_html_()
    assert chrome_trace(Report())["traceEvents"] == []


def test_the_table_for_notebooks() -> None:
    text = report()._repr_html_()
    found = _Elements(text)
    assert set(found.tags) <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    assert not found.attributes
    words = "".join(found.words)
    for said in ("rank 1 of 4", "0 step backward", "26 us (47%)", "all_gather_bucket", "11 us"):
        assert said in words
    many = report()
    many.compilations *= 100
    assert len(many._repr_html_()) < 20_000


def _spans(events: list[dict[str, Any]], process: int) -> dict[tuple[int, str], list[dict[str, Any]]]:
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] == "X" and e["pid"] == process:
            found.setdefault((e["tid"], e["cat"]), []).append(e)
    return found


def test_a_chrome_trace_of_all_graphs() -> None:
    made = report()
    events = json.loads(json.dumps(made.perfetto()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [name for name, _ in made.named_graphs()] == ["0 step forward", "0 step backward"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert threads == ["compute", "group 0: ranks 0-3", "group 7: ranks 0-3"]
    for process, graph in zip(names, made.graphs, strict=True):
        spans = _spans(events, process)
        of = {c: sum(e["dur"] for (_, cat), es in spans.items() if cat == c for e in es) for _, c in spans}
        assert of["compute"] == pytest.approx(graph.compute * 1e6)
        assert of.get("waiting", 0) == pytest.approx(graph.exposed * 1e6)
        assert of.get("communication", 0) == pytest.approx(1e6 * sum(c.seconds for c in graph.issued))
        for thread in {t for t, _ in spans}:
            on_it = sorted((e for (t, _), es in spans.items() if t == thread for e in es), key=lambda e: e["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(on_it))
    (bucket,) = (e for e in events if e["name"] == "bucket")
    assert bucket["args"]["members"] == ["gather_a", "gather_b"] and bucket["args"]["ranks"] == [0, 1, 2, 3]
    assert bucket["args"]["source"][0] == HOSTILE and bucket["args"]["global_bytes"] == 5120


def test_compute_waits_where_the_timeline_has_gaps() -> None:
    graph = report().graphs[1]
    assert list(lanes(graph)) == ["compute", "0", "7"]
    found = [(round(a * 1e6), round(b * 1e6), i) for a, b, i in idle_times(graph)]
    assert found == [(9, 20, 0), (30, 40, 1), (50, 55, None)]
    assert list(idle_times(report().graphs[0])) == []


def test_a_repr_is_one_line_without_the_graphs() -> None:
    text = repr(report())
    assert text.startswith("<Report: rank ") and len(text) < 100 and "\n" not in text
