"""Higher-order ops on sharded tensors: nested regions (`invoke_subgraph`) run inline, control flow is refused."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils._pytree import tree_leaves

from shardcompile.compat.higher_order import control_flow_ops, run_regions_in_line
from shardcompile.errors import UnsupportedOpError, refusal
from shardcompile.sharded import Sharded


def control_flow_refusal(name: str, x: Sharded) -> UnsupportedOpError:
    """Returns the error for control flow on a sharded tensor."""
    workaround = {
        "cond": "torch.where computes both branches; a Python `if` on a plain value that is the same on every rank is "
        "compiled as one of them",
        "while_loop": "A Python loop over a number of steps is unrolled",
        "scan": "A Python loop along a dim that is not sharded is unrolled; cumsum and the other cumulative ops work "
        "along any dim, torch._higher_order_ops.associative_scan along dims that are not sharded",
        "map_impl": "torch.vmap, or a Python loop along a dim that is not sharded, does the same",
    }
    return refusal(
        name.removesuffix("_impl"),
        x._spec.layout.describe(),
        "torch traces its function on tensors that have no layout",
        f"{workaround[name]}; or run it on local shards with shardcompile.local_map",
    )


def teach_higher_order_ops(sharded: type[Sharded]) -> dict[object, Callable[..., object]]:
    """Makes Dynamo and AOTAutograd run regions inline, and returns handlers that refuse control flow.

    Args:
        sharded: the class of sharded tensors.

    Returns:
        Handlers for `__torch_function__`, by op.
    """
    run_regions_in_line(sharded)

    def refuse(op: Callable[..., object], *args: object, **kwargs: object) -> object:
        x = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, sharded))
        raise control_flow_refusal(op.__name__, x)

    return dict.fromkeys(control_flow_ops(), refuse)
