"""Descriptors of functional collectives: all that the rest of the library knows about each of them.

Conventions. Sizes of outputs are passed as symbols, so that no op has to create one. The payload comes first and the
group name last, as Inductor expects of a collective. Results are complete after a wait. Many results differ from the
payload only in the sizes of some dims. Such a result is one flat tensor with the first of these dims outermost, so that
rows are received in place; `Pending` gives it its shape after the wait. (With a shape, Inductor would have to compare
symbolic strides at the wait, and would specialise on the local shard size.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile import compat, diagnosis
from shardcompile.collectives.arguments import A, Signature
from shardcompile.collectives.pending import Pending
from shardcompile.collectives.traffic import Load, Member, Traffic, nbytes_of
from shardcompile.compat.own_ops import LIBRARY, define_op
from shardcompile.diagnosis import Call
from shardcompile.sharding import GroupPartition, transfer_dtype_of

Shape = Any
"""The shape of a payload, or a list of shapes."""


@dataclass(frozen=True)
class Joins(Generic[A]):
    """How a collective takes part in a bucket.

    Attributes:
        bucket: the kind of the bucket that it joins.
        partitions: its partitions in the order of the bucket's arguments; None where the bucket's record holds the
            entire record of each member.
        load: the bytes of each rank in such collectives.
        uneven: whether the loads of ranks may differ.
    """

    bucket: str
    partitions: Callable[[A], Sequence[GroupPartition]] | None = None
    load: Callable[[Sequence[Member], int], Load] = Load.of_shards
    uneven: bool = False


@dataclass(frozen=True, eq=False)
class Descriptor(Generic[A]):
    """A collective, or an op on local shards that belongs to the collectives.

    Its functions take a record of type `arguments`. When passes call them, the record holds fake tensors and symbols,
    with two exceptions: `inverse` takes nodes of a graph; `sizes` and `Joins.partitions` take nodes in place of symbols
    while a bucket is made.

    Attributes:
        kind: its name.
        arguments: a `NamedTuple` type: the names and types of its arguments, see `Signature`.
        run: starts the collective; None if it is torch's own.
        sizes: sizes of the result along the dims in which it differs from the payload; the first of them is outermost
            in the flat result. None if the result is not shaped like the payload.
        fake: the fake implementation; None if it follows from `sizes`.
        adjoint: returns the gradient of the payload, given the arguments without the payload, the payload's shape and
            the gradient of the result in its final shape. None if there is none.
        inverse: given the arguments of a collective and those of another of the same kind that takes its result,
            returns the arguments with which the second undoes the first. None if there is no inverse, or returns None
            if these arguments have none.
        members: shards that the ranks put in and get, for each payload, given the group size, or None if that is not
            known. None if all ranks put in and get tensors of one shape.
        traffic: the bytes that it moves, for the cost model. None if it has no cost.
        whole: bytes of the global tensor that the ranks hold together, or that each of them gets, without halos. None
            if that is the size of the payload.
        source: the size of the sharded dim and its partition, or the first of two. None if there is no partition;
            returns None if it is not static.
        joins: how it takes part in a bucket. None if it does not.
        states: labels of what it states to `shardcompile.diagnosis`, for messages.
        communicates: whether it sends anything.
        of_one_rank: whether a graph knows only what this rank puts in. The traffic is then estimated as if all ranks
            put in as much.
        moves_rows: whether rows move from one rank to others.
        as_integers: whether it only copies elements, so that elements of dtypes that few kernels support can travel as
            integers.
        returns: return type in the schema.
        overloads: the ops of this kind; shardcompile's own, if there is one, is the first.
    """

    kind: str
    arguments: type[A]
    run: Callable[[A], Any] | None = None
    sizes: Callable[[A], dict[int, Any]] | None = None
    fake: Callable[[A], Any] | None = None
    adjoint: Callable[[A, Shape, Any], Any] | None = None
    inverse: Callable[[A, A], A | None] | None = None
    members: Callable[[A, int | None], list[Member]] | None = None
    traffic: Callable[[Sequence[Member], int], Traffic] | None = None
    whole: Callable[[A], Any] | None = None
    source: Callable[[A], tuple[Any, GroupPartition] | None] | None = None
    joins: Joins[A] | None = None
    states: tuple[str, ...] = ()
    communicates: bool = True
    of_one_rank: bool = False
    moves_rows: bool = True
    as_integers: bool = False
    returns: str = "Tensor"
    overloads: Sequence[Any] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_signature", Signature(self.arguments))
        if self.run is not None:
            object.__setattr__(self, "overloads", (_define(self), *self.overloads))
        for op in self.overloads:
            _BY_ID[id(op)] = self
            if self.communicates:
                STARTS.add(id(op))
        _ALL.append(self)

    @property
    def signature(self) -> Signature[A]:
        """The conversion between its records and the op's flat arguments."""
        return self._signature  # type: ignore[attr-defined,no-any-return]

    @property
    def target(self) -> Any:
        """The op: shardcompile's own, or torch's usual overload."""
        return self.overloads[0]

    @property
    def packet(self) -> Any:
        """The overload packet of the op."""
        return self.target.overloadpacket

    def call(self, arguments: A) -> Any:
        """Calls the op, which must be shardcompile's own."""
        return self.packet(*self.signature.write(arguments))

    def start(self, arguments: A) -> Pending:
        """Starts a collective that has `sizes`."""
        assert self.sizes is not None, f"{self.kind} has no sizes"
        flat = self.call(arguments)
        rows, first = rows_of(arguments[0].shape, self.sizes(arguments))
        return Pending(flat, rows, first)

    def enter(self, group: ProcessGroup, dtype: torch.dtype, *stated: object, of: str = "") -> Call:
        """Records a collective before anything is sent. What is stated is rank-invariant.

        Args:
            group: the process group.
            dtype: dtype of the elements.
            stated: ints or sequences of ints, one for each label in `states`.
            of: the reduction.
        """
        kind = f"{self.kind} ({of})" if of else self.kind
        return diagnosis.enter(group, kind, dtype, self.states, *stated)

    def members_of(self, arguments: A, ranks: int | None) -> list[Member]:
        """Returns `members`, by default payloads of one shape on all ranks."""
        if self.members is not None:
            return self.members(arguments, ranks)
        return [Member(None, None, nbytes_of(x)) for x in payloads_of(arguments)]

    def __repr__(self) -> str:
        return f"Descriptor({self.kind})"


_BY_ID: dict[int, Descriptor[Any]] = {}
"""Keyed by the id of the op: torch hashes ops in Python, and every pass looks up every node. Ops are never freed."""

STARTS: set[int] = set()
"""Ids of the ops that start a collective. A set, since every pass tests every node, and a call would cost too much."""

_ALL: list[Descriptor[Any]] = []


def descriptors() -> Iterable[Descriptor[Any]]:
    """Returns all descriptors."""
    return tuple(_ALL)


def own_collectives() -> list[compat.OpOverloadPacket]:
    """Returns the packets of shardcompile's own collectives."""
    return [d.packet for d in _ALL if d.communicates and d.run is not None]


def descriptor_of(op: object) -> Descriptor[Any] | None:
    """Returns the descriptor of the op that a node calls, or None."""
    return _BY_ID.get(id(op))


def payloads_of(arguments: A) -> list[Any]:
    """Returns the tensors that this rank puts in: one, or several for coalesced collectives and buckets."""
    first = arguments[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def rows_of(shape: Sequence[object], sizes: dict[int, Any]) -> tuple[tuple[Any, ...], int]:
    """Returns the shape of a result with its first changed dim outermost, and that dim.

    Args:
        shape: shape of the payload.
        sizes: see `Descriptor`.
    """
    first = next(iter(sizes))
    rest = [sizes.get(d, n) for d, n in enumerate(shape) if d != first]
    return (sizes[first], *rest), first


def _fake(descriptor: Descriptor[A]) -> Callable[[A], Any]:
    sizes = descriptor.sizes
    assert sizes is not None, f"{descriptor.kind} has neither sizes nor a fake"

    def fake(arguments: A) -> Tensor:
        x = arguments[0]
        return x.new_empty([math.prod(rows_of(x.shape, sizes(arguments))[0])])

    return fake


def _define(descriptor: Descriptor[A]) -> object:
    """Defines the op of a descriptor."""
    name, signature, run = descriptor.kind, descriptor.signature, descriptor.run
    assert run is not None
    start = _carried(run) if descriptor.as_integers else run
    on_fakes = descriptor.fake or _fake(descriptor)

    def fake(*args: object) -> Any:
        return on_fakes(signature.read(args))

    # Not capturable in CUDA graphs: the host decides at run time which rows move.
    schema = f"{name}({signature.schema}) -> {descriptor.returns}"
    traced = compat.lower_when_traced(lambda: op, fake) if descriptor.communicates else fake
    op = define_op(schema, lambda *args: start(signature.read(args)), traced)
    if descriptor.adjoint is not None:
        torch.library.register_autograd(
            f"shardcompile::{name}", _backward(descriptor), setup_context=_context_saver(descriptor), lib=LIBRARY
        )
    if not descriptor.communicates:
        compat.note_local(op)
    return op


def _carried(run: Callable[[A], Tensor]) -> Callable[[A], Tensor]:
    """Wraps a collective so that elements of dtypes without full kernel support travel as integers of their size."""

    def start(arguments: A) -> Tensor:
        payload: Tensor = arguments[0]
        transfer_dtype = transfer_dtype_of(payload.dtype)
        if transfer_dtype is payload.dtype:
            return run(arguments)
        return run(type(arguments)(payload.view(transfer_dtype), *arguments[1:])).view(payload.dtype)

    return start


def _context_saver(descriptor: Descriptor[A]) -> Callable[..., None]:
    """Returns the function that saves the payload's shape and the other arguments for the backward pass."""
    tensors = [at for at in descriptor.signature.tensors if at]  # once for all calls: eager calls are short

    def keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        first, *ctx.rest = inputs
        ctx.shape = first.shape if isinstance(first, Tensor) else [x.shape for x in first]
        if tensors:
            ctx.save_for_backward(*[inputs[at] for at in tensors])
            for at in tensors:
                ctx.rest[at - 1] = None

    return keep


def _backward(descriptor: Descriptor[A]) -> Callable[..., tuple[Any, ...]]:
    adjoint, sizes, signature = descriptor.adjoint, descriptor.sizes, descriptor.signature
    assert adjoint is not None
    tensors = [at for at in signature.tensors if at]

    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        flat_arguments = [None, *ctx.rest]
        if tensors:
            for at, tensor in zip(tensors, ctx.saved_tensors, strict=True):
                flat_arguments[at] = tensor
        arguments = signature.read(flat_arguments)
        if sizes is not None:
            grad = Pending(grad, *rows_of(ctx.shape, sizes(arguments))).result()
        return (adjoint(arguments, ctx.shape, grad), *[None] * len(ctx.rest))

    return backward
