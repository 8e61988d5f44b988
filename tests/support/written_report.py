"""A report that is written down rather than captured: for what shows reports, which needs no graphs."""

from __future__ import annotations

from shardcompile.inspect import Compilation, GraphReport, IssuedCollective, PassStep, Report, Span, TracedCollective

HOSTILE = (
    "</script><script>document.title = 'taken over'</script><!-- <img src=x onerror=alert(1)> & \"'${title} \u2028"
)
"""What a source line or a name may hold."""

US = 1e-6


def _traced(
    name: str, kind: str, nbytes: int, fate: str, *, source: str = "", gathered_for: str = ""
) -> TracedCollective:
    return TracedCollective(
        name=name,
        kind=kind,
        ranks=(0, 1, 2, 3),
        mesh_dim="rows",
        dtypes=("float32",),
        global_bytes=nbytes,
        least_bytes=0,
        most_bytes=nbytes // 2,
        redistribution="S(0)[3,5] -> R",
        op="aten.mm.default",
        gathered_for=gathered_for,
        source=source or f'File "/home/me/model.py", line {len(name)}, in forward return x @ w',
        module="net.layers.0",
        fate=fate,
    )


def _issued(
    c: TracedCollective, start: float, end: float, exposed: float, members: tuple[int, ...]
) -> IssuedCollective:
    return IssuedCollective(
        c.name,
        c.kind,
        c.ranks,
        c.dtypes,
        c.global_bytes,
        0,
        c.most_bytes,
        members,
        start,
        end,
        exposed,
        (0.0, 2 * US),
        ("mm", "attention", "mm"),
    )


def backward() -> GraphReport:
    """Two gathers in a bucket and a reduction on one group, a shuffle that nobody waits for on another.

    compute  mm[0 5] mul[5 9] ..wait for the bucket.. add[20 30] ..wait for the sum.. sub[40 50]
    group 0  bucket[5 20] sum[25 40]
    group 7  shuffle[30 55]
    """
    traced = (
        _traced("gather_a", "all_gather_v", 4096, "in all_gather_bucket 0 of 2", source=HOSTILE),
        _traced("gather_b", "all_gather_v", 1024, "in all_gather_bucket 0 of 2"),
        _traced("sum", "all_reduce", 70000, ""),
        _traced("shuffle", "all_to_all_v", 512, "", gathered_for="aten.unique.default"),
        _traced("again", "all_reduce", 70000, "dropped by share_equal_collectives"),
    )
    bucket = _traced("bucket", "all_gather_bucket", 5120, "")
    times = ((bucket, 5, 20, 11, (0, 1)), (traced[2], 25, 40, 10, (2,)), (traced[3], 30, 55, 0, (3,)))
    issued = tuple(_issued(c, a * US, b * US, x * US, m) for c, a, b, x, m in times)
    work = (("mm", 0, 5), ("mul", 5, 9), ("add", 20, 30), ("sub", 40, 50))
    spans = [Span(name, "compute", a * US, b * US) for name, a, b in work]
    spans += [Span(c.name, "7" if c.name == "shuffle" else "0", c.start, c.end) for c in issued]
    before = [
        "class GraphModule(torch.nn.Module):",
        f"    # File: /home/me/model.py:7 in forward, code: {HOSTILE.splitlines()[0]}",
        '    mm: "f32[s0, 4][4, 1]" = torch.ops.aten.mm.default(x, w);  x = None',
        '    mul: "f32[s0, 4][4, 1]" = torch.ops.aten.mul.Tensor(mm, 2);  mm = None',
        '    add: "f32[s0, 4][4, 1]" = torch.ops.aten.add.Tensor(mul, 1);  mul = None',
        *(f"    n{i} = torch.ops.aten.neg.default(n{i - 1})" for i in range(40)),
    ]
    after = [*before[:3], before[3].replace("2)", "3)"), *before[5:], before[4]]
    return GraphReport(
        side="backward",
        nodes=57,
        stages={"aot": "\n".join(before), "schedule_overlap": "\n".join(after), "code": "import torch\n"},
        steps=(
            PassStep("share_equal_collectives", (61, 60), (5, 4), True),
            PassStep("bucket_all_gathers", (60, 57), (4, 3), True),
            PassStep("lower_even_gathers", (57, 57), (3, 3), False),
        ),
        traced=traced,
        issued=issued,
        spans=tuple(sorted(spans, key=lambda s: s.start)),
        total=55 * US,
        compute=29 * US,
        exposed=26 * US,
        bound=50 * US,
        peak_bytes=3 << 20,
    )


def forward() -> GraphReport:
    """Compute alone, and no text."""
    spans = (Span("mm", "compute", 0.0, 3 * US), Span("relu", "compute", 3 * US, 4 * US))
    return GraphReport("forward", 2, {}, (), (), (), spans, 4 * US, 4 * US, 0.0, 4 * US, 100)


def report() -> Report:
    """Two compilations, one of which came out of a cache, with hostile texts wherever there is a text of the user."""
    step = Compilation("step", "/home/me/train.py:3", "0/0", {"dynamo": HOSTILE}, [forward(), backward()])
    return Report(
        rank=1,
        world_size=4,
        device="cpu",
        torch="2.13.0",
        predicted_for="one CPU core",
        compilations=[step, Compilation(HOSTILE, "/home/me/train.py:9", "1/0")],
        recompiles=[f"step: {HOSTILE}"],
        graph_breaks=[HOSTILE],
        caches={"fxgraph hits": 1},
        notes=[HOSTILE],
        error=HOSTILE,
    )
