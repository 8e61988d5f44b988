"""Private names of torch for offline tracing, which alone imports this module. Seen in torch 2.13 and 2.15."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd  # 2.13 - 2.15
from torch._dynamo.callback import CallbackTrigger  # 2.13 - 2.15
from torch._dynamo.callback import callback_handler as _compile_callbacks  # 2.13 - 2.15
from torch._guards import detect_fake_mode  # 2.13 - 2.15
from torch._inductor import config as _inductor_config  # 2.13 - 2.15
from torch._inductor.virtualized import V  # 2.13 - 2.15
from torch._subclasses.fake_tensor import FakeTensor  # 2.13 - 2.15
from torch._subclasses.meta_utils import MetaTensorDescriber  # 2.13 - 2.15
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore  # 2.13 - 2.15; importing it registers "fake"

from shardcompile.compat.known_values import KnowingFakeMode
from shardcompile.compat.partitioner import Partitioner
from shardcompile.compat.tracing import is_fake_outside_traces


def fake_store() -> torch.distributed.Store:
    """The store of a fake process group, whose collectives do nothing."""
    return FakeStore()


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside the context, tensors on any device have no memory. Values are known as `KnowingFakeMode` says."""
    with KnowingFakeMode(), mock.patch.object(FakeTensor, "__deepcopy__", _copy):
        yield


def _copy(fake: FakeTensor, memo: dict[int, object]) -> torch.Tensor:
    """A deep copy in the same mode. Modules with buffers make such copies of their layers.

    Torch would copy the mode as well, with the references to storages that it holds. Both copies would free them, and
    the process would crash later.
    """
    if not fake.is_leaf:
        return torch.Tensor.__deepcopy__(fake, memo)  # raises torch's own error
    copied = fake.detach().clone().requires_grad_(fake.requires_grad)
    memo[id(fake)] = copied
    copied.grad = copy.deepcopy(fake.grad, memo)
    own = vars(copied)
    own.update({name: copy.deepcopy(value, memo) for name, value in vars(fake).items() if name not in own})
    return copied


@contextlib.contextmanager
def modules_with_fake_parameters() -> Iterator[None]:
    """Inside the context, modules can have fake parameters, and ``module.to(...)``, ``.half()`` and so on convert them.

    Torch draws a truncated normal again while a value exceeds its limits. Fake values are unknown, so here such a
    parameter stays as it is. To convert a parameter, torch swaps it with the new one. It cannot swap a parameter with
    weak references, which each fake tensor has. Here the module gets new parameters. A parameter that modules share
    stays shared.
    """
    apply = torch.nn.Module._apply  # 2.11 - 2.15
    converted: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}

    def new(parameter: torch.nn.Parameter, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
        with torch.no_grad():
            value = convert(parameter)
        if value is parameter:
            return parameter
        if converted.get(id(parameter), (None,))[0] is not parameter:
            converted[id(parameter)] = parameter, torch.nn.Parameter(value, parameter.requires_grad)
        return converted[id(parameter)][1]

    def apply_to_fake(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        if not any(isinstance(p, FakeTensor) for p in self._parameters.values()):
            return apply(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = new(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    draw = torch.nn.init._no_grad_trunc_normal_  # 2.11 - 2.15

    def drawn(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, mean, std, a, b, generator)

    with (
        mock.patch.object(torch.nn.Module, "_apply", apply_to_fake),
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", drawn),
    ):
        yield


def trace_fake_inputs_as_real() -> contextlib.AbstractContextManager[object]:
    """Inside the context, a trace makes symbols with hints for the dims of `fake_tensors`, as for real tensors.

    Torch 2.15 treats every fake input as one of another trace, and leaves its hints out.
    """
    describe = MetaTensorDescriber.describe_tensor

    def described(self: MetaTensorDescriber, t: torch.Tensor, **kwargs: Any) -> object:
        found = describe(self, t, **kwargs)
        return dataclasses.replace(found, fake_mode=None) if is_fake_outside_traces(t) else found

    return mock.patch.object(MetaTensorDescriber, "describe_tensor", described)


def capturing_backend(
    partitioned: Callable[[GraphModule, GraphModule | None], None],
    run: Callable[..., object],
    joint_pass: Callable[[Graph], None],
) -> Callable[..., object]:
    """A backend of ``torch.compile`` that passes on the graphs that AOTAutograd makes for Inductor.

    Args:
        partitioned: called with the forward and the backward graph, or with the only graph and None.
        run: called by the compiled function in place of each graph, with the list of the graph's inputs.
        joint_pass: called on a joint graph before it is divided into forward and backward.
    """
    seen = False

    def partition(joint: GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        nonlocal seen
        seen = True
        joint_pass(joint.graph)
        forward, backward = Partitioner()(joint, inputs, **kwargs)
        partitioned(forward, backward)
        return forward, backward

    # Heavy to import, and not needed by `import shardcompile`.
    from torch._inductor.decomposition import select_decomp_table  # 2.13 - 2.15

    def compiled(graph: GraphModule, _: Sequence[object]) -> Callable[[list[object]], object]:
        if not seen:
            partitioned(graph, None)
        return boxed

    def boxed(inputs: list[object]) -> object:
        return run(inputs)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # 2.13 - 2.15
    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def run_post_grad_passes(graph: GraphModule, last: Callable[[Graph], None], is_inference: bool) -> None:
    """Run Inductor's post-grad passes on a graph from AOTAutograd, with `last` as the custom pass at their end.

    Args:
        graph: is changed in place.
        last: a pass.
        is_inference: whether the graph has no backward pass.
    """
    # Heavy, and only needed for these passes.
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape  # 2.13 - 2.15

    mode = detect_fake_mode([n.meta.get("val") for n in graph.graph.nodes])
    with V.set_fake_mode(mode), _inductor_config.patch(post_grad_custom_post_pass=last):
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference)


def in_compilation() -> contextlib.AbstractContextManager[None]:
    """Inside the context, fake tensors may be made as in a trace. At its end, the switches of a compilation go back."""
    return _compile_callbacks.install_callbacks(CallbackTrigger.DYNAMO, "offline")


@contextlib.contextmanager
def pretend_current_cuda_device() -> Iterator[None]:
    """Inside the context, the Python functions of `torch.cuda` describe a Hopper GPU.

    Without a GPU, ``torch.autocast("cuda")`` would be off, and ``torch.distributed.broadcast`` would fail.
    """
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    amp = torch.cuda.amp.common
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(amp, "amp_definitely_not_available", lambda: False),  # 2.13 - 2.15
    ):
        yield
