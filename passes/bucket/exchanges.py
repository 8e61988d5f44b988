"""Merges exchanges of rows that follow the same route, with the same table of counts, into one exchange.

A hierarchical route first sends the positions of the copies, then the rows, and for `Route.combine` the weights;
several layers of a fixed graph dispatch rows over one route. In the program each of these is an exchange of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import cast

from torch.fx import Graph, Node

from shardcompile.collectives.routes import EXCHANGE_ROWS
from shardcompile.collectives.traffic import Load, Traffic, exchanged_in_a_bucket
from shardcompile.passes.bucket.buckets import Bucketing
from shardcompile.passes.graph.collective import Collective, add_call, inherit


class BucketExchanges(Bucketing):
    """Sends the rows of many tensors over one route in one exchange.

        exchange_rows([a], counts); exchange_rows([b, c], counts)   ->   exchange_rows([a, b, c], counts)

    Legal because an exchange moves rows and computes nothing. Members have one group, one direction and one table of
    counts, and so the same number of rows. Dtypes and widths may differ.
    """

    name = "bucket_exchanges"
    bucket = EXCHANGE_ROWS.kind
    divides = False

    def _may_join(self, c: Collective) -> bool:
        return all(u.target is operator.getitem for u in c.node.users)

    def _key(self, c: Collective) -> Hashable:
        return c.arguments.counts, c.arguments.back, c.payloads[0].meta["val"].device

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return exchanged_in_a_bucket(load)

    def _replace_one(self, graph: Graph, members: Sequence[Collective], position: Mapping[Node, float]) -> None:
        last = members[-1]
        inputs = [payload for m in members for payload in m.payloads]
        with graph.inserting_before(last.node):
            start = add_call(graph, EXCHANGE_ROWS, **last.arguments._replace(inputs=inputs)._asdict())
        inherit(start, members)
        offset = 0
        for m in members:
            for part in list(m.node.users):
                part.args = (start, offset + cast(int, part.args[1]))
            offset += len(m.payloads)
            graph.erase_node(m.node)
