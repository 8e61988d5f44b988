"""A wheel built from the sdist holds the whole package, `passes/` included, and imports from anywhere."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from shardcompile.compat.caches import source_files
from tests.support.sources import ROOT

BUILD_INPUTS = ["LICENSE", "README.md", "pyproject.toml", "setup.py", "passes", "shardcompile"]


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def installed_major(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that nothing is left in the checkout and no old build is picked up."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `python -m build` makes: the sdist first, then the wheel from the sdist alone."""
    out = tmp_path_factory.mktemp("dist")
    # Isolation downloads setuptools, so it is for environments without one that pyproject.toml accepts.
    isolation = ["--no-isolation"] if installed_major("setuptools") >= 77 else []
    run("-m", "build", *isolation, "--outdir", out, cwd=checkout)
    (built,) = out.glob("*.whl")
    return built


def test_link_and_folder_are_one_package():
    link = ROOT / "shardcompile" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_wheel_from_sdist_holds_every_module_once(checkout: Path, wheel: Path):
    expected = [path.relative_to(checkout).as_posix() for path in source_files(checkout / "shardcompile")]
    assert "shardcompile/passes/__init__.py" in expected

    packed = [name for name in ZipFile(wheel).namelist() if name.endswith(".py")]
    assert sorted(packed) == sorted(expected)


def test_wheel_from_sdist_holds_the_files_that_are_no_modules(checkout: Path, wheel: Path):
    files = [path for path in (checkout / "shardcompile").rglob("*") if path.is_file() and path.suffix != ".py"]
    expected = [path.relative_to(checkout).as_posix() for path in files]
    assert "shardcompile/inspect/page.js" in expected
    assert set(expected) <= set(ZipFile(wheel).namelist())


def test_wheel_from_sdist_imports_from_an_empty_folder(wheel: Path, tmp_path: Path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    ZipFile(wheel).extractall(site)
    empty.mkdir()
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
import shardcompile.passes
print(shardcompile.passes.__file__, shardcompile.__version__)
"""
    file, version = run("-I", "-c", code, cwd=empty).rsplit(maxsplit=1)
    assert Path(file) == site / "shardcompile" / "passes" / "__init__.py"
    assert version == wheel.name.split("-")[1]
