"""The zoo: models of the world are right on sharded inputs, compile to one graph, and send what their golden files say.

``pytest -m zoo --update-snapshots`` writes the golden files anew. Each gather in one of them needs a person's word in
`tests/zoo/registry.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardcompile.testing.snapshot import UPDATE
from tests.zoo import check
from tests.zoo.double_steps import IN_DOUBLE
from tests.zoo.eager_only import EAGER_ONLY, NOT_BY_OUR_BACKEND
from tests.zoo.entry import Entry
from tests.zoo.piled_up import ASKED_FOR
from tests.zoo.registry import ENTRIES
from tools import zoo_page

GOLDEN = Path(__file__).parent.parent / "zoo" / "golden"
_ALWAYS = 5


def _cases(left_out: Mapping[str, str], always: int = _ALWAYS) -> list[object]:
    def marks(entry: Entry) -> list[pytest.MarkDecorator]:
        missing = bool(entry.package) and find_spec(entry.package) is None
        return [
            pytest.mark.zoo,
            pytest.mark.skipif(missing, reason=f"{entry.package} is not installed"),
            pytest.mark.skipif(entry.name in left_out, reason=left_out.get(entry.name, "")),
        ]

    return [e if i < always else pytest.param(e, marks=marks(e)) for i, e in enumerate(ENTRIES)]


EACH = pytest.mark.parametrize("entry", _cases({}), ids=lambda e: e.name)
EACH_GOLDEN = pytest.mark.parametrize("entry", _cases({}, 2), ids=lambda e: e.name)
EACH_COMPILED = pytest.mark.parametrize("entry", _cases(EAGER_ONLY, 3), ids=lambda e: e.name)
EACH_BY_OUR_BACKEND = pytest.mark.parametrize("entry", _cases(EAGER_ONLY | NOT_BY_OUR_BACKEND, 0), ids=lambda e: e.name)


@EACH
@pytest.mark.ranks(3, timeout=300, processes=False)
def test_eager_equals_one_process(entry: Entry) -> None:
    check.compare(entry)


@EACH_COMPILED
@pytest.mark.ranks(3, timeout=600, processes=False)
def test_compiled_equals_one_process(entry: Entry) -> None:
    check.compare(entry, "aot_eager")


@EACH_BY_OUR_BACKEND
@pytest.mark.ranks(3, timeout=600, processes=False)
def test_by_our_backend_equals_one_process(entry: Entry) -> None:
    check.compare(entry, "shardcompile", partitions=2)


@EACH_GOLDEN
def test_sends_what_its_golden_file_says(entry: Entry) -> None:
    path = GOLDEN / f"{entry.name}.txt"
    if entry.name in EAGER_ONLY and not path.exists():
        pytest.skip("a model that is not compiled has no graph to tell of")
    missing = f"there is no {path.name}; pytest -m zoo --update-snapshots writes it"
    assert path.exists() or UPDATE in os.environ, missing
    found = check.communication(entry)
    if UPDATE in os.environ:
        path.write_text(found)
    assert found == path.read_text()
    unsaid = check.gathers_without_judgement(entry, found)
    assert not unsaid, f"gathers of which the registry does not say whether they are needed: {unsaid}"


def test_the_page_is_that_of_the_golden_files() -> None:
    assert zoo_page.PAGE.read_text() == zoo_page.page(), "python -m tools.zoo_page writes it anew"


def test_every_gather_of_a_golden_file_has_a_judgement() -> None:
    """Also where the packages of the models are not installed."""
    for entry in ENTRIES:
        path = GOLDEN / f"{entry.name}.txt"
        if path.exists():
            assert check.gathers_without_judgement(entry, path.read_text()) == [], entry.name


def test_every_model_has_its_golden_file() -> None:
    """Also where the packages of the models are not installed. One that is not compiled needs none."""
    written, named = {p.stem for p in GOLDEN.glob("*.txt")}, {e.name for e in ENTRIES}
    assert written <= named
    assert named - written <= EAGER_ONLY.keys() or UPDATE in os.environ
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)
    assert {*EAGER_ONLY, *NOT_BY_OUR_BACKEND, *IN_DOUBLE, *ASKED_FOR} < {e.name for e in ENTRIES}
    assert not EAGER_ONLY.keys() & NOT_BY_OUR_BACKEND.keys()
