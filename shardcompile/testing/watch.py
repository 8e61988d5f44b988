"""Observes the collectives that run, also those inside ops on sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile.collectives.descriptor import Descriptor, descriptors
from shardcompile.compat import OpOverload
from shardcompile.tensor import ShardTensor


def _names(wanted: Callable[[Descriptor[Any]], bool]) -> frozenset[str]:
    """Returns the names of the ops of the wanted collectives."""
    return frozenset(op.name() for d in descriptors() if wanted(d) for op in d.overloads)


_COMMUNICATES = _names(lambda d: d.communicates)
"""The ops that communicate. Other ops of our namespace are kernels for a local shard, or compute partitions."""

_MOVES_ROWS = _names(lambda d: d.communicates and d.moves_rows)
"""The ops that move rows between ranks."""


class CollectiveWatch(TorchDispatchMode):
    """A dispatch mode that sees every collective on plain tensors, also those inside ops on sharded tensors."""

    supports_higher_order_operators = True  # compiled code wraps ops with effects, such as checks, in them

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
        """Returns True: the mode ignores ops that torch's compiler runs, but sees those of compiled code."""
        return True

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(t, ShardTensor) for t in types):
            return NotImplemented  # its ops on local shards reach this mode again
        out = op(*args, **(kwargs or {}))
        if op.name() in _COMMUNICATES:
            self.saw(op.name(), args[0], out)
        return out


class ServiceWatch(CollectiveWatch):
    """Classifies how an op was served, by the collectives that it runs.

    Args:
        whole: the number of elements of the smallest sharded input. An all-gather of as many counts as a gather of it.

    Attributes:
        nbytes: the bytes of this rank's payloads.
    """

    def __init__(self, whole: int) -> None:
        super().__init__()
        self._full_numel = whole
        self._names: set[str] = set()
        self._gathers = False
        self.nbytes = 0

    def saw(self, name: str, x: object, out: Any) -> None:
        self._names.add(name)
        self.nbytes += x.nbytes if isinstance(x, Tensor) else 0
        self._gathers |= name.partition("::")[2].startswith("all_gather") and out.numel() >= self._full_numel

    def how(self) -> str:
        """Returns one of `SERVICES`.

        ``gathered``: an input was replicated. ``exchanged``: rows moved between ranks, but no input was replicated.
        ``reduced``: ranks communicated only for reductions. ``local``: ranks did not communicate.
        """
        if self._gathers:
            return "gathered"
        if self._names & _MOVES_ROWS:
            return "exchanged"
        return "reduced" if self._names else "local"


SERVICES = ("local", "reduced", "exchanged", "gathered")
"""The classes of communication of an op, see `ServiceWatch.how`."""
