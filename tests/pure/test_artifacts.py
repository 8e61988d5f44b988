"""Files of compiled code are read as they were written, or are refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import logging
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardcompile as sc
from shardcompile.__main__ import main
from shardcompile.artifacts import ArtifactError, Artifacts, environment
from shardcompile.compat import artifacts as compat_artifacts

MADE = Artifacts(environment(), {"portable": "key"}, {"digest": b"\x7fELF" * 50}, bytes(range(256)))


def test_what_is_written_is_read() -> None:
    assert Artifacts.of_bytes(MADE.to_bytes()) == dataclasses.replace(
        MADE, made_for=json.loads(json.dumps(MADE.made_for))
    )
    assert Artifacts.of_bytes(MADE.to_bytes()).differences(environment()) == []


def test_a_damaged_file_is_refused() -> None:
    content = MADE.to_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(ValueError, match="damaged"):
            Artifacts.of_bytes(content[:length])


def test_a_changed_byte_gives_the_same_contents_or_is_refused() -> None:
    content, refused = MADE.to_bytes(), 0
    expected = Artifacts.of_bytes(content)
    for position in range(0, len(content), 5):
        changed = bytearray(content)
        changed[position] ^= 0x10
        try:
            found = Artifacts.of_bytes(bytes(changed))
        except ValueError:
            refused += 1
        else:  # such as a date
            assert found == expected
    assert refused > len(content) // 10


@pytest.mark.parametrize("name", [n for n in MADE.made_for if n != "the instructions of the CPU"])
def test_what_differs_is_said(name: str) -> None:
    foreign = dataclasses.replace(MADE, made_for={**MADE.made_for, name: "another"})
    assert foreign.differences(environment()) == [f"{name}: made with another, here {environment()[name]}"]


def test_the_cpu_may_have_more_instructions_than_that_they_were_made_on() -> None:
    present = environment()
    here = present["the instructions of the CPU"]
    more, fewer = ({**present, "the instructions of the CPU": names} for names in ([*here, "avx9"], here[1:]))
    assert MADE.differences(more) == []
    assert MADE.differences(fewer) == [f"this CPU lacks the instructions {here[0]}"]
    assert dataclasses.replace(MADE, libraries={}).differences({**fewer, "the number of threads": 99}) == []


@pytest.mark.parametrize("case", ["truncated", "foreign", "missing", "another format"])
def test_a_file_that_is_not_for_this_process_is_ignored_with_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step.artifacts"
    if case == "truncated":
        path.write_bytes(MADE.to_bytes()[:-5])
    elif case == "foreign":
        path.write_bytes(dataclasses.replace(MADE, made_for={**MADE.made_for, "torch": "1.0"}).to_bytes())
    elif case == "another format":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.json", '{"format": 99}')
    tag = torch.compiler.config.cache_key_tag
    with caplog.at_level(logging.WARNING, "shardcompile"):
        assert not sc.load_artifacts(path)
    reason = {
        "truncated": "the file is damaged",
        "foreign": f"torch: made with 1.0, here {torch.__version__}",
        "missing": "No such file",
        "another format": "format 99, not 1",
    }[case]
    (message,) = caplog.messages
    assert str(path) in message and reason in message
    assert torch.compiler.config.cache_key_tag == tag


def test_no_other_code_is_cached_under_a_key_of_artifacts() -> None:
    saved: list[str] = []
    save = compat_artifacts._keep_no_other(saved.append)
    with mock.patch.dict(compat_artifacts._GRAPHS, {"portable": "of artifacts"}):
        save("of artifacts")
        save("another")
    assert saved == ["another"]


def test_nothing_is_written_where_nothing_was_compiled(tmp_path: Path) -> None:
    path = tmp_path / "step.artifacts"
    path.write_text("before")
    with pytest.raises(ArtifactError, match="nothing was recorded"), sc.record_artifacts(path):
        pass
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_code_for_cuda_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "tests.support.precompiled:build"
    assert main(["precompile", target, "--device", "cuda", "--out", str(tmp_path / "out")]) == 1
    assert "needs one GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "target, words",
    [("no.module:build", "No module named"), ("none.py:build", "no file"), ("json:build", "no function")],
)
def test_a_target_that_is_not_there_is_refused(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["precompile", target])
    assert words in capsys.readouterr().err
