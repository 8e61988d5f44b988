"""One descriptor for each functional collective: all that the rest of the library knows about it.

Conventions. Sizes of outputs are passed as symbols, so that no op has to invent one. The payload comes first and the
group's name last, as Inductor expects of a collective. Results are complete after a wait. Many results are like the
payload but for the sizes of some dims. Such a result is one flat tensor, the rows of the first of these dims one
after the other, so that rows arrive in place. `Pending` gives it its shape after the wait. (With a shape, Inductor
would have to compare symbolic strides at the wait, and would specialise on the size of this rank's local shard.)
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
from shardcompile.diagnosis import Call
from shardcompile.sharding import GroupPartition, carrier_of

_LIBRARY = torch.library.Library("shardcompile", "DEF")

Shape = Any
"""The shape of a payload, or a list of the shapes of several."""


@dataclass(frozen=True)
class Joins(Generic[A]):
    """How a collective takes part in a bucket.

    Attributes:
        bucket: the kind of the bucket that it joins.
        partitions: its partitions as the bucket's op has them; None where the whole record is written into the
            bucket's.
        load: what each rank has of such collectives.
        uneven: whether a rank may have more than another.
    """

    bucket: str
    partitions: Callable[[A], Sequence[GroupPartition]] | None = None
    load: Callable[[Sequence[Member], int], Load] = Load.of_shards
    uneven: bool = False


@dataclass(frozen=True, eq=False)
class Descriptor(Generic[A]):
    """A collective, or an op on local shards that goes with collectives.

    Functions of arguments get a record as `arguments` says. When passes call them, it holds fake tensors and symbols.
    There are two exceptions: `inverse` gets nodes of a graph; `sizes` and `Joins.partitions` get nodes in place of
    symbols while a bucket is made.

    Attributes:
        kind: its name.
        arguments: a `NamedTuple` type: the names and types of its arguments, see `Signature`.
        run: starts it; None if it is torch's own.
        sizes: of the result along the dims in which it is not like the payload; its rows are along the first of them.
            None of results that are not made of rows like the payload's.
        fake: what it returns, on fake tensors; None if `sizes` tells.
        adjoint: given the arguments, but for the payload, the payload's shape and the result's gradient in the result's
            shape: the payload's gradient. None if there is none.
        inverse: given the arguments, and those of a collective of the same kind that gets the result: the arguments
            that it has if it undoes the first one. None if there is no inverse, or if there is none of these arguments.
        members: what the ranks put in and get, for each payload, given how many they are, or None if that is not known.
            None if all put in and get tensors of one shape.
        traffic: what it moves. None if it has no price.
        whole: bytes of the tensor that the ranks hold together, or that each of them gets, halos not counted. None if
            that is the payload's size.
        source: what is sharded, and its partition, or the first of two. None if there is no partition, or none is
            known.
        joins: how it takes part in a bucket. None if it does not.
        states: what it states to `shardcompile.diagnosis`, for messages.
        communicates: whether it sends anything.
        of_one_rank: whether a graph tells what this rank puts in only. What all of them do is taken for as much from
            each.
        told: whether its arguments tell the bytes of the whole, not the payload alone.
        moves_rows: whether rows go from one rank to others.
        as_integers: whether it only copies elements: those of a dtype that kernels hardly know go as integers.
        returns: type of what it returns.
        overloads: the ops that are of this kind; ours, if there is one, is the first.
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
    told: bool = False
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
        """How its arguments are written."""
        return self._signature  # type: ignore[attr-defined,no-any-return]

    @property
    def target(self) -> Any:
        """The op: ours, or of torch's own the usual one."""
        return self.overloads[0]

    @property
    def packet(self) -> Any:
        """The op's packet."""
        return self.target.overloadpacket

    def call(self, arguments: A) -> Any:
        """Call the op, if it is ours."""
        return self.packet(*self.signature.write(arguments))

    def start(self, arguments: A) -> Pending:
        """Start a collective with `sizes`."""
        assert self.sizes is not None, f"{self.kind} says no sizes"
        flat = self.call(arguments)
        rows, first = rows_of(arguments[0].shape, self.sizes(arguments))
        return Pending(flat, rows, first)

    def enter(self, group: ProcessGroup, dtype: torch.dtype, *stated: object, of: str = "") -> Call:
        """State a collective before anything is sent: what `states` says, the same on every rank.

        Args:
            group: the ranks.
            dtype: of the elements.
            stated: numbers, or sequences of them.
            of: the reduction.
        """
        kind = f"{self.kind} ({of})" if of else self.kind
        return diagnosis.enter(group, kind, dtype, self.states, *stated)

    def members_of(self, arguments: A, ranks: int | None) -> list[Member]:
        """`members`, or payloads of one shape on all ranks."""
        if self.members is not None:
            return self.members(arguments, ranks)
        return [Member(None, None, nbytes_of(x)) for x in payloads_of(arguments)]

    def __repr__(self) -> str:
        return f"Descriptor({self.kind})"


_BY_ID: dict[int, Descriptor[Any]] = {}
"""By the op's id: torch hashes ops in Python, and every pass asks about every node. Ops live as long as the process."""

STARTS: set[int] = set()
"""The ids of ops that start a collective: asked of every node by every pass, so that a call would cost too much."""

_ALL: list[Descriptor[Any]] = []


def descriptors() -> Iterable[Descriptor[Any]]:
    """All there are."""
    return tuple(_ALL)


def descriptor_of(op: object) -> Descriptor[Any] | None:
    """The descriptor of what a node calls, or None."""
    return _BY_ID.get(id(op))


def payloads_of(arguments: A) -> list[Any]:
    """The tensors that this rank puts in: one, but for the coalesced forms and buckets."""
    first = arguments[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def rows_of(shape: Sequence[object], sizes: dict[int, Any]) -> tuple[tuple[Any, ...], int]:
    """The shape of a result with its rows first, and the dim that they are along.

    Args:
        shape: of the payload.
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
    """Make a descriptor's op."""
    name, signature, run = descriptor.kind, descriptor.signature, descriptor.run
    assert run is not None
    # CUDA graphs cannot hold these: which rows move is decided on the host, at run time.
    tags = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
    _LIBRARY.define(f"{name}({signature.schema}) -> {descriptor.returns}", tags=tags)
    start = _carried(run) if descriptor.as_integers else run
    _LIBRARY.impl(name, lambda *args: start(signature.read(args)), "CompositeExplicitAutograd")
    op = getattr(torch.ops.shardcompile, name).default
    on_fakes = descriptor.fake or _fake(descriptor)

    def fake(*args: object) -> Any:
        return on_fakes(signature.read(args))

    traced = compat.lower_when_traced(op, fake) if descriptor.communicates else fake
    torch.library.register_fake(f"shardcompile::{name}", traced, lib=_LIBRARY)
    if descriptor.adjoint is not None:
        torch.library.register_autograd(
            f"shardcompile::{name}", _backward(descriptor), setup_context=_context_saver(descriptor), lib=_LIBRARY
        )
    if descriptor.communicates:
        compat.count_as_collective([op.overloadpacket])
    else:
        compat.note_local(op)
    return op


def _carried(run: Callable[[A], Tensor]) -> Callable[[A], Tensor]:
    """A collective that moves elements which are not ordinary as integers of their size."""

    def start(arguments: A) -> Tensor:
        payload: Tensor = arguments[0]
        carrier = carrier_of(payload.dtype)
        if carrier is payload.dtype:
            return run(arguments)
        return run(type(arguments)(payload.view(carrier), *arguments[1:])).view(payload.dtype)

    return start


def _context_saver(descriptor: Descriptor[A]) -> Callable[..., None]:
    """What a call leaves for its backward pass: the payload's shape, and the other arguments."""
    tensors = [at for at in descriptor.signature.tensors if at]  # known once for all calls: eager ones are short

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
        given = [None, *ctx.rest]
        if tensors:
            for at, tensor in zip(tensors, ctx.saved_tensors, strict=True):
                given[at] = tensor
        arguments = signature.read(given)
        if sizes is not None:
            grad = Pending(grad, *rows_of(ctx.shape, sizes(arguments))).result()
        return (adjoint(arguments, ctx.shape, grad), *[None] * len(ctx.rest))

    return backward
