"""B: a rank waits for another that does not come."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from tests.findings.line import line, numbers, partition, same, scenes


@line("B1", "slices that start before row 0, of 3 rows [2, 1], of 2 and of 1; forward and backward")
def _(mesh: DeviceMesh) -> None:
    for rows, sizes in ((3, [2, 1]), (2, [0, 2]), (1, [1, 0])):
        for part in (slice(-5, None), slice(-3, -1), slice(None, -9), slice(-9, 9), slice(2, -9)):
            full = numbers(rows, 2).requires_grad_()
            x = partition(full.detach(), mesh, sizes).requires_grad_()
            same(x[part], full[part])
            (x[part] ** 2).sum().backward()
            (full[part] ** 2).sum().backward()
            same(x.grad, full.grad)


scenes("B2", item_on_one_rank="`if rank == 0: loss.item()`", format_on_one_rank_at_the_end="`if rank == 0: f'{loss}'`")


@line("B2", "Lightning's `self.log('loss', loss, prog_bar=True)`", needs="lightning", processes=True)
def _(mesh: DeviceMesh) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = nn.Linear(4, 1).double(), []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(partition(batch[0], mesh, [5, 2])).square().mean()
            self.log("loss", loss, prog_bar=True)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    model = Lit()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(numbers(14, 4)), batch_size=7)
    options: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=1, strategy=SingleDeviceStrategy("cpu"), **options)
    trainer.fit(model, loader)
    same(torch.tensor(float(trainer.callback_metrics["loss"])), model.losses[-1].full_tensor().float())


@line("B3", "`fully_shard` over parameters sharded", "Sharded parameters get complete gradients without a wrapper")
def _(mesh: DeviceMesh) -> None:
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(partition(numbers(4, 3), mesh, [3, 1]))
    fully_shard(model, mesh=mesh)


scenes(
    "B4",
    raises_while_tracing="a rank that raises inside Dynamo",
    raises_while_tracing_verified="a rank that raises inside Dynamo, with SHARDCOMPILE_VERIFY=1",
    killed_while_compiling="a rank that is killed while it compiles",
)


@line("B4", "a shard of one row that enters by `from_local` inside a compiled function", processes=True)
def _(mesh: DeviceMesh) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def total(shard: Any) -> Any:
        return sc.ShardTensor.from_local(shard, mesh, [Shard(0)]).softmax(0).square().sum().full_tensor()

    for sizes in ([4, 3], [5, 1], [1, 6], [0, 3], [2, 0], [1, 1], [7, 4]):
        full = numbers(sum(sizes), 3)
        same(total(full.split(sizes)[mesh.get_local_rank()].clone()), full.softmax(0).square().sum())
    graphs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(graphs, counter.frame_count)
    assert len(set(graphs)) == 1, f"ranks have compiled {graphs} graphs"


for _op in ("x[tensor([9])]", "index_select(0, tensor([-1]))", "embedding", "scatter_add"):

    @line("B5", f"an index out of range: {_op}", "out of (range|bounds)|rank [01] has come to its end")
    def _(mesh: DeviceMesh, op: str = _op) -> None:
        x = partition(numbers(3, 2), mesh, [2, 1])
        if op.startswith("x["):
            x[torch.tensor([9])].full_tensor()
        elif op.startswith("index"):
            x.index_select(0, torch.tensor([-1])).full_tensor()
        elif op == "embedding":
            torch.nn.functional.embedding(torch.tensor([1, 7]), x).full_tensor()
        else:
            torch.zeros(3, dtype=x.dtype).scatter_add(
                0, partition(torch.tensor([0, 9, 1]), mesh, [2, 1]), x[:, 0]
            ).sum()


scenes("B5", index_out_of_range="an index out of range on one rank")
scenes(
    "B6",
    other_layout="another layout on one rank",
    other_dtype="another dtype on one rank, gathered",
    other_dtype_of_a_sum="another dtype on one rank, summed",
    other_branch="another branch on one rank",
    skipped_call="a call that one rank skips",
    other_branch_compiled="another branch on one rank, compiled",
    another_call_beside_a_compiled_sum="another call beside a compiled sum",
)
scenes(
    "B6",
    "docs/divergence.md",
    other_shape_of_a_compiled_sum="all-reduces of other sizes inside of compiled graphs",
)
