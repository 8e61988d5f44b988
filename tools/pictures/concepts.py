"""Draws the pictures of docs/concepts.md: ``python -m tools.pictures.concepts``."""

from __future__ import annotations

from collections.abc import Sequence

from tools.pictures.svg import Panel, write

SIZES = [5, 0, 2]


def _rows(panel: Panel, x: float, y: float, ranks: Sequence[int], columns: int = 2, cell: float = 16) -> None:
    """A tensor, whose rows have the colours of ranks."""
    for i, rank in enumerate(ranks):
        for j in range(columns):
            panel.rect(x + j * cell, y + i * cell, cell - 1.5, cell - 1.5, f"rank{rank}")


def tensor() -> Panel:
    """Seven rows on three ranks."""
    panel = Panel(196)
    panel.text(40, 12, "one tensor, shape (7, 2)", anchor="start")
    panel.text(196, 12, "local shards")
    owners = [rank for rank, size in enumerate(SIZES) for _ in range(size)]
    _rows(panel, 64, 36, owners)
    for row in range(7):
        panel.text(56, 43 + 16 * row, str(row), "quiet", anchor="end")
    tops = [30, 120, 152]
    for rank, (size, top) in enumerate(zip(SIZES, tops, strict=True)):
        middle = top + 8 * max(size, 1)
        panel.text(250, middle - 8, f"rank {rank}")
        panel.text(250, middle + 7, f"{size} rows" if size else "no rows", "quiet")
        if size:
            _rows(panel, 206, top, [rank] * size)
        else:
            panel.rect(206, top, 30.5, 14.5, "none", "line", "3 3")
    panel.arrow([(102, 75), (200, 75)])
    panel.arrow([(102, 131), (150, 131), (150, 168), (200, 168)])
    return panel


def placements() -> Panel:
    """The same tensor, sharded, replicated, and as a pending sum."""
    panel = Panel(168)
    owners = [rank for rank, size in enumerate(SIZES) for _ in range(size)]
    panel.text(38, 12, "S(0)[5,0,2]", code=True, anchor="middle")
    _rows(panel, 24, 28, owners, cell=14)
    panel.text(38, 146, "each row", "quiet", anchor="middle")
    panel.text(38, 160, "on one rank", "quiet", anchor="middle")
    for x, name, captions in ((98, "R", ("equal on", "every rank")), (226, "P(sum)", ("terms, not yet", "added up"))):
        panel.text(x + 58, 12, name, code=True, anchor="middle")
        for rank in range(3):
            _rows(panel, x + 44 * rank, 28, [rank] * 7, cell=14)
            if rank and name != "R":
                panel.text(x + 44 * rank - 8, 76, "+", anchor="middle")
        for i, caption in enumerate(captions):
            panel.text(x + 58, 146 + 14 * i, caption, "quiet", anchor="middle")
    return panel


def partitions() -> Panel:
    """The three kinds of partitions, by what a graph knows of them."""
    panel = Panel(206)
    kinds = (
        ("chunk", "torch.chunk's sizes", "7 rows on 3 ranks: always 3, 3, 1", [3, 3, 1]),
        ("fixed", "sizes are constants of the graph", "other sizes: another graph", [5, 0, 2]),
        ("dynamic", "sizes are data of the graph", "other sizes: the same graph", [5, 0, 2]),
    )
    for i, (name, what, then, sizes) in enumerate(kinds):
        y = 8 + 68 * i
        x = 0.0
        for rank, size in enumerate(sizes):
            panel.rect(x, y, max(size * 13, 1.5) - 1.5, 30, f"rank{rank}")
            if size:
                label = f"s{rank}" if name == "dynamic" else str(size)
                panel.text(x + size * 6.5, y + 15, label, code=True, anchor="middle")
            x += size * 13
        panel.text(106, y, name, code=True)
        panel.text(106, y + 16, what)
        panel.text(106, y + 32, then, "quiet")
    return panel


def _mesh(panel: Panel, x: float, title: str, layout: str) -> None:
    panel.text(x, 10, title)
    panel.text(x, 28, layout, code=True)


def mesh() -> Panel:
    """Ranks 0 to 3 as a mesh of 2 x 2."""
    panel = Panel(190)
    panel.text(0, 10, "a mesh of 2 x 2 ranks")
    panel.text(200, 40, "mesh dim 1", "quiet", anchor="middle")
    panel.arrow([(240, 40), (316, 40)])
    panel.text(0, 82, "mesh dim 0", "quiet")
    panel.arrow([(34, 96), (34, 176)])
    for rank in range(4):
        row, column = divmod(rank, 2)
        x, y = 84 + 128 * column, 58 + 62 * row
        panel.box(x, y, 118, 52, [f"rank {rank}", f"coordinate ({row}, {column})"], f"rank{rank}")
    return panel


def on_mesh() -> Panel:
    """A tensor of 6 x 4 on it, in two layouts."""
    panel = Panel(190)
    cell = 18
    for x, layout, owner in (
        (20, "[S(0)[4,2], S(1)[1,3]]", lambda r, c: [2 * (r >= 4) + (c >= 1)]),
        (192, "[S(0)[4,2], R]", lambda r, c: [2 * (r >= 4), 2 * (r >= 4) + 1]),
    ):
        panel.text(x - 20 if x < 100 else x - 10, 10, layout, code=True)
        for r in range(6):
            for c in range(4):
                ranks = owner(r, c)
                for k, rank in enumerate(ranks):
                    w = (cell - 1.5) / len(ranks)
                    panel.rect(x + 10 + c * cell + k * w, 30 + r * cell, w, cell - 1.5, f"rank{rank}")
    panel.text(0, 156, "both mesh dims shard:", "quiet")
    panel.text(0, 171, "each element on one rank", "quiet")
    panel.text(182, 156, "mesh dim 1 replicates:", "quiet")
    panel.text(182, 171, "each element on two ranks", "quiet")
    return panel


def served() -> Panel:
    """The way of an op."""
    panel = Panel(346)
    x, w = 0, 196
    panel.box(x, 4, w, 34, ["an op on sharded tensors"])
    panel.arrow([(98, 38), (98, 60)])
    panel.box(x, 60, w, 52, ["rule", "which dims may be sharded?"], "rank0")
    panel.arrow([(98, 112), (98, 142)])
    panel.text(106, 126, "cheapest strategy", "quiet")
    panel.box(x, 142, w, 52, ["redistribute inputs", "only those that have to move"], "comm")
    panel.arrow([(98, 194), (98, 216)])
    panel.box(x, 216, w, 52, ["local kernel", "the op, on each local shard"], "compute")
    panel.arrow([(98, 268), (98, 290)])
    panel.box(x, 290, w, 52, ["wrap", "a ShardTensor with its layout"])
    panel.box(228, 142, 116, 66, ["sharded", "decomposition", "other ops"], "rank2")
    panel.arrow([(196, 76), (286, 76), (286, 142)])
    panel.text(200, 66, "would gather", "quiet", size=11)
    panel.line([(326, 142), (326, 21)], dash="4 3")
    panel.arrow([(326, 21), (196, 21)])
    panel.text(264, 10, "each op: from the top", "quiet", anchor="middle", size=11)
    panel.box(228, 232, 116, 66, ["fallback", "gather, compute", "in full, log"], "wait")
    panel.arrow([(286, 208), (286, 232)])
    panel.line([(286, 298), (286, 316)])
    panel.arrow([(286, 316), (196, 316)])
    return panel


def compiled() -> Panel:
    """From a function to the code that runs."""
    panel = Panel(330)
    stages = (
        ("Dynamo", "the function, on one tensor", "nothing is sharded yet", "soft"),
        ("AOTAutograd", "each op on ShardTensors, by its rule:", "local ops and collectives", "rank0"),
        ("passes", "fewer collectives, which overlap", "the same on every rank", "rank2"),
        ("Inductor", "kernels of local shards", "torch's own code generation", "compute"),
    )
    for i, (name, what, then, fill) in enumerate(stages):
        y = 4 + 84 * i
        panel.box(0, y, 96, 56, [name], fill)
        panel.text(108, y + 20, what)
        panel.text(108, y + 37, then, "quiet")
        if i < len(stages) - 1:
            panel.arrow([(48, y + 56), (48, y + 84)])
    return panel


def panels() -> dict[str, Panel]:
    """All pictures by the names of their files."""
    return {
        "concept-tensor": tensor(),
        "concept-placements": placements(),
        "concept-partitions": partitions(),
        "concept-mesh": mesh(),
        "concept-layouts": on_mesh(),
        "concept-op": served(),
        "concept-compiled": compiled(),
    }


if __name__ == "__main__":
    write(panels())
