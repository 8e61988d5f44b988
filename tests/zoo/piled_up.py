"""The largest shards of results inside a model, and the models that concentrate rows because their code asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardcompile import ShardTensor
from shardcompile.testing.trial import largest_share

MAX_GROWTH = 1.5
"""How much larger, against an even division, the largest shard of a result may be than those of the inputs."""

_LOW_MODES = "it slices the low modes of a sharded spectrum, and a slice leaves rows where they are"

ASKED_FOR = {
    "hf-mixtral-sharded-experts": "the router decides how many tokens the experts of a rank get",
    "pn-fno": _LOW_MODES,
    "pn-pix2pix": "it slices the margins of a sharded image, and a slice leaves rows where they are",
    "no-fno": _LOW_MODES,
    "no-tfno": _LOW_MODES,
    "no-uno": _LOW_MODES,
}
"""By name of the model, the reason."""


class LargestShards(TorchDispatchMode):
    """Records each op that has a result sharded more unevenly than permitted, with the layout of such a result."""

    def __init__(self, inputs: Sequence[object]) -> None:
        super().__init__()
        self.allowed = MAX_GROWTH * max(map(largest_share, inputs), default=1.0)
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Runs the op."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, ShardTensor) and largest_share(x) > self.allowed:
                self.found[str(func)] = x.sharding.describe()
        return out
