"""Sees the collectives that eager ops on sharded tensors lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardcompile.tensor import ShardTensor

_SILENT = {
    *("_c10d_functional::wait_tensor", "shardcompile::take_block", "shardcompile::place_block"),
    "shardcompile::fourier",
}
"""Ops that send nothing."""


class CollectiveWatch(TorchDispatchMode):
    """Sees every collective on plain tensors, those inside of ops on sharded ones included."""

    def saw(self, name: str, x: Any, out: Any) -> None:
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
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, ShardTensor) for t in types):
            return NotImplemented  # its ops on blocks come back here
        out = op(*args, **(kwargs or {}))
        if op.namespace in ("_c10d_functional", "shardcompile") and op.name() not in _SILENT:
            self.saw(op.name(), args[0], out)
        return out


class ServiceWatch(CollectiveWatch):
    """Sees how an op was served.

    Args:
        whole: elements of the smallest input that is cut.

    Attributes:
        nbytes: what this rank has put into collectives.
    """

    _EXCHANGES = (
        *("all_gather", "all_to_all", "fetch_ranges", "return_ranges"),
        *("mirror_blocks", "fetch_block", "return_block", "fetch_spans", "return_spans"),
    )

    def __init__(self, whole: int) -> None:
        super().__init__()
        self._whole = whole
        self._kinds: set[str] = set()
        self._gathers = False
        self.nbytes = 0

    def saw(self, name: str, x: Any, out: Any) -> None:
        kind = name.partition("::")[2]
        self._kinds.add(kind)
        self.nbytes += x.nbytes if isinstance(x, Tensor) else 0
        self._gathers |= kind.startswith("all_gather") and out.numel() >= self._whole

    def how(self) -> str:
        """One of `SERVICES`.

        ``gathered``: some input is whole on every rank; ``exchanged``: rows went from one rank to others, but no input
        became whole; ``reduced``: only sums and the like were sent; ``local``: nothing was.
        """
        if self._gathers:
            return "gathered"
        if any(k.startswith(self._EXCHANGES) for k in self._kinds):
            return "exchanged"
        return "reduced" if self._kinds else "local"


SERVICES = ("local", "reduced", "exchanged", "gathered")
"""How an op can be served, by what it sends."""
