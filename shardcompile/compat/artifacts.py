"""Compiled code that leaves the caches of one process for those of another. Seen in torch 2.13 and 2.15.

Torch saves what its caches hold of Inductor's code, but two things keep it from serving another job. The C++ libraries
that the code of CPUs loads are not in the caches. And the key of a graph contains the numbers by which the compiler
chose between strategies (`var_to_hint_override`), which follow from the mean of the shard sizes: another world size, or
another partition, has another key, though the code is right for it. A *portable key* leaves them out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._inductor import config as _inductor_config  # 2.11 - 2.15
from torch._inductor.output_code import CompiledFxGraph  # 2.11 - 2.15
from torch._inductor.runtime.runtime_utils import cache_dir  # 2.11 - 2.15
from torch.compiler._cache import CacheArtifactManager  # 2.11 - 2.15

from shardcompile.compat.caches import set_in_cache_keys
from shardcompile.compat.patch import Patch, put_in_once, replace

if TYPE_CHECKING:
    from torch._inductor.codecache import CppCodeCache

_LOG = logging.getLogger("shardcompile")

Load = Callable[[], object]


@dataclass
class Recorded:
    """The code that a process has compiled, or found in its caches.

    Attributes:
        graphs: the keys of the graphs in Inductor's cache, by their portable keys.
        libraries: the files of C++ libraries, by the digest of their sources.
        torch_bytes: the entries of torch's caches, as `torch.compiler.save_cache_artifacts` returns them.
    """

    graphs: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, Path] = field(default_factory=dict)
    torch_bytes: bytes = b""


_RECORDED: list[Recorded] = []
_TAGS: list[str] = []
_GRAPHS: dict[str, str] = {}
_LIBRARIES: dict[str, Path] = {}


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Records the code that is compiled, or found in Inductor's cache, inside the context.

    AOTAutograd's cache is off meanwhile: its entries serve one rank, and a hit would hide the graphs.
    """
    _put_in()
    recorded = Recorded()
    with CacheArtifactManager.with_fresh_cache(), _functorch_config.patch(enable_autograd_cache=False):
        _RECORDED.append(recorded)
        try:
            yield recorded
        finally:
            _RECORDED.remove(recorded)
        saved = torch.compiler.save_cache_artifacts()
        recorded.torch_bytes = saved[0] if saved else b""


def use(name: str, graphs: Mapping[str, str], libraries: Mapping[str, bytes], torch_bytes: bytes) -> bool:
    """Takes code that another process recorded into the caches of this one, for the graphs it compiles from now on.

    The name becomes part of all other keys, too. Otherwise AOTAutograd's cache might lead to code of an earlier job, in
    which the collectives may have another order, on those ranks that have such an entry.

    Args:
        name: a digest of the contents.
        graphs: see `Recorded`.
        libraries: the contents of the C++ libraries, by the digest of their sources.
        torch_bytes: see `Recorded`.

    Returns:
        Whether torch could read its entries.
    """
    if torch.compiler.load_cache_artifacts(torch_bytes) is None:
        return False
    folder = Path(cache_dir()) / "shardcompile" / name
    folder.mkdir(parents=True, exist_ok=True)
    for digest, content in libraries.items():
        write_file(folder / f"{digest}{_SUFFIX}", content)
        _LIBRARIES[digest] = folder / f"{digest}{_SUFFIX}"
    _put_in()
    tag = f"-artifacts {name}"
    if tag not in _TAGS:
        _TAGS.append(tag)
        set_in_cache_keys(tag, True)
    _take_graphs(name, graphs)
    return True


def write_file(path: Path, content: bytes) -> None:
    """Writes a file at once: other processes see all of it, or what was there before."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def code_settings() -> dict[str, object]:
    """Returns what the keys of Inductor's cache, or its C++ libraries, contain of this process besides its sources."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).name if torch.cuda.is_available() else None
    return {
        "the C++ compiler": list(map(str, filter(None, _inductor_config.cpp.cxx))),  # 2.11 - 2.15
        "the GPU": gpu,
    }


def caches_are_on() -> bool:
    """Whether Inductor caches code."""
    return bool(_inductor_config.fx_graph_cache) and not _inductor_config.force_disable_caches  # 2.11 - 2.15


def run_instead_of_compiled_code(run: Callable[..., object]) -> contextlib.AbstractContextManager[object]:
    """Inside the context, a graph that Inductor has compiled calls this function in place of its code."""
    return mock.patch.object(CompiledFxGraph, "__call__", run)  # 2.11 - 2.15


# ------------------------------------------------------------------------------------------------- keys of graphs


def _find_by_portable_key(hash_of: Callable[..., tuple[str, list[str]]]) -> Callable[..., tuple[str, list[str]]]:
    """Replaces torch's function that makes the key of a graph, before it is looked up."""

    @functools.wraps(hash_of)
    def key_of(*args: object, **named: object) -> tuple[str, list[str]]:
        key, lines = hash_of(*args, **named)
        if _RECORDED or _GRAPHS:
            with _without_hints_and_tags():
                portable, _ = hash_of(*args, **named)
            if _GRAPHS and portable not in _GRAPHS:
                _LOG.info("a graph is compiled, since it is not in the artifacts that were loaded")
            key = _GRAPHS.get(portable, key)
            for recorded in _RECORDED:
                recorded.graphs[portable] = key
        return key, lines

    return key_of


@contextlib.contextmanager
def _without_hints_and_tags() -> Iterator[None]:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codecache import FxGraphCache

    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag
    for name in _TAGS:
        tag = tag.replace(name, "")
    env = FxGraphCache._get_shape_env()  # 2.11 - 2.15
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings.patch(cache_key_tag=tag))  # 2.11 - 2.15
        if env is not None:
            stack.enter_context(mock.patch.object(env, "var_to_hint_override", {}))  # 2.11 - 2.15
        yield


def _take_graphs(name: str, graphs: Mapping[str, str]) -> None:
    """Has graphs be found under keys of their own, which entries of other artifacts cannot have.

    Args:
        name: a digest of the artifacts.
        graphs: see `Recorded`. Torch has written their entries to Inductor's cache.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor.codecache import FxGraphCache

    for portable, key in graphs.items():
        _GRAPHS[portable] = "f" + hashlib.sha256(f"{key} {name}".encode()).hexdigest()
        for path in Path(FxGraphCache._get_tmp_dir_for_key(key)).glob("[!.]*"):  # 2.11 - 2.15
            FxGraphCache._write_to_local_cache(_GRAPHS[portable], path.read_bytes())  # 2.11 - 2.15


def _keep_no_other(save: Callable[..., None]) -> Callable[..., None]:
    """Replaces torch's function that caches a graph after it was compiled.

    Where no entry of the artifacts fits the guards, a graph is compiled, and chooses by its own hints. Under the key of
    the artifacts another job could find it on some ranks, and not on others.
    """

    @functools.wraps(save)
    def save_others(key: str, *args: object, **named: object) -> None:
        if key not in _GRAPHS.values():
            save(key, *args, **named)

    return save_others


# ------------------------------------------------------------------------------------------------- C++ libraries

_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[-1]


def _keep_libraries(load_async: Any) -> classmethod[Any, Any, Load]:
    """Replaces torch's method that compiles a C++ library and loads it."""
    compile_and_load = load_async.__func__

    @functools.wraps(compile_and_load)
    def load(cls: type[CppCodeCache], main_code: str, *args: object, **named: object) -> Load:
        sources = {name: value for name, value in named.items() if name != "submit_fn"}
        digest = hashlib.sha256(repr((cls.__name__, main_code, args, sorted(sources.items()))).encode()).hexdigest()
        if digest in _LIBRARIES:
            try:
                library = cls._load_library(str(_LIBRARIES[digest]), digest)  # 2.11 - 2.15
            except (ImportError, OSError) as error:
                _LOG.warning("a C++ library of the artifacts cannot be loaded, and is compiled: %s", error)
                del _LIBRARIES[digest]
            else:
                _record(digest, library)
                return lambda: library
        compiled = compile_and_load(cls, main_code, *args, **named)

        def loaded() -> object:
            library = compiled()
            _record(digest, library)
            return library

        return loaded if _RECORDED else compiled

    return classmethod(load)


def _record(digest: str, library: object) -> None:
    for recorded in _RECORDED:
        recorded.libraries[digest] = Path(getattr(library, "__file__", None) or vars(library)["_name"])


def _replace_in_codecache(
    name: str, by: Callable[..., object], owner: str = ""
) -> Callable[[contextlib.ExitStack], None]:
    def put_in(stack: contextlib.ExitStack) -> None:
        # Heavy, and only artifacts need it.
        from torch._inductor import codecache

        replace(stack, getattr(codecache, owner) if owner else codecache, name, by)

    return put_in


PORTABLE_KEYS = Patch(
    "portable_keys",
    "torch._inductor.codecache.compiled_fx_graph_hash",
    "The key of a graph contains the hints of its sizes, so that its code serves one world size and partition only.",
    "FxGraphHashDetails has var_to_hint_override, though hints do not make code right or wrong, and other hints "
    "are left out on purpose (_reduce_symint).",
    "2.13 - 2.15",
    _replace_in_codecache("compiled_fx_graph_hash", _find_by_portable_key),
    kind="sharing",
)
NO_OTHER_ENTRIES = Patch(
    "no_other_entries",
    "torch._inductor.codecache.FxGraphCache._save_graph",
    "A graph that fits no entry of loaded artifacts would be cached under the key of the artifacts.",
    "None: this library alone looks up graphs by portable keys.",
    "2.13 - 2.15",
    _replace_in_codecache("_save_graph", _keep_no_other, "FxGraphCache"),
    kind="sharing",
)
KEPT_LIBRARIES = Patch(
    "kept_libraries",
    "torch._inductor.codecache.CppCodeCache.load_async",
    "torch.compiler.save_cache_artifacts has the sources of C++ libraries, not the libraries: a job that loads the "
    "artifacts compiles them again.",
    "save_cache_artifacts contains Triton's kernels (TritonBundler), but no library of CppCodeCache.",
    "2.11 - 2.15",
    _replace_in_codecache("load_async", _keep_libraries, "CppCodeCache"),
    kind="sharing",
)

OF_ARTIFACTS = (PORTABLE_KEYS, NO_OTHER_ENTRIES, KEPT_LIBRARIES)
"""Put in for good when artifacts are recorded or loaded."""


def _put_in() -> None:
    for patch in OF_ARTIFACTS:
        put_in_once(patch)
