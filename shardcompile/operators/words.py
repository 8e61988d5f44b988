"""Describes the record of an op, and how it serves an example call."""

from __future__ import annotations

import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile import compat
from shardcompile.compat import OpOverload, OpOverloadPacket
from shardcompile.operators.examples import Example, example_of
from shardcompile.operators.outcome import WORLD, Outcome, Ranks
from shardcompile.ops import FUNCTIONS, OpCall, OpRecord, Order, Strategy, TensorArg, record_of, records
from shardcompile.sharding import Layout, MeshShape

_ROOT = Path(__file__).parents[2]
_WIDTH = 22

HOW = {
    "local": "nothing is sent",
    "reduced": "only sums and the like are sent",
    "exchanged": "rows go to ranks that need them; no tensor is gathered",
    "gathered": "gathered",
    "refused": "refused",
}
"""The communication of each class in `shardcompile.testing.watch.SERVICES`, and of refused calls."""


def ops_named(name: str) -> list[OpOverload]:
    """Returns the overloads of a name such as ``aten.cumprod``, ``aten.cumprod.default`` or ``torch.ops.aten.cumprod``.

    For a packet, returns the overloads that have facts or a rule, which elementwise ops get from torch's tag.
    Functional overloads are preferred. If there are none, returns all overloads.

    Raises:
        LookupError: there is no such op.
    """
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    parts = parts if len(parts) > 1 else ["aten", *parts]
    found: object = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if isinstance(found, OpOverload):
        return [found]
    if not isinstance(found, OpOverloadPacket):
        raise LookupError(f"torch has no op {name!r}; ops are named as torch.ops names them, such as aten.cumprod")
    overloads: list[OpOverload] = [getattr(found, o) for o in found.overloads()]
    stated = {record.op for record in records()}
    described = [op for op in overloads if op in stated or record_of(op).rule is not None]
    functional = [op for op in described if not op._schema.is_mutable]
    return functional or described or overloads


def describe(op: OpOverload, ranks: Ranks) -> str:
    """Describes the record of an op, and how it serves an example call, line by line.

    Args:
        op: the overload.
        ranks: the ranks that run the example.
    """
    record = record_of(op)
    lines = [str(op._schema), "", *itertools.chain.from_iterable(_layout(*fact) for fact in _facts(record))]
    example = example_of(op)
    if example is None:
        lines += ["", 'There is no example of a call; config.fallback = "error" tells whether one of yours gathers.']
        return "\n".join(lines)
    lines += [
        "",
        f"For {example}, on {WORLD} ranks with shards of any size, if sharded",
        *_outcome_lines(ranks.outcomes_of(op, example)),
    ]
    allowed = _strategy_lines(record, example)
    if allowed:
        lines += ["", "What its rule allows along one mesh dim, besides replicated tensors:", *allowed]
    return "\n".join(lines)


def _layout(name: str, text: str) -> Iterator[str]:
    """Lays out a fact as lines: its name and text, then, indented, the docstring of a function."""
    first, *more = text.split("\n")
    yield f"{name:<{_WIDTH}}{first}"
    for line in more:
        yield from textwrap.wrap(line, 118, initial_indent=" " * (_WIDTH + 2), subsequent_indent=" " * (_WIDTH + 2))


def _facts(record: OpRecord) -> Iterator[tuple[str, str]]:
    if record.rule is not None:
        yield "on local shards", f"rule: {_place(record.rule.strategies)}"
    if record.kernel is not None:
        yield "", f"kernel in its place: {_place(record.kernel)}"
    if record.sharded is not None:
        when = "every call" if record.sharded.always else "where the rule would communicate"
        when = when if record.rule is not None or record.sharded.always else "where it serves the call"
        yield "on sharded tensors", f"decomposition, {when}: {_place(record.sharded.run)}"
    if record.functions:
        names = ", ".join(map(_name, record.functions))
        yield "above autograd", f"{names}: {_place(_function_of(record))}"
    if record.rule is None and record.sharded is None:
        yield from _without_rule(record)
    if record.elementwise:
        yield "elementwise", "inputs are broadcast and read element by element"
    if record.indices is not None:
        yield "indices", f"are checked before any communication: {_place(record.indices)}"
    if record.check is not None:
        yield "arguments", f"are checked against the global shape, as a kernel would: {_place(record.check)}"
    if record.order is not Order.FAKE_KERNEL:
        yield "stored", record.order.value
    if record.op.is_view:
        copies = record.copies_shard is True
        yield "a view", "a copy of the shard" if copies else "of the local shard if that holds its rows"
    if record.write_back is not None:
        yield "written to", f"a copied view is written back: {_place(record.write_back)}"
    if record.becomes is not None:
        yield "other memory", f"the tensor becomes: {_place(record.becomes)}"
    if record.is_random:
        yield "random", "ranks agree on seeds along mesh dims that replicate; shards draw independently"


def _without_rule(record: OpRecord) -> Iterator[tuple[str, str]]:
    if record.reads_value:
        yield "reads a value", "it runs on the full tensor of one element on every rank"
    elif record.not_decomposed:
        yield "not decomposed", record.not_decomposed
    elif record.op._can_decompose():
        parts = _parts(record.op)
        yield "of other ops", f"torch calls {', '.join(parts)}" if parts else "torch calls others"
    elif compat.decomposition_of(record.op) is not None:
        yield "no rule", "torch's decomposition into other ops"
    else:
        yield "no rule", "inputs are gathered, and it runs on full tensors on every rank"


class _DispatchedOps(TorchDispatchMode):
    """Records the ops that a call dispatches to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self, op: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.names[str(op)] = None
        return op(*args, **(kwargs or {}))


def _parts(op: OpOverload) -> list[str]:
    """Returns the ops that torch decomposes an op into, for its example."""
    example = example_of(op)
    if example is None:
        return []
    with _DispatchedOps() as dispatched:
        op(*example.args)
    return list(dispatched.names)


_OWNERS = {
    "_VariableFunctionsClass": "torch",
    "TensorBase": "torch.Tensor",
    "Tensor": "torch.Tensor",
    "torch._C._nn": "torch.nn.functional",
}


def _name(function: object) -> str:
    """Returns the public name of a torch function, whose `__qualname__` may name a private class."""
    if isinstance(function, OpOverloadPacket):
        return f"torch.ops.{function}"
    owner, _, name = str(getattr(function, "__qualname__", function)).rpartition(".")
    owner = owner or str(getattr(function, "__module__", "") or "")
    owner = _OWNERS.get(owner, owner)
    return f"{owner}.{name}" if owner else name


def _function_of(record: OpRecord) -> Callable[..., object]:
    return FUNCTIONS[record.functions[0]]


def _place(function: object) -> str:
    """Returns name, file and first paragraph of the docstring of a function, or of the function that made it."""
    function = getattr(function, "func", function)
    if not isinstance(function, FunctionType):
        return str(function)
    code = inspect.unwrap(function).__code__
    path = Path(code.co_filename)
    file = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    outer, _, inner = function.__qualname__.partition(".<locals>")
    maker = getattr(sys.modules[function.__module__], outer, None) if inner else None
    doc = (inspect.getdoc(function) or inspect.getdoc(maker) or "").split("\n\n")[0].replace("\n", " ")
    is_only_a_name = doc.startswith("``") and " " not in doc
    return f"{outer.lstrip('_')} ({file}:{code.co_firstlineno})" + ("" if is_only_a_name or not doc else f"\n{doc}")


def _outcome_lines(outcomes: list[Outcome]) -> Iterator[str]:
    width = max(len(s.partition) for s in outcomes)
    for s in outcomes:
        result = f"; the result is {s.result}" if s.result else ""
        path = f", by {s.path}" if s.path.startswith(("its", "torch")) else f", {s.path}" if s.path else ""
        # The decomposition was tried first, but does not serve this call.
        path = "" if s.how == "gathered" and s.path == "its sharded decomposition" else path
        yield f"  {s.partition:<{width}}  {HOW[s.how]}{path}{result}{s.error and ': ' + s.error}"


def _strategy_lines(record: OpRecord, example: Example) -> list[str]:
    """Returns a line for each strategy of the rule for a call."""
    if record.rule is None:
        return []
    names = [name for name, _ in example.tensors]
    tensors = [TensorArg(Layout.whole(MeshShape((WORLD,)), tuple(x.shape), x.dtype)) for _, x in example.tensors]
    iterator = iter(tensors)

    def replace(a: object) -> object:
        if isinstance(a, list):
            return [replace(b) for b in a]
        return next(iterator) if isinstance(a, torch.Tensor) else a

    call = OpCall(record.op, tuple(replace(a) for a in example.args), {}, tuple(tensors))
    return [f"  {line}" for line in dict.fromkeys(_strategy(s, names) for s in record.rule.strategies_for(call))]


def _strategy(strategy: Strategy, names: list[str]) -> str:
    given = [
        f"{name} {_write_placements(p)}"
        for name, p in zip(names, strategy.inputs, strict=True)
        if not isinstance(p, Replicate)
    ]
    results = dict.fromkeys(_write_placements(p) for p in strategy.outputs)
    partition = ", in a derived partition" if strategy.on_partition is not None else ""
    return f"{', '.join(given) or 'all replicated'} -> {' and '.join(results) or 'nothing'}{partition}"


def _write_placements(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"sharded along dim {placement.dim}"
    return f"a pending {placement.reduce_op}" if isinstance(placement, Partial) else "replicated"
