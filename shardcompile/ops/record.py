"""The record of an op: everything that the engine knows about one overload, in one place."""

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
"""Computes the positional arguments of the local call. Takes the call, the arguments with local shards in place of
tensors, the output layouts, and a function that returns the shape of this rank's local shard for a layout.
"""

Run = Callable[..., object]
"""Takes the arguments of an op, or of a function, and returns its results."""


@dataclass(frozen=True)
class Rule:
    """How an op runs on local shards.

    Attributes:
        strategies: the legal strategies along one mesh dim, besides replicating everything.
        local_args: how arguments that state global sizes are converted to local ones.
        origin: file and line of the registration.
    """

    strategies: Strategies
    local_args: LocalArgs | None = None
    origin: str = ""

    def strategies_for(self, call: OpCall) -> Iterator[Strategy]:
        """Yields the strategies for a call.

        Raises:
            RuleError: a strategy does not fit the call.
        """
        # torch cannot add elements of other dtypes (float8, uint64), so that a Partial output could not be reduced. If
        # any input has an ordinary dtype, the outputs are assumed to have one, too.
        not_summable = bool(call.tensors) and not any(is_ordinary(t.dtype) for t in call.tensors)
        for strategy in self.strategies(call):
            self._check(call, strategy)
            if not (not_summable and any(isinstance(p, Partial) for p in strategy.outputs)):
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
class NotServed:
    """What a decomposition returns for a call that it does not support.

    Attributes:
        reason: why a decomposition does not support a call, such as "the index is sharded differently from the rows".
    """

    reason: str


@dataclass(frozen=True)
class ShardedDecomposition:
    """A sharded decomposition: an op on sharded tensors, written in terms of other ops on sharded tensors.

    Attributes:
        run: the decomposition; returns `NotServed` for calls that it does not support.
        always: whether every call uses it. Otherwise a call uses it where the rule would have to communicate. Changing
            the shard sizes of a dim that is already sharded does not count as communication here.
        stored: which results get the strides that the op itself would give them; the others keep the strides with which
            `run` returns them.
        preferred: tells for a call whether it uses the decomposition even where the rule does not communicate.
        segmented: the decomposition for tensors whose sharded dim was flattened together with leading dims, so that a
            local shard consists of several segments; returns `NotServed` for calls that need contiguous shards.
    """

    run: Run
    always: bool = False
    stored: Literal["all", "first", "none"] = "all"
    preferred: Callable[[OpCall], bool] | None = None
    segmented: Run | None = None


def always(run: Run, stored: Literal["all", "first", "none"] = "none") -> ShardedDecomposition:
    """Returns the decomposition of an op that has no rule: every call uses it."""
    return ShardedDecomposition(run, True, stored)


class Order(enum.Enum):
    """The order of dims in which a result is stored, where a trace has to state it. torch 2.11 - 2.15."""

    FAKE_KERNEL = "as torch's fake kernels say"
    AS_A_SUM = "like the sum of its inputs; torch's fake kernels say otherwise"
    IN_ROWS = "contiguous, however its inputs are stored; torch's fake kernels say otherwise"
    OF_ROWS = "as torch's fake kernels say if all its inputs are contiguous"
    ASKED = "as the local shards are stored in the trace, which is taken to be the order on all ranks"

    @property
    def needs_rows(self) -> bool:
        """Whether local shards are made contiguous inside a trace."""
        return self in (Order.AS_A_SUM, Order.IN_ROWS, Order.OF_ROWS)


@dataclass(frozen=True, eq=False)
class OpRecord:
    """How an overload runs on sharded tensors.

    Attributes:
        op: the overload.
        rule: how the op runs on local shards; None if it cannot.
        sharded: the decomposition of the op into other ops on sharded tensors.
        kernel: the function that runs on a local shard in place of the op.
        elementwise: whether an element of the result depends only on the same element of the inputs, broadcast.
        order: the order of dims in which the result is stored.
        keeps_strides: whether the result has the strides of the input, including those of dims of size 1.
        indices: yields the index tensors among the arguments, which are checked before any communication.
        check: raises the errors that kernels raise for arguments of the global shapes, and fake kernels do not.
        shape_kernel: the function that runs in place of the op to infer the shapes and strides of the results.
        instead: the op to use where strides do not permit a view; empty if the op makes a copy then.
        becomes: for an op that changes the memory of a tensor (such as `resize_`): returns the tensor that the argument
            becomes.
        write_back: for a view op: writes the value of a copied view back to its base. Takes the base, the new value of
            the view, the index of the result, and the other arguments of the op.
        copies_shard: whether the local shard of the view has to be a copy; or a function that decides this from the
            layouts of the base and of the view.
        is_same: for a view op: whether autograd treats the result as the tensor itself and not as a view of it.
        one_value: whether the op writes the same value to every element, so that the order of elements is irrelevant.
        reads_value: whether the op reads the value of a tensor of one element. It is run on the full tensor because of
            what it does, and not for lack of a rule.
        moves: for an op whose result holds only copies of elements of its tensors, and zeros: returns those tensors,
            given the arguments.
        spatial: number of trailing image dims, if the op treats all other dims as samples.
        functions: Python functions of torch that are overridden above autograd and call this op.
        not_decomposed: why torch's decomposition cannot be used; empty if it can.
        example: arguments that demonstrate the op, in the notation of `shardcompile.operators.examples`.
        origins: for each stated field the file and line of the statement.
    """

    op: OpOverload
    rule: Rule | None = None
    sharded: ShardedDecomposition | None = None
    kernel: Run | None = None
    elementwise: bool = False
    order: Order = Order.FAKE_KERNEL
    keeps_strides: bool = False
    indices: Callable[..., Iterator[Any]] | None = None
    check: Callable[[OpOverload, Sequence[Any]], None] | None = None
    shape_kernel: Run | None = None
    instead: str = ""
    becomes: Run | None = None
    write_back: Run | None = None
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
        """Whether the op draws random numbers. `shardcompile.ops.random.streams` then runs it on local shards."""
        return torch.Tag.nondeterministic_seeded in self.op.tags


class Facts(TypedDict, total=False):
    """The facts that can be stated about an op: the fields of its record."""

    rule: Rule
    sharded: ShardedDecomposition | Run
    kernel: Run
    elementwise: bool
    order: Order
    keeps_strides: bool
    indices: Callable[..., Iterator[Any]]
    check: Callable[[OpOverload, Sequence[Any]], None]
    shape_kernel: Run
    instead: str
    becomes: Run
    write_back: Run
    copies_shard: bool | Callable[[Layout, Layout], bool]
    is_same: bool
    one_value: bool
    reads_value: bool
    moves: Callable[[Sequence[Any]], Sequence[Any]]
    spatial: int
    functions: tuple[object, ...]
    not_decomposed: str
    example: str
