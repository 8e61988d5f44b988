"""The record of an op: all that is said about one overload, in one place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile.compat import OpOverload
from shardcompile.errors import RuleError
from shardcompile.ops.strategy import OpCall, Strategy
from shardcompile.sharding import Layout, is_ordinary

Strategies = Callable[[OpCall], Iterable[Strategy]]
LocalArgs = Callable[[OpCall, tuple[Any, ...], Sequence[Layout], Callable[[Layout], tuple[Any, ...]]], tuple[Any, ...]]
"""Makes the positional arguments of the local call. Takes the call, the local arguments, the output layouts, and a
function that gives this rank's shape of a layout.
"""

Run = Callable[..., object]
"""Called with the arguments of an op, or of a function, and returns its results."""


@dataclass(frozen=True)
class Rule:
    """How an op runs on local shards.

    Attributes:
        strategies: the legal ways along one mesh dim, besides replicating everything.
        local_args: how arguments that speak of global sizes are turned into local ones.
        origin: where it was registered.
    """

    strategies: Strategies
    local_args: LocalArgs | None = None
    origin: str = ""

    def ways(self, call: OpCall) -> Iterator[Strategy]:
        """The strategies for a call.

        Raises:
            RuleError: one of them does not fit the call.
        """
        # torch adds up no such elements. Where an input has others, the result is taken to have those.
        whole_sums = bool(call.tensors) and not any(is_ordinary(t.dtype) for t in call.tensors)
        for strategy in self.strategies(call):
            self._check(call, strategy)
            if not (whole_sums and any(isinstance(p, Partial) for p in strategy.outputs)):
                yield strategy

    def _check(self, call: OpCall, strategy: Strategy) -> None:
        inputs, outputs = len(call.tensors), len(call.op._schema.returns)
        if (len(strategy.inputs), len(strategy.outputs)) != (inputs, outputs):
            raise RuleError(
                f"{call.op}: the rule from {self.origin} gives placements for {len(strategy.inputs)} inputs and "
                f"{len(strategy.outputs)} outputs; this call has {inputs} tensors, and the op returns {outputs}"
            )
        for tensor, placement in zip(call.tensors, strategy.inputs, strict=True):
            if isinstance(placement, Shard) and not 0 <= placement.dim < tensor.ndim:
                raise RuleError(
                    f"{call.op}: the rule from {self.origin} wants {placement} of a tensor of {tensor.ndim} dims "
                    f"({tensor.layout.describe()})"
                )


@dataclass(frozen=True)
class Form:
    """An op on sharded tensors, written in terms of others.

    Attributes:
        run: the op; returns NotImplemented for what it does not serve.
        always: whether every call takes it. Otherwise those do for which the rule would have to send something. Other
            shards along the dims that tensors are sharded along do not count.
        stored: which results get the strides that the op itself would give them; the others keep those they come with.
        preferred: of a call, whether it takes it also where the rule has nothing to send.
        joined: the op on tensors into whose sharded dims leading ones were flattened; NotImplemented for what is to be
            brought to shards of neighbouring rows first.
    """

    run: Run
    always: bool = False
    stored: Literal["all", "first", "none"] = "all"
    preferred: Callable[[OpCall], bool] | None = None
    joined: Run | None = None


def always(run: Run, stored: Literal["all", "first", "none"] = "none") -> Form:
    """The form of an op that has no other way to run."""
    return Form(run, True, stored)


class Order(enum.Enum):
    """In which order of dims a result is stored, where a trace has to be told. torch 2.11 - 2.15."""

    TOLD = "as torch's fake kernels say"
    AS_A_SUM = "as the sum of its inputs; torch's fake kernels say otherwise"
    IN_ROWS = "contiguous, however its inputs are stored; torch's fake kernels say otherwise"
    OF_ROWS = "as torch's fake kernels say if all its inputs are contiguous"
    ASKED = "as a trace finds its shards stored, and takes for the order on all ranks"

    @property
    def needs_rows(self) -> bool:
        """Whether shards are made contiguous inside of a trace."""
        return self in (Order.AS_A_SUM, Order.IN_ROWS, Order.OF_ROWS)


@dataclass(frozen=True, eq=False)
class OpRecord:
    """What happens to an overload on sharded tensors.

    Attributes:
        op: the overload.
        rule: how it runs on local shards; None if it cannot.
        sharded: the op in terms of others on the sharded tensors.
        kernel: what runs on a shard in its place.
        elementwise: whether all that it reads for an element of its result are that element of its inputs, broadcast.
        order: in which order of dims its result is stored.
        keeps_strides: whether its result has the strides of its input, those along sizes of 1 included.
        indices: finds the index tensors among its arguments, which are looked at before anything is sent.
        check: raises what kernels raise for arguments of the global shapes, and fake kernels do not.
        shape_kernel: what is run in its place to find out the shapes and strides of its results.
        instead: what to use where strides forbid a view; empty if a copy is made then.
        becomes: of an op that gives a tensor other memory: the tensor that its argument becomes.
        way_back: of a view op: how a write to a copied view gets back into what is viewed. Takes what is viewed, the
            new value of the view, the number of the result, and the op's other arguments.
        copies_shard: whether its view of a shard has to be a copy; or a function that tells it from the layout of what
            is viewed and that of the view.
        is_same: of a view op: whether autograd takes its result for the tensor itself, and not for a view of it.
        one_value: whether it writes one value everywhere, in whatever order.
        reads_value: whether it reads the value of a tensor of one element. It runs on the full tensor then, by what it
            is, and not for want of a rule.
        moves: of an op whose result holds copies of elements of its tensors, and zeros: given its arguments, those
            tensors.
        spatial: trailing dims of an image, if it treats all other dims as samples.
        functions: Python functions of torch that do something of their own above autograd before they call it.
        not_decomposed: why torch's decomposition is of no use; empty if it is.
        example: arguments to show what happens to it, in the words of `shardcompile.operators.examples`.
        origins: for each field where it was stated.
    """

    op: OpOverload
    rule: Rule | None = None
    sharded: Form | None = None
    kernel: Run | None = None
    elementwise: bool = False
    order: Order = Order.TOLD
    keeps_strides: bool = False
    indices: Callable[..., Iterator[Any]] | None = None
    check: Callable[[OpOverload, Sequence[Any]], None] | None = None
    shape_kernel: Run | None = None
    instead: str = ""
    becomes: Run | None = None
    way_back: Run | None = None
    copies_shard: bool | Callable[[Layout, Layout], bool] = False
    is_same: bool = False
    one_value: bool = False
    reads_value: bool = False
    moves: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    spatial: int = 0
    functions: tuple[object, ...] = ()
    not_decomposed: str = ""
    example: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers. What runs on local shards then is in `shardcompile.ops.random.streams`."""
        return torch.Tag.nondeterministic_seeded in self.op.tags


class Facts(TypedDict, total=False):
    """What can be stated of an op: the fields of its record."""

    rule: Rule
    sharded: Form | Run
    kernel: Run
    elementwise: bool
    order: Order
    keeps_strides: bool
    indices: Callable[..., Iterator[Any]]
    check: Callable[[OpOverload, Sequence[Any]], None]
    shape_kernel: Run
    instead: str
    becomes: Run
    way_back: Run
    copies_shard: bool | Callable[[Layout, Layout], bool]
    is_same: bool
    one_value: bool
    reads_value: bool
    moves: Callable[[Sequence[Any]], Sequence[Any]]
    spatial: int
    functions: tuple[object, ...]
    not_decomposed: str
    example: str
