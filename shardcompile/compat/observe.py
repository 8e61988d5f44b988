"""Private names of torch with which compilations are observed. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch._dynamo.backends import common  # 2.11 - 2.15
from torch._dynamo.convert_frame import register_bytecode_hook  # 2.11 - 2.15
from torch._dynamo.output_graph import OutputGraph  # 2.11 - 2.15
from torch._dynamo.utils import counters, get_compilation_metrics  # 2.11 - 2.15
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler  # 2.11 - 2.15
from torch._functorch.partitioners import default_partition  # 2.11 - 2.15
from torch._guards import CompileContext  # 2.11 - 2.15
from torch._inductor import config as _inductor_config  # 2.11 - 2.15
from torch.fx import GraphModule

from shardcompile.compat.threads import Listeners

Partition = Callable[..., tuple[GraphModule, GraphModule]]
_T = TypeVar("_T")


class Observer(Protocol):
    """The methods that are called during the compilations of this object's rank."""

    def captured(self, function: str, place: str, graph: GraphModule) -> contextlib.AbstractContextManager[object]:
        """Dynamo captured a graph of a function at ``file:line``. The graph is compiled inside the context."""

    def current(self) -> object:
        """The observer's object for the graph of the innermost `captured`. Later calls get it back as `of`."""

    def traced(self, of: Any, graph: GraphModule) -> None:
        """AOTAutograd traced the forward and the backward pass into one graph."""

    def partitioned(self, of: Any, forward: GraphModule, backward: GraphModule) -> None:
        """The partitioner divided the joint graph into forward and backward."""

    def compiling(self, of: Any, graph: GraphModule, side: str) -> contextlib.AbstractContextManager[object]:
        """A graph is compiled inside the context. The side is "forward", "backward" or "inference"."""

    def generated(self, code: str) -> None:
        """Inductor generated code."""

    def rewritten(self, function: str, bytecode: types.CodeType) -> None:
        """Dynamo replaced the bytecode of a function. The new bytecode calls the compiled graphs."""


def _watch_compilations(patches: contextlib.ExitStack) -> None:
    call, aot = OutputGraph.call_user_compiler, common.aot_module_simplified

    @functools.wraps(call)
    def call_user_compiler(self: OutputGraph, gm: GraphModule, example_inputs: list[torch.Tensor]) -> object:
        with contextlib.ExitStack() as wrapped:
            for observer in _OBSERVERS.here():
                wrapped.enter_context(observer.captured(*_name(self.root_tx.f_code), gm))
            return call(self, gm, example_inputs)

    @functools.wraps(aot)
    def aot_module_simplified(mod: GraphModule, args: Sequence[object], *rest: Any, **kwargs: Any) -> object:
        for observer in _OBSERVERS.here():
            kwargs = _observe(observer, kwargs)
        return aot(mod, args, *rest, **kwargs)

    def rewritten(code: types.CodeType, new_code: types.CodeType) -> types.CodeType | None:
        for observer in _OBSERVERS.here():
            observer.rewritten(code.co_qualname, new_code)
        return None

    patches.enter_context(mock.patch.object(OutputGraph, "call_user_compiler", call_user_compiler))
    patches.enter_context(mock.patch.object(common, "aot_module_simplified", aot_module_simplified))
    patches.callback(register_bytecode_hook(rewritten).remove)


def _watch_code(patches: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.graph import GraphLowering  # 2.11 - 2.15

    def save_output_code(code: str) -> None:
        for generated in _READERS.here():
            generated(code)

    patches.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(save_output_code)))


_OBSERVERS: Listeners[Observer] = Listeners(_watch_compilations)
_READERS: Listeners[Callable[[str], None]] = Listeners(_watch_code)


@contextlib.contextmanager
def observe_compilations(observer: Observer, caches: bool) -> Iterator[None]:
    """Call an observer for all compilations inside. If ranks are threads, for those of this rank.

    Args:
        observer: its methods are called.
        caches: whether compiled code may come from a cache. For such a compilation, only `captured` is called.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_OBSERVERS.with_one_more(observer))
        if not caches:
            stack.enter_context(_inductor_config.patch(fx_graph_cache=False))
            stack.enter_context(_functorch_config.patch(enable_autograd_cache=False))
        yield


def _name(code: types.CodeType) -> tuple[str, str]:
    """Name and place of a function. For code of torch itself, which wraps a module, the place is empty."""
    if code.co_filename.startswith(os.path.dirname(torch.__file__)):
        return "module", ""
    return code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"


def _observe(observer: Observer, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``aot_module_simplified``, with compilers and a partitioner that call the observer."""
    wrapped, of = dict(kwargs), observer.current()
    for name, side in (("fw_compiler", "forward"), ("bw_compiler", "backward"), ("inference_compiler", "inference")):
        compiler = kwargs.get(name)
        if isinstance(compiler, SerializableAOTDispatchCompiler):
            inner = _wrap_compiler(observer, of, compiler.compiler_fn, side)
            wrapped[name] = SerializableAOTDispatchCompiler(compiler.output_code_ty, inner)
        elif compiler is not None:
            wrapped[name] = _wrap_compiler(observer, of, compiler, side)
    wrapped["partition_fn"] = _wrap_partitioner(observer, of, kwargs.get("partition_fn") or default_partition)
    return wrapped


def _wrap_compiler(observer: Observer, of: object, compiler: Callable[..., _T], side: str) -> Callable[..., _T]:
    def compile_observed(graph: GraphModule, *args: object, **kwargs: object) -> _T:
        with _READERS.with_one_more(observer.generated), observer.compiling(of, graph, side):
            return compiler(graph, *args, **kwargs)

    return compile_observed


def _wrap_partitioner(observer: Observer, of: object, partition: Partition) -> Partition:
    def partition_observed(
        joint: GraphModule, inputs: Sequence[object], **kwargs: object
    ) -> tuple[GraphModule, GraphModule]:
        observer.traced(of, joint)
        forward, backward = partition(joint, inputs, **kwargs)
        observer.partitioned(of, forward, backward)
        return forward, backward

    return partition_observed


def compile_id() -> str:
    """The number of the running compilation: its frame, and how often that was compiled before, such as ``0/1``."""
    context = CompileContext.try_get()
    return "" if context is None else str(context.compile_id)


def compilations_since(start: float) -> list[tuple[str, str, str]]:
    """The compilations that began after a time. Torch remembers the last 64.

    Args:
        start: in seconds, as `time.time` returns it.

    Returns:
        For each compilation the function, ``file:line``, and the reason of the recompile, if it was one.
    """
    return [
        (str(m.co_name), f"{m.co_filename}:{m.co_firstlineno}", str(m.recompile_reason or ""))
        for m in get_compilation_metrics()
        if m.co_name is not None and (m.start_time_us or 0) >= start * 1e6
    ]


def graph_breaks() -> dict[str, int]:
    """The reasons of graph breaks in this process, and how often each occurred."""
    return dict(counters["graph_break"])


def cache_counts() -> dict[str, int]:
    """Hits and misses of the compiler's caches in this process."""
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "aot_autograd hits": aot["autograd_cache_hit"],
        "aot_autograd misses": aot["autograd_cache_miss"],
        "inductor hits": inductor["fxgraph_cache_hit"],
        "inductor misses": inductor["fxgraph_cache_miss"],
    }


def is_order_pinned(graph: torch.fx.Graph) -> bool:
    """Whether a graph has edges that carry no data and hold nodes in their order."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.fx_passes.control_dependencies import control_deps  # 2.11 - 2.15

    return any(node.target is control_deps for node in graph.nodes)
