"""Sees the collectives that eager ops on sharded tensors lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile.collectives.descriptor import Descriptor, descriptors
from shardcompile.compat import OpOverload
from shardcompile.tensor import ShardTensor


def _names(wanted: Callable[[Descriptor[Any]], bool]) -> frozenset[str]:
    """Names of the ops of some collectives."""
    return frozenset(op.name() for d in descriptors() if wanted(d) for op in d.overloads)


_SENDING = _names(lambda d: d.communicates)
"""Ops that send something: others of our namespace are kernels for a block, or work out cuts."""

_EXCHANGES = _names(lambda d: d.communicates and d.moves_rows)
"""Ops that send rows from one rank to others."""


class CollectiveWatch(TorchDispatchMode):
    """Sees every collective on plain tensors, those inside of ops on sharded ones included."""

    def saw(self, name: str, x: object, out: object) -> None:
        """Called after each.

        Args:
            name: of the op, with its namespace.
            x: its first argument.
            out: its result.
        """
        raise NotImplementedError

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stand aside while torch compiles, but see what compiled code runs."""
        return True

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(t, ShardTensor) for t in types):
            return NotImplemented  # its ops on blocks come back here
        out = op(*args, **(kwargs or {}))
        if op.name() in _SENDING:
            self.saw(op.name(), args[0], out)
        return out


class ServiceWatch(CollectiveWatch):
    """Sees how an op was served.

    Args:
        whole: elements of the smallest input that is cut.

    Attributes:
        nbytes: what this rank has put into collectives.
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

        ``gathered``: some input is whole on every rank; ``exchanged``: rows went from one rank to others, but no input
        became whole; ``reduced``: only sums and the like were sent; ``local``: nothing was.
        """
        if self._gathers:
            return "gathered"
        if self._names & _EXCHANGES:
            return "exchanged"
        return "reduced" if self._names else "local"


SERVICES = ("local", "reduced", "exchanged", "gathered")
"""How an op can be served, by what it sends."""
