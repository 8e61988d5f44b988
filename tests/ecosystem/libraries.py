"""Packages beside PyTorch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import NOT_IN_TORCH, Case, Setting, net, values
from tests.ecosystem.distributed import SENT


def _contracted(here: Setting) -> Any:
    import opt_einsum

    x, a, b = here.partition(values(7, 4)), values(4, 5, seed=1), here.partition(values(7, 5, seed=2))
    # The search for a path cannot be traced, with plain tensors either.
    contract = here.compile(lambda *given: opt_einsum.contract("nc,cd,nd->nd", *given), fullgraph=False)
    return contract(x, a, b), contract(x, a.requires_grad_(), b)


def _contracted_plain_first(here: Setting) -> Any:
    import opt_einsum

    x, a = here.partition(values(7, 4)), values(4, 5, seed=1)
    return here.compile(lambda x, a: opt_einsum.contract("cd,nc->nd", a, x), fullgraph=False)(x, a)


def _contracted_all(here: Setting) -> Any:
    import opt_einsum

    x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
    expression = opt_einsum.contract_expression("nc,nc,cd,ne->de", (7, 4), (7, 4), (4, 5), (7, 4))

    def run(x: Any, y: Any, w: Any) -> Any:
        return expression(x, y, w, x), opt_einsum.contract("nc,nc->", x, y), opt_einsum.contract("nc->cn", x)

    return here.compile(run, fullgraph=False)(x, y, values(4, 5, seed=2))


def _rearranged(here: Setting) -> Any:
    from einops import einsum, pack, rearrange, reduce, repeat, unpack

    x = here.partition(values(6, 7, 4), dim=1).requires_grad_()

    def run(x: Any) -> Any:
        swapped = rearrange(x, "b n (h c) -> b h n c", h=2)
        pooled = reduce(swapped, "b h n c -> b c", "mean")
        copies = repeat(x, "b n c -> b n (c k)", k=2)
        product = einsum(x, x, "b n c, b n d -> b c d")
        packed, shapes = pack([x, copies], "b n *")
        parts = unpack(packed, shapes, "b n *")
        return swapped, pooled, copies, product, packed, parts[1], rearrange(x, "b n c -> n b c")

    out = here.compile(run)(x)
    sum(o.sin().sum() for o in out).backward()
    return list(out), x.grad


def _einops_layers(here: Setting) -> Any:
    from einops.layers.torch import Rearrange, Reduce

    model = nn.Sequential(Rearrange("n (h c) -> n h c", h=2), Reduce("n h c -> n c", "max"))
    return here.compile(model)(here.partition(values(7, 4)))


def _board(here: Setting) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    loss = here.compile(net())(here.partition(values(7, 4))).square().mean()
    x = here.partition(values(7, 4))
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_scalar("loss", loss, 1)
        writer.add_histogram("x", x.full_tensor() if here.sharded else x, 1)
    return loss


def _accelerator() -> Any:
    import os

    from accelerate import Accelerator

    # What torchrun sets.
    rank, world = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"})
    return Accelerator(cpu=True)


def _accelerated(here: Setting) -> Any:
    accelerator = _accelerator() if here.sharded else None
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
    losses = []
    # DDP's hooks are in no graph: with breaks around them.
    loss_of = here.compile(lambda x, y: (model(x) - y).square().mean(), fullgraph=False)
    for _ in range(3):
        loss = loss_of(x, y)
        accelerator.backward(loss) if accelerator is not None else loss.backward()
        if accelerator is not None:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def _accelerate_gathers(here: Setting) -> Any:
    loss = here.compile(net())(here.partition(values(7, 4))).square().mean().detach()
    if not here.sharded:
        return loss
    return _accelerator().gather(loss)


def _lit(here: Setting) -> Any:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = here.compile(net()), []

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = (self.net(here.partition(x)) - here.partition(y)).square().mean()
            self.log("loss", loss, prog_bar=True)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(values(14, 4), values(14, 4, seed=1))
    model = Lit()
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=True,
        enable_model_summary=False,
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        strategy=SingleDeviceStrategy("cpu"),
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=7))
    return model.losses, list(model.parameters()), float(trainer.callback_metrics["loss"])


SECTION = "Packages"
CASES = [
    Case(
        SECTION,
        "`opt_einsum.contract`; compiled: with graph breaks, which its search for a path needs",
        _contracted,
        needs="opt_einsum",
    ),
    Case(
        SECTION,
        "`opt_einsum.contract`, a plain tensor first; compiled: with graph breaks",
        _contracted_plain_first,
        needs="opt_einsum",
    ),
    Case(
        SECTION,
        "`opt_einsum.contract_expression`, sums over the sharded dim",
        _contracted_all,
        compiled=NOT_IN_TORCH,
        needs="opt_einsum",
    ),
    Case(
        SECTION,
        "`einops`: `rearrange`, `reduce`, `repeat`, `einsum`, `pack`, `unpack`",
        _rearranged,
        needs="einops",
    ),
    Case(SECTION, "`einops.layers.torch`", _einops_layers, needs="einops"),
    Case(SECTION, "TensorBoard: `add_scalar(loss)`, `add_histogram(x.full_tensor())`", _board, needs="tensorboard"),
    Case(
        SECTION,
        "Accelerate: `prepare`, `backward`, `clip_grad_norm_`",
        _accelerated,
        needs="accelerate",
        processes=True,
    ),
    Case(SECTION, "Accelerate: `gather(loss)`", _accelerate_gathers, SENT, SENT, needs="accelerate", processes=True),
    Case(SECTION, "Lightning: `Trainer.fit`, `self.log(loss, prog_bar=True)`", _lit, needs="lightning", processes=True),
]
