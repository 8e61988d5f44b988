"""Checks in environments of their own: ``nox -s "tests(torch='2.13.0')"``; ``nox -l`` lists all.

Arguments after ``--`` go to pytest: ``nox -s "tests(torch='2.15.0')" -- tests/pure``. docs/development.md says with
which versions the tests have been run.
"""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "docs", "tests(torch='2.13.0')"]

TORCH = ["2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"]
"""The versions that pyproject.toml allows. `.ci/run` pins 2.13.0."""


@nox.session
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests with a version of torch."""
    session.install("-e", ".[test]", f"torch=={torch}")
    session.run("python", "-m", "pytest", "-q", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, mypy and the import contracts."""
    session.install("-e", ".[test]", "torch==2.13.0")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site; a link that leads nowhere is an error."""
    session.install("-e", ".[docs]", "torch==2.13.0")
    session.run("mkdocs", "build", "--strict", "--site-dir", session.create_tmp())
