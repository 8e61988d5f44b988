"""A fake CUDA device, for tracing on a machine without one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from shardcompile.compat import offline as _torch
from shardcompile.errors import ShardError

_SOURCE = Path(__file__).with_suffix(".cpp")


class OfflineError(ShardError):
    """A function cannot be traced for this world or this device."""


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Makes fake CUDA tensors work inside the context, as with one CUDA device. If there is a GPU, this does nothing.

    Torch asks about CUDA devices through a library that CPU builds lack, and that fails without a GPU. A few lines of
    C++ answer in its place (see absent_cuda.cpp). They are compiled at their first use, in seconds, and kept in the
    user's cache folder for each version of torch.

    The fake device is visible in all threads. ``torch.accelerator.is_available()`` returns True. Attention picks its
    kernel as on an Ampere GPU or a later one. ``torch.autocast("cuda")`` works, and ``torch.cuda.current_device()``
    is 0. But ``torch.cuda.is_available()`` still returns False, and real work on a CUDA device fails as before. After
    the context the fake device is gone.

    Raises:
        OfflineError: there is no C++ compiler, or it fails, or a context in this process is open already.
    """
    if torch.cuda.is_available():
        yield
        return
    library = _library()
    _start_autograd_engine()
    if not library.shardcompile_pretend():
        raise OfflineError("this process already traces offline for CUDA. Leave the outer offline_world first")
    try:
        with _torch.pretend_current_cuda_device():
            yield
    finally:
        library.shardcompile_stop()


def _start_autograd_engine() -> None:
    """Starts the autograd engine, which starts a thread for each device at its first use. The fake one gets none."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        torch.ones((), requires_grad=True).clone().backward()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_build()))
    library.shardcompile_pretend.restype = ctypes.c_bool
    return library


def _build() -> Path:
    """Returns the path of the compiled library, which is compiled if it is not in the cache folder."""
    command = [_compiler(), *_flags()]
    key = hashlib.sha256(repr((torch.__version__, torch.__file__, command, _SOURCE.read_text())).encode()).hexdigest()
    path = _cache_folder() / f"absent_cuda-{key[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # another process may look for the file now
            part = Path(folder) / path.name
            run = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
            if run.returncode:
                raise OfflineError(
                    f"offline tracing for CUDA without a GPU compiles a small library, and that failed. Fix the "
                    f"compiler (the environment variable CXX names it), or use device='cpu', which needs no library.\n"
                    f"{' '.join(command)}\n{run.stderr[-2000:]}"
                )
            part.replace(path)
    return path


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(home).expanduser() / "shardcompile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    return folder if usable else Path(tempfile.mkdtemp(prefix="shardcompile-"))


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise OfflineError(
        f"offline tracing for CUDA without a GPU needs a C++ compiler once, but {wanted or 'c++, g++ or clang++'} is "
        "not there. Install one (on Debian: apt-get install g++; on conda: conda install gxx), or name it in the "
        "environment variable CXX. Tracing with device='cpu' needs none"
    )


def _flags() -> list[str]:
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    return [
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}",
        str(_SOURCE),
        f"-L{libraries}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{libraries}",
    ]
