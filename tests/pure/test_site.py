"""The pages of the site: each is in the navigation, links lead somewhere, and mkdocs builds them."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardcompile import config
from shardcompile.passes import Pipeline
from shardcompile.passes.pipeline import foreign_passes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("**/*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def text_of(page: Path) -> str:
    """A page without its code, where brackets are no links and a number sign is no heading."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links to files that are not there, or to headings that the file does not have."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def navigation() -> list[str]:
    """The pages that mkdocs.yml lists. A line of it is enough: reading YAML would need a package."""
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    return re.findall(r": (\S+\.md)$", listed, re.M)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[a](gone.md) [b](page.md#one-heading) [c](#none) [d](https://x.y/z) `[e](code.md)`\n"
    )
    assert broken_links(page) == ["gone.md", "#none"]


def test_every_page_is_two_views_from_the_readme() -> None:
    """From README.md by a link, or by a link of a page that README.md links to."""
    one = {
        (ROOT / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)]+\.md)\)", text_of(ROOT / "README.md"))
    }
    two = {(p.parent / link).resolve() for p in one for link in re.findall(r"\]\(([^)#:]+\.md)[#)]", text_of(p))}
    assert set(DOCS.glob("**/*.md")) - one - two <= {DOCS / "index.md"}


@pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None or find_spec("material") is None,
    reason="needs shardcompile[docs]",
)
def test_the_site_builds(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    assert "shardcompile.ShardTensor.from_local" in api and "sharding_shapes" in api
    shown = re.findall(r'<h\d id="(shardcompile[^"]*)"', api)
    assert "shardcompile.Layout.describe" in shown and "shardcompile.config.patch" in shown
    assert not [name for name in shown if "._" in name or name.endswith(".refusal")]
    passes = (tmp_path / "site" / "passes.html").read_text()
    assert passes.count("<svg ") > passes.count('role="img"') > 15 and 'src="pass-' not in passes
    assert passes.count("[data-md-color-scheme=slate] .figure{") == 1
    assert (tmp_path / "site" / "repository" / "notebooks" / "1_uneven_shards.ipynb").exists()
    shutil.rmtree(tmp_path / "site")


def test_the_api_page_shows_no_private_members() -> None:
    """Also where the site is not built. `members: true` shows all of them, whatever `filters` says."""
    options = re.findall(r"members: *(\S+)", (DOCS / "api.md").read_text())
    assert "null}" in options and not [found for found in options if found.startswith("true")]
    assert re.search(r'members: \[\]\n +filters: \["!\^_"\]', (ROOT / "mkdocs.yml").read_text())


def test_members_that_the_api_page_lists_exist() -> None:
    """mkdocstrings leaves out without a word what a class does not have."""
    page = (DOCS / "api.md").read_text()
    listed = re.findall(r"^::: (shardcompile\S*)\n +options:\s+(?:\{ *)?members: \[([^\]]+)\]", page, re.M)
    assert len(listed) > 3
    for owner, members in listed:
        assert [m for m in members.split(", ") if not hasattr(_named(owner), m)] == [], owner


def _named(name: str) -> object:
    """The object with a dotted name."""
    found: object = importlib.import_module("shardcompile")
    for i, part in enumerate(parts := name.split(".")[1:], 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(["shardcompile", *parts[:i]]))
        found = getattr(found, part)
    return found


def test_the_page_of_passes_has_every_pass() -> None:
    text = (DOCS / "passes.md").read_text()
    names = {each.name for each in (*Pipeline().passes, *foreign_passes())}
    assert len(names) > 15 and {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("program", ["concepts", "performance"])
def test_pictures_are_what_their_programs_draw(program: str) -> None:
    """Those of graphs need traces: tests/fake/test_pictures.py."""
    panels = importlib.import_module(f"tools.pictures.{program}").panels()
    assert panels and {name: str(panel) for name, panel in panels.items()} == {
        name: (DOCS / f"{name}.svg").read_text() for name in panels
    }, f"python -m tools.pictures.{program} draws them anew"


def test_pictures_fit_a_telephone_and_follow_the_scheme() -> None:
    """Each is on a page, has no colour of its own, and asks nothing of other hosts."""
    pages = "".join(page.read_text() for page in PAGES)
    for path in DOCS.glob("*.svg"):
        text = path.read_text()
        assert f"{path.name})" in pages, f"no page shows {path.name}"
        (width,) = map(float, re.findall(r'^<svg .* width="([\d.]+)"', text))
        assert width <= 480 and "#" not in text.partition("</style>")[2]
        assert set(re.findall(r"\w+://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_api_page_has_every_setting() -> None:
    (listed,) = re.findall(
        r"^::: shardcompile\.config\n.*?members: \[(.+?)\]", (DOCS / "api.md").read_text(), re.M | re.S
    )
    assert listed.split(", ") == [*config.SETTINGS, "patch"]


def test_the_api_page_has_every_public_name() -> None:
    """What `shardcompile` exports is written `from ... import name as name`. The errors are on the page as a module."""
    exported = (ROOT / "shardcompile/__init__.py").read_text()
    names = {n for n, again in re.findall(r"import (\w+) as (\w+)$", exported, re.M) if n == again}
    listed = set(re.findall(r"^::: shardcompile\.(\w+)", (DOCS / "api.md").read_text(), re.M))
    errors = set(re.findall(r"^from shardcompile\.errors import (\w+)", exported, re.M))
    assert (
        len(names) > 25
        and "errors" in listed
        and "::: shardcompile.parallel.neighbors." in (DOCS / "api.md").read_text()
    )
    assert names - errors - {"neighbors"} <= listed
