"""Has one rank compile a graph for all ranks whose graphs have the same keys in the compiler's caches.

Compiled code does not depend on the rank: shard sizes, coordinates, groups and devices enter when it runs. Kernels that
are chosen by time are then the same on all ranks, too. Ranks whose graphs have other keys, such as those of other
devices, compile their own.

There is an election for each key of two caches: that of AOTAutograd, whose entries stand for a graph of Dynamo with
its backward graph, and that of Inductor, whose entries are the code. A rank that finds nothing under a key either
leads, and compiles as it would alone, or waits for the leader. It gets the leader's entry from the cache, or over the
store where hosts have no file system in common.

Inductor's key holds all that its code depends on. AOTAutograd's does not: the trace that follows may read the rank, as
a handler of a user may. So the keys in its cache tell the rank (`Metadata.stable_text`), and its elections have keys
that do not: an entry is published if the trace has read neither the rank nor its coordinate in a mesh.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters  # 2.11 - 2.15
from torch.distributed.device_mesh import DeviceMesh

from shardcompile.compat.groups import has_other_ranks, store
from shardcompile.compat.patch import Patch, replace
from shardcompile.compat.threads import rank_of_thread
from shardcompile.election import Leadership, elect, published

Function = Callable[..., Any]


class _Shared:
    """What this rank makes for others, or gets from them, of one of torch's caches.

    Args:
        cache: the class of the cache.
        what: an entry, for messages.
    """

    def __init__(self, cache: type, what: str) -> None:
        self._cache: Any = cache
        self._what = what
        self._led: dict[str, Leadership] = {}
        self._contents: dict[str, bytes] = {}

    def look_up(
        self, key: str, find: Callable[[], object], common_key: str | None = None, may_lead: bool = True
    ) -> object:
        """Finds an entry; where there is none, elects the rank that makes it, and waits for it on the others.

        Args:
            key: of the entry.
            find: looks the entry up in the cache; None if there is none.
            common_key: of the election, if it is not the entry's.
            may_lead: whether this rank makes it if it is elected. Otherwise it takes what has been published already.
        """
        found = find()
        if found is not None or key in self._led or not _shares_code():
            return found
        name = f"shardcompile/{self._cache.__name__}/{common_key or key}"
        for edition in itertools.count():  # entries of one key differ in their guards
            edited = f"{name}/{edition}"
            made = elect(store(), edited, world_rank(), self._what) if may_lead else published(store(), edited)
            if isinstance(made, Leadership):
                self._led[key] = made
            if not isinstance(made, bytes):
                return None
            found = find()
            if found is None:  # no file system in common, or another key
                self._cache._write_to_local_cache(key, made)  # 2.11 - 2.15
                found = find()
            if found is not None:
                return found
        return None

    def keep(self, key: str, content: bytes) -> None:
        """Keeps an entry that this rank writes to the cache, for those that wait for it."""
        if key in self._led:
            self._contents[key] = content

    def publish(self, key: str, of_all_ranks: bool = True) -> None:
        """Tells the others that this rank has made the entry.

        Args:
            key: of the entry.
            of_all_ranks: whether it serves other ranks. They get none if it does not, or cannot be cached.
        """
        leadership, content = self._led.pop(key, None), self._contents.pop(key, None)
        if leadership is not None:
            leadership.publish(content if of_all_ranks else None)

    def fail(self, reason: str) -> None:
        """Tells the others that this rank failed to make what it leads."""
        for leadership in self._led.values():
            leadership.fail(reason)
        self._led.clear()
        self._contents.clear()

    def resign(self) -> None:
        """Tells the others that this rank has ended its compilation, and has made nothing else."""
        for key in list(self._led):
            self.publish(key)


_OF_ALL_RANKS = ContextVar("of_all_ranks", default=False)


@contextlib.contextmanager
def keys_of_all_ranks() -> Iterator[None]:
    """Inside of this, keys for AOTAutograd's cache do not tell the rank."""
    token = _OF_ALL_RANKS.set(True)
    try:
        yield
    finally:
        _OF_ALL_RANKS.reset(token)


def keys_tell_the_rank() -> bool:
    """Whether keys for AOTAutograd's cache tell the rank, as those in the cache do."""
    return not _OF_ALL_RANKS.get()


def world_rank(read: Callable[[dist.ProcessGroup], int] = dist.ProcessGroup.rank) -> int:
    """Returns the rank of this process, without counting as a trace that reads it."""
    rank, world = rank_of_thread(), dist.group.WORLD
    assert world is not None, "there is a default process group"
    return read(world) if rank is None else rank


def _shares_code() -> bool:
    """Whether this rank compiles for others, and they for it: several processes, with a store in common."""
    # It imports this package.
    from shardcompile import config

    return config.compile_on == "one" and rank_of_thread() is None and has_other_ranks()


class _Hooks:
    """What is put around functions of torch, for one compilation.

    Attributes:
        graphs: entries of AOTAutograd's cache.
        code: entries of Inductor's cache.
    """

    def __init__(self, graphs: _Shared, code: _Shared) -> None:
        self.graphs, self.code = graphs, code
        self._is_loading = False  # an entry of AOTAutograd's cache, which names entries of Inductor's
        self._is_read = False  # the rank, since the last lookup in AOTAutograd's cache
        self._common_key = ""

    def key(self, key_of: Function) -> Function:
        @functools.wraps(key_of)
        def found(*args: object, **named: object) -> object:
            with keys_of_all_ranks():
                self._common_key = key_of(*args, **named)[0]
            return key_of(*args, **named)

        return found

    def lookup(self, lookup: Function) -> Function:
        @functools.wraps(lookup)
        def looked_up(key: str, *args: object, **named: object) -> object:
            found = self.graphs.look_up(key, lambda: lookup(key, *args, **named), self._common_key)
            self._is_read = False
            return found

        return looked_up

    def reads_rank(self, read: Function) -> Function:
        @functools.wraps(read)
        def noted(*args: object, **named: object) -> object:
            self._is_read = True
            return read(*args, **named)

        return noted

    def try_load(self, try_load: Function) -> Function:
        @functools.wraps(try_load)
        def tried(*args: object, **named: object) -> object:
            self._is_loading = True
            try:
                return try_load(*args, **named)
            finally:
                self._is_loading = False

        return tried

    def load(self, load: Function) -> Function:
        @functools.wraps(load)
        def loaded(key: str, *args: object, **named: object) -> object:
            info: object = None

            def find() -> object:
                nonlocal info
                misses = counters["inductor"]["fxgraph_cache_miss"]
                result, found = load(key, *args, **named)
                if info is not None:  # counts the attempts of one lookup once
                    counters["inductor"]["fxgraph_cache_miss"] = misses - (result is not None)
                info = found
                return result

            return self.code.look_up(key, find, may_lead=not self._is_loading), info

        return loaded

    def save_graphs(self, save: Function) -> Function:
        return _publishing(self.graphs, save, lambda: not self._is_read)

    def save_code(self, save: Function) -> Function:
        return _publishing(self.code, save, lambda: True)


def _keeping(shared: _Shared, write: Function) -> Function:
    @functools.wraps(write)
    def written(key: str, content: bytes) -> None:
        write(key, content)
        shared.keep(key, content)

    return written


def _publishing(shared: _Shared, save: Function, of_all_ranks: Callable[[], bool]) -> Function:
    @functools.wraps(save)
    def saved(key: str, *args: object, **named: object) -> None:
        save(key, *args, **named)  # where it raises, _saying_failures says so
        shared.publish(key, of_all_ranks())

    return saved


def _saying_failures(shared: Sequence[_Shared], compile_graph: Function) -> Function:
    @functools.wraps(compile_graph)
    def compiled(*args: object, **named: object) -> object:
        try:
            return compile_graph(*args, **named)
        except BaseException as error:
            for each in shared:
                each.fail(f"{type(error).__name__}: {error}")
            raise

    return compiled


def compiled_once(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._dynamo.backends import common  # 2.11 - 2.15
    from torch._functorch._aot_autograd import autograd_cache  # 2.11 - 2.15
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache  # 2.11 - 2.15
    from torch._inductor import compile_fx  # 2.11 - 2.15
    from torch._inductor.codecache import FxGraphCache  # 2.11 - 2.15

    graphs = _Shared(AOTAutogradCache, "the compiled forward and backward graphs")
    code = _Shared(FxGraphCache, "the compiled code of a graph")
    hooks = _Hooks(graphs, code)
    stack.callback(graphs.resign)
    stack.callback(code.resign)
    replace(stack, autograd_cache, "autograd_cache_key", hooks.key)  # 2.11 - 2.15
    replace(stack, AOTAutogradCache, "_lookup", hooks.lookup)  # 2.11 - 2.15
    replace(stack, AOTAutogradCache, "try_load", hooks.try_load)  # 2.11 - 2.15
    replace(stack, AOTAutogradCache, "save", hooks.save_graphs)  # 2.11 - 2.15
    replace(stack, FxGraphCache, "load_with_key", hooks.load)  # 2.11 - 2.15
    replace(stack, FxGraphCache, "_save_graph", hooks.save_code)  # 2.11 - 2.15
    for shared, cache in ((graphs, AOTAutogradCache), (code, FxGraphCache)):
        replace(stack, cache, "_write_to_local_cache", functools.partial(_keeping, shared))  # 2.11 - 2.15
    for name in ("get_coordinate", "get_local_rank", "_sym_get_coordinate"):  # the last one: 2.12 - 2.15
        if hasattr(DeviceMesh, name):
            replace(stack, DeviceMesh, name, hooks.reads_rank)
    replace(stack, dist.ProcessGroup, "rank", hooks.reads_rank)
    replace(stack, compile_fx, "fx_codegen_and_compile", functools.partial(_saying_failures, [code]))  # 2.11 - 2.15
    replace(stack, common, "aot_module_simplified", functools.partial(_saying_failures, [code, graphs]))  # 2.11 - 2.15


COMPILED_ONCE = Patch(
    "compiled_once",
    "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache, torch._inductor.codecache.FxGraphCache: lookups "
    "and saves, and autograd_cache_key; torch._inductor.compile_fx.fx_codegen_and_compile; "
    "torch._dynamo.backends.common.aot_module_simplified; DeviceMesh.get_coordinate, get_local_rank; ProcessGroup.rank",
    "Every rank compiles the same code: the CPU time of a job grows with its ranks, and ranks that choose kernels by "
    "time may choose different ones.",
    "https://github.com/pytorch/pytorch/issues/190941; a remote cache cannot be given to the compiler (create_cache "
    "names a class of torch), and would not make ranks wait for one another.",
    "2.11 - 2.15",
    compiled_once,
    kind="sharing",
)
