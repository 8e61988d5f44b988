"""Watch the collectives of eager ops on sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile.collectives.descriptor import Descriptor, descriptors
from shardcompile.compat import OpOverload
from shardcompile.tensor import ShardTensor


def _names(wanted: Callable[[Descriptor[Any]], bool]) -> frozenset[str]:
    """The names of the ops of some collectives."""
    return frozenset(op.name() for d in descriptors() if wanted(d) for op in d.overloads)


_SENDING = _names(lambda d: d.communicates)
"""The ops that send something. Other ops of our namespace are kernels for a shard, or compute partitions."""

_EXCHANGES = _names(lambda d: d.communicates and d.moves_rows)
"""The ops that send rows from one rank to others."""


class CollectiveWatch(TorchDispatchMode):
    """Sees every collective on plain tensors, also those inside ops on sharded tensors."""

    supports_higher_order_operators = True  # compiled code has them around ops with effects, such as checks

    def saw(self, name: str, x: object, out: object) -> None:
        """Called after each collective.

        Args:
            name: the name of the op, with its namespace.
            x: the first argument of the op.
            out: the result of the op.
        """
        raise NotImplementedError

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore what torch's compiler runs, but see what compiled code runs."""
        return True

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(t, ShardTensor) for t in types):
            return NotImplemented  # its ops on local shards come back here
        out = op(*args, **(kwargs or {}))
        if op.name() in _SENDING:
            self.saw(op.name(), args[0], out)
        return out


class ServiceWatch(CollectiveWatch):
    """Finds out how an op was served.

    Args:
        whole: the number of elements of the smallest sharded input.

    Attributes:
        nbytes: the bytes of this rank's payloads.
    """

    def __init__(self, whole: int) -> None:
        super().__init__()
        self._whole = whole
        self._names: set[str] = set()
        self._gathers = False
        self.nbytes = 0

    def saw(self, name: str, x: object, out: Any) -> None:
        self._names.add(name)
        self.nbytes += x.nbytes if isinstance(x, Tensor) else 0
        self._gathers |= name.partition("::")[2].startswith("all_gather") and out.numel() >= self._whole

    def how(self) -> str:
        """One of `SERVICES`.

        ``gathered``: every rank got a whole input. ``exchanged``: rows moved between ranks, but no input became whole.
        ``reduced``: ranks sent only terms of reductions. ``local``: ranks sent nothing.
        """
        if self._gathers:
            return "gathered"
        if self._names & _EXCHANGES:
            return "exchanged"
        return "reduced" if self._names else "local"


SERVICES = ("local", "reduced", "exchanged", "gathered")
"""The ways in which an op can be served, see `ServiceWatch.how`."""
