"""The process group of in-process ranks, which are threads and communicate through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from shardcompile.collectives.transport import Transport
from shardcompile.compat import one_process as rank_state
from shardcompile.dispatch.foreign import collective_refusal
from shardcompile.tensor.core import ShardTensor
from shardcompile.testing import rendezvous
from shardcompile.testing.rendezvous import Message, Part, Rendezvous, RendezvousError, Room
from shardcompile.testing.scheduler import ThreadScheduler

_REDUCED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
}
"""The dtypes that gloo reduces."""


class ThreadWork(Work):
    """The `Work` of a collective or a message that has started."""

    def __init__(self, group: ThreadGroup, event: Rendezvous | Message, what: Callable[[], str]) -> None:
        super().__init__()
        self._group, self._event, self._what = group, event, what

    def wait(self, timeout: object = None) -> bool:
        """Lets other ranks run until it is complete.

        Raises:
            RendezvousError: it can never be complete.
            RanksWaitError: no rank can go on.
        """
        self._group.scheduler.wait(self._group.global_rank, self._event.ended, self._what)
        if self._event.error is not None:
            raise RendezvousError(self._event.error)
        return True

    def is_completed(self) -> bool:
        """Returns whether it is complete."""
        return self._event.ended()

    def is_success(self) -> bool:
        """Returns whether it is complete, without an error."""
        return self._event.done

    def synchronize(self) -> None:
        """Does the same as `wait`."""
        self.wait()


_Base: Any = ProcessGroup
"""`Any` for type checkers, since the signatures and overloads of its methods differ between versions of torch."""


class ThreadGroup(_Base):  # type: ignore[misc]
    """A process group of in-process ranks, as its member `rank` sees it.

    Args:
        room: the state that the members of the group share.
        rank: the rank in the group.
        rooms: the shared state of all groups of the world.
    """

    def __init__(self, room: Room, rank: int, rooms: Rooms) -> None:
        super().__init__(rank, len(room.ranks))
        self._room, self._rank, self.rooms = room, rank, rooms

    @property
    def scheduler(self) -> ThreadScheduler:
        """The scheduler of the running test."""
        return self.rooms.scheduler

    @property
    def global_rank(self) -> int:
        """This member's rank in the default group."""
        return self._room.ranks[self._rank]

    def rank(self) -> int:
        """Returns the rank in the group. A trace that reads it is valid on this rank only, so the read is noted."""
        rank_state.note_rank_read()
        return self._rank

    def size(self) -> int:
        """Returns the number of members."""
        return len(self._room.ranks)

    @property
    def group_name(self) -> str:
        """The name of the group. All groups along a mesh dim have the same name."""
        return self._room.name

    def getBackendName(self) -> str:
        """Returns the name under which the backend is registered."""
        return BACKENDS[self.rooms.device]

    def __repr__(self) -> str:
        return f"ThreadGroup(rank {self._rank} of ranks {', '.join(map(str, self._room.ranks))})"

    # Collectives. Some have another name in torch 2.11 to 2.12 than in 2.13 to 2.15.

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None) -> Work:
        op = rendezvous.op_name(opts.reduceOp) if opts is not None else "SUM"
        _refuse_reduction(tensors)
        stated = " and ".join(rendezvous.describe("all_reduce", x, op.lower()) for x in tensors)
        return self._join(Part(stated, tensors, tensors), rendezvous.all_reduce(op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Work:
        op = rendezvous.op_name(opts.reduceOp)
        _refuse_reduction(tensors)
        stated = rendezvous.describe("reduce", tensors[0], op.lower(), "to", opts.rootRank)
        return self._join(Part(stated, tensors, tensors), rendezvous.reduce_to(opts.rootRank, op))

    def barrier(self, opts: object = None) -> Work:
        return self._join(Part("barrier"), rendezvous.barrier)

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:
        stated = rendezvous.describe("broadcast", tensors[0], "from", opts.rootRank)
        return self._join(Part(stated, (), tensors), rendezvous.broadcast(opts.rootRank))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object = None) -> Work:
        part = Part(rendezvous.describe("all_gather", inputs[0]), inputs, outputs[0])
        return self._join(part, rendezvous.all_gather)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> Work:
        parts = output.view(-1).chunk(self.size()) if output.numel() else [output] * self.size()
        return self.allgather([parts], [input])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: object = None
    ) -> Work:
        return _last([self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions
    ) -> Work:
        op = rendezvous.op_name(opts.reduceOp)
        _refuse_reduction(outputs)
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs[0])
        stated = f"reduce_scatter {op.lower()} of {inputs[0][0].dtype} {shapes}"
        return self._join(Part(stated, inputs[0], outputs), rendezvous.reduce_scatter(op))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: ReduceScatterOptions) -> Work:
        parts = input.view(-1).chunk(self.size()) if input.numel() else [input] * self.size()
        return self.reduce_scatter([output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Work:
        return _last([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: object = None) -> Work:
        return self._join(Part(f"all_to_all of {inputs[0].dtype}", inputs, outputs), rendezvous.all_to_all)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: object = None,
    ) -> Work:
        return self.alltoall(self._split(output, output_sizes), self._split(input, input_sizes))

    alltoall_base = all_to_all_single

    def _split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(x.split(list(sizes) or [x.shape[0] // self.size()] * self.size()))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions) -> Work:
        part = Part(
            rendezvous.describe("scatter", outputs[0], "from", opts.rootRank), inputs[0] if inputs else (), outputs
        )
        return self._join(part, rendezvous.scatter(opts.rootRank))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: GatherOptions) -> Work:
        part = Part(
            rendezvous.describe("gather", inputs[0], "to", opts.rootRank), inputs, outputs[0] if outputs else ()
        )
        return self._join(part, rendezvous.gather(opts.rootRank))

    def _join(self, part: Part, run: Callable[[Sequence[Part]], None]) -> Work:
        self._refuse_other_devices([*part.given, *part.taken])
        _refuse_sharded(part.stated, [*part.given, *part.taken])
        number, event = self._room.join(self._rank, part, run)

        def what() -> str:
            missing = ", ".join(map(str, self._room.missing(event)))
            members = ", ".join(map(str, self._room.ranks))
            return f"{part.stated}, number {number} of the group of ranks {members}; missing: {missing}"

        return ThreadWork(self, event, what)

    # Messages

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> Work:
        self._refuse_other_devices(tensors)
        _refuse_sharded("send", tensors)
        message = self._room.send(self._rank, target, tag, tensors[0])
        return ThreadWork(self, message, lambda: self._describe_message("to send", tensors[0], target, tag))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        self._refuse_other_devices(tensors)
        _refuse_sharded("recv", tensors)
        message = self._room.receive(source, self._rank, tag, tensors[0])
        return ThreadWork(self, message, lambda: self._describe_message("to receive", tensors[0], source, tag))

    def _describe_message(self, verb: str, x: Tensor, peer: int, tag: int) -> str:
        preposition = "to" if verb == "to send" else "from"
        return f"rank {self._room.ranks[peer]} {rendezvous.describe(verb, x)} {preposition} it (tag {tag})"

    def _refuse_other_devices(self, tensors: Sequence[Tensor]) -> None:
        """Raises if a tensor is on another device. CPU tensors are always allowed: torch sends Python objects in them.

        Ranks of device "cpu" could not run a backward pass on GPUs, since torch runs it in another thread.
        """
        device = self.rooms.device
        other = next((t.device for t in tensors if t.device.type not in ("cpu", device)), None)
        if other is not None:
            raise RendezvousError(
                f"these ranks in one process exchange tensors on devices of type {device!r}, not on {other}. For GPUs "
                "use LocalRanks(n, processes=False, device='cuda'), or ranks that are processes: LocalRanks(n), or "
                "@pytest.mark.ranks(...) without processes=False"
            )


def _last(works: Sequence[Work]) -> Work:
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _refuse_sharded(stated: str, tensors: Sequence[Tensor]) -> None:
    """Raises the error that collectives of other groups raise through the dispatch of their ops."""
    for x in tensors:
        if isinstance(x, ShardTensor):
            raise collective_refusal(stated, x.sharding)


def _refuse_reduction(tensors: Sequence[Tensor]) -> None:
    """Raises gloo's error for dtypes that gloo does not reduce."""
    if any(t.dtype not in _REDUCED for t in tensors):
        raise RuntimeError("Invalid scalar type")


BACKENDS = {"cpu": "one_process", "cuda": "one_process_of_gpus"}
"""The names of the in-process backends in `torch.distributed`, by device type."""


class _OnGpus(Transport):
    """The transport between in-process ranks for tensors on GPUs."""

    name = BACKENDS["cuda"]
    device = "cuda"


class Rooms:
    """The shared state (`Room`) of all process groups of a process.

    Args:
        world_size: the number of ranks.
        device: the type of the tensors' devices.
    """

    def __init__(self, world_size: int, device: str) -> None:
        self._world_size, self.device = world_size, device
        self._rooms: dict[tuple[str, tuple[int, ...]], Room] = {}
        self.scheduler = ThreadScheduler(0)

    def group(self, name: str, ranks: Sequence[int], rank: int) -> ThreadGroup:
        """Makes a group, as one of its members sees it.

        Args:
            name: the name of the group, the same on all members.
            ranks: the global ranks of the members; empty for all ranks.
            rank: the rank in the group.
        """
        members = tuple(ranks) or tuple(range(self._world_size))
        room = self._rooms.setdefault((name, members), Room(name, members))
        return ThreadGroup(room, rank, self)

    def forget(self) -> None:
        """Drops pending collectives and messages."""
        for room in self._rooms.values():
            room.clear()


def create_group(options: Any, _: object) -> ThreadGroup:
    """Makes a group of this backend. `torch.distributed` calls this in a rank's thread."""
    rooms = rank_state.here().rooms
    return rooms.group(options.group_id, options.global_ranks_in_group, options.group_rank)


for _device, _name in BACKENDS.items():
    dist.Backend.register_backend(_name, create_group, extended_api=True, devices=[_device])
