"""Compiled code in a file: made before a job, or by an earlier one, and taken by every rank of a job.

    with sc.record_artifacts("step.artifacts"):     # on one rank or on all of them; rank 0 writes
        step(batch).backward()

    sc.load_artifacts("step.artifacts")             # in another job, on every rank, before the first step

``python -m shardcompile precompile`` records without a job. The file is a zip archive: a header in JSON, the entries of
torch's caches as `torch.compiler.save_cache_artifacts` returns them, and the C++ libraries that code for CPUs loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import platform
import re
import sys
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardcompile import compat, config
from shardcompile.compat import artifacts as _torch
from shardcompile.compat.caches import source_digest
from shardcompile.compat.threads import rank_of_thread
from shardcompile.errors import ShardError

_LOG = logging.getLogger("shardcompile")

_FORMAT = 1
_HEADER, _ENTRIES, _LIBRARIES = "header.json", "torch_caches", "libraries/"
_CPU = "the instructions of the CPU"
_THREADS = "the number of threads"


class ArtifactError(ShardError):
    """Artifacts cannot be recorded, or not every rank takes part in loading them."""


@dataclass(frozen=True)
class Artifacts:
    """The contents of a file of artifacts.

    Attributes:
        made_for: what the code needs to be the same, such as the version of torch.
        graphs: the keys of the graphs in Inductor's cache, by their portable keys; see `compat.artifacts`.
        libraries: the contents of the C++ libraries, by the digest of their sources.
        torch_bytes: the entries of torch's caches.
    """

    made_for: Mapping[str, Any]
    graphs: Mapping[str, str]
    libraries: Mapping[str, bytes]
    torch_bytes: bytes

    def to_bytes(self) -> bytes:
        """Returns the contents of the file."""
        files = {_ENTRIES: self.torch_bytes, **{f"{_LIBRARIES}{n}": data for n, data in self.libraries.items()}}
        digests = {name: _digest(data) for name, data in files.items()}
        header = {"format": _FORMAT, "made for": self.made_for, "graphs": self.graphs, "files": digests}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_HEADER, json.dumps(header, indent=1))
            for name, data in files.items():
                archive.writestr(name, data)
        return buffer.getvalue()

    @classmethod
    def of_bytes(cls, content: bytes) -> Artifacts:
        """Reads the contents of a file.

        Raises:
            ValueError: the file is damaged, or has another format.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}  # checks the checksums
            header = json.loads(files.pop(_HEADER))
            if header["format"] != _FORMAT:
                raise ValueError(f"the file has format {header['format']}, not {_FORMAT}")
            if header["files"] != {name: _digest(data) for name, data in files.items()}:
                raise ValueError("the file is damaged")
            libraries = {n.removeprefix(_LIBRARIES): data for n, data in files.items() if n.startswith(_LIBRARIES)}
            return cls(header["made for"], header["graphs"], libraries, files[_ENTRIES])
        except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, EOFError, NotImplementedError) as error:
            raise ValueError(f"the file is damaged, or no file of artifacts ({error})") from error

    def differences(self, present: Mapping[str, Any]) -> list[str]:
        """Returns what keeps this code from running where `made_for` would be `present`, each as a clause."""
        wanted = dict(self.made_for)
        if not self.libraries:
            for name in (_CPU, _THREADS):
                wanted.pop(name, None)
        missing = sorted({*wanted.pop(_CPU, ())} - {*present[_CPU]})
        found = [f"this CPU lacks the instructions {', '.join(missing)}"] if missing else []
        return found + [
            f"{name}: made with {value if value is not None else 'none'}, here {present.get(name)}"
            for name, value in wanted.items()
            if value != present.get(name)
        ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def record_artifacts(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the code that is compiled inside the context, and writes it to a file for `load_artifacts`.

    Run what the later job runs, forward and backward. In a job, any ranks may enter; rank 0 writes. Caches may hold the
    code already.

    Args:
        path: the file to write.

    Raises:
        ArtifactError: nothing was compiled, or Inductor's cache is off.
    """
    with _torch.recording() as recorded:
        yield
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if not recorded.graphs or not recorded.torch_bytes:
        raise ArtifactError(
            "record_artifacts: nothing was recorded, since "
            + (
                "no graph was compiled that Inductor can cache; compiled functions keep their code until "
                "torch.compiler.reset(), so enter the context before their first call"
                if _torch.caches_are_on()
                else "Inductor's cache is off (TORCHINDUCTOR_FORCE_DISABLE_CACHES, TORCHINDUCTOR_FX_GRAPH_CACHE)"
            )
        )
    libraries = {name: file.read_bytes() for name, file in recorded.libraries.items()}
    artifacts = Artifacts(environment(), recorded.graphs, libraries, recorded.torch_bytes)
    _torch.write_file(Path(path), artifacts.to_bytes())
    _LOG.info("%d graphs and %d C++ libraries were written to %s", len(recorded.graphs), len(libraries), path)


def load_artifacts(path: str | os.PathLike[str]) -> bool:
    """Takes the code of a file that `record_artifacts` wrote, for the graphs that are compiled from now on.

    All ranks call this, after ``init_process_group`` and before they compile. They may have another number, and other
    partitions, than those that recorded. The code runs on all ranks or on none: a compiled graph has the order of its
    collectives. Where a rank cannot use the file, because it is damaged or was made with another version of torch, of
    this library or of Python, with other settings, or for another CPU or GPU, a warning says what differs, and the job
    compiles as usual.

    Args:
        path: the file, which has to be the same on all ranks.

    Returns:
        Whether the code is used; the same on all ranks.

    Raises:
        ArtifactError: some rank has not called this within the timeout of the process group.
    """
    try:
        content = Path(path).read_bytes()
        artifacts = Artifacts.of_bytes(content)
        name = _digest(content)[:32]
        reason = "; ".join(artifacts.differences(environment()))
    except (OSError, ValueError) as error:
        name, reason = "", str(error)
    reason = _reason_of_all(name, reason)
    if not reason and not _torch.use(name, artifacts.graphs, artifacts.libraries, artifacts.torch_bytes):
        reason = "torch cannot read its entries"  # of a file without damage: on all ranks
    if reason:
        _LOG.warning("the artifacts %s are ignored, and graphs are compiled: %s", os.fspath(path), reason)
    return not reason


def environment() -> dict[str, Any]:
    """Returns what compiled code needs to be the same: what is in the key of a graph, and the CPU."""
    attention = ", ".join(map(str, config.attention_settings()))
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "Triton": version("triton") if find_spec("triton") else None,
        "the sources of shardcompile": source_digest(),
        "Python": sys.implementation.cache_tag,
        "the platform": f"{platform.system()} {platform.machine()}",
        _CPU: _instructions(),
        _THREADS: torch.get_num_threads(),
        "config.verify": config.verify,
        "config.attention": attention,
        **_torch.code_settings(),
    }


_INSTRUCTIONS = re.compile(
    "3dnow|abm|adx|aes|amx|avx|bmi|cldemote|clflushopt|clwb|clzero|cx16|f16c|fma|fsgsbase|fxsr|gfni|lahf|mmx|movbe|"
    "movdir|pclmul|pku|pni|popcnt|ptwrite|rdpid|rdrand|rdseed|serialize|sha|sm3|sm4|sse|ssse|tbm|vaes|vpclmul|waitpkg|"
    "wbnoinvd|xop|xsave"
)


def _instructions() -> list[str]:
    """Returns the instruction sets of the CPU that a compiler may use (``-march=native``)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    sets = {name for line in lines if line.startswith(("flags", "Features")) for name in line.split(":")[1].split()}
    is_x86 = platform.machine() in ("x86_64", "AMD64", "i686")
    return sorted(name for name in sets if not is_x86 or _INSTRUCTIONS.match(name))


_CALLS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def _reason_of_all(name: str, reason: str) -> str:
    """Returns why the ranks do not use a file, the same on all of them; empty if they use it.

    The last rank to arrive decides, over the store of the default process group, so that no rank reads what each of the
    others says.

    Args:
        name: a digest of the file.
        reason: why this rank cannot use it; empty if it can.
    """
    if not compat.has_other_ranks() or rank_of_thread() is not None:
        return reason
    world = dist.group.WORLD
    assert world is not None, "there is a default process group"
    store, rank, ranks = compat.store(), dist.get_rank(), dist.get_world_size()
    prefix = f"shardcompile/artifacts/{next(_CALLS.setdefault(world, itertools.count()))}"
    if reason:
        store.set(f"{prefix}/reason", f"rank {rank}: {reason}")
    else:
        store.add(f"{prefix}/usable/{name}", 1)
    if store.add(f"{prefix}/arrived", 1) == ranks:
        agree = not reason and store.add(f"{prefix}/usable/{name}", 0) == ranks
        known = store.check([f"{prefix}/reason"])
        said = store.get(f"{prefix}/reason").decode() if known else "" if agree else "the ranks have different files"
        store.set(f"{prefix}/result", said or "-")
    try:
        store.wait([f"{prefix}/result"])
    except RuntimeError as error:
        arrived = store.add(f"{prefix}/arrived", 0)
        raise ArtifactError(
            f"load_artifacts: only {arrived} of {ranks} ranks have called it. Call it on every rank, after "
            "init_process_group"
        ) from error
    said = store.get(f"{prefix}/result").decode()
    return "" if said == "-" else said
