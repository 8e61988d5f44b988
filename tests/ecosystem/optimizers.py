"""All of torch.optim, on plain parameters and on parameters in uneven shards, against a single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from tests.ecosystem.case import NOTHING, Case, Setting, net, values

FORMS = ("default", "foreach", "fused")
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, FORMS),
    "Adam": (optim.Adam, {"lr": 0.1, "amsgrad": True}, FORMS),
    "AdamW": (optim.AdamW, {"lr": 0.1}, FORMS),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}, FORMS),
    "Adadelta": (optim.Adadelta, {}, FORMS[:2]),
    "Adamax": (optim.Adamax, {"lr": 0.1}, FORMS[:2]),
    "NAdam": (optim.NAdam, {"lr": 0.1}, FORMS[:2]),
    "RAdam": (optim.RAdam, {"lr": 0.1}, FORMS[:2]),
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}, FORMS[:2]),
    "Rprop": (optim.Rprop, {"lr": 0.1}, FORMS[:2]),
    "ASGD": (optim.ASGD, {"lr": 0.1}, FORMS[:2]),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}, FORMS[:2]),
    "Muon": (optim.Muon, {"lr": 0.01}, FORMS[:1]),
    "LBFGS": (optim.LBFGS, {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}, FORMS[:1]),
}


def _matrices(module: nn.Module, matrices_only: bool) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2 or not matrices_only]


def _trained(name: str, form: str, sharded: bool) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        make, settings, _ = OPTIMIZERS[name]
        model = net()
        if sharded:
            here.shard_parameters(model)
        x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
        chosen = {} if form == "default" else {form: True}
        optimizer = make(_matrices(model, name == "Muon"), **settings, **chosen)
        loss_of = here.compile(lambda x, y: (model(x) - y).square().mean())

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, list(model.parameters())

    return run


def _compiled_step(name: str) -> Callable[[Setting], Any]:
    """The optimizer's step in a graph, which computes some factors in other dtypes than an eager one: so in both runs."""

    def run(here: Setting) -> Any:
        make, settings, _ = OPTIMIZERS[name]
        model = here.shard_parameters(net())
        x, y = here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))
        parameters = _matrices(model, name == "Muon")
        optimizer = make(parameters, **settings)
        here.compilations += 1
        step = torch.compile(optimizer.step, backend="aot_eager")

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if name == "LBFGS":
                step(closure)
            else:
                closure()
                step()
        return parameters

    return run


def _sparse(sharded: bool) -> Callable[[Setting], Any]:
    def run(here: Setting) -> Any:
        table = nn.Embedding(9, 3, sparse=True).double()
        with torch.no_grad():
            table.weight.copy_(values(9, 3))
        if sharded:
            here.shard_parameters(table)
        optimizer = optim.SparseAdam(table.parameters(), lr=0.1)
        ids = here.partition(torch.tensor([1, 1, 4, 8, 0, 3, 4]))
        loss_of = here.compile(lambda ids: table(ids).square().sum())
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(ids).backward()
            optimizer.step()
        return list(table.parameters())

    return run


CASES = [
    Case(
        f"Optimizers, {kind}, three steps",
        f"`{name}`" + ("" if form == "default" else f", `{form}=True`"),
        _trained(name, form, sharded),
        rtol=5e-2 if name == "Muon" else 1e-8,  # Muon's orthogonalisation computes in bfloat16
    )
    for kind, sharded in (("plain parameters", False), ("parameters in uneven shards", True))
    for name, (_, _, forms) in OPTIMIZERS.items()
    for form in forms
]
CASES += [
    Case(
        "`torch.compile(optimizer.step)`, parameters in uneven shards, three steps",
        f"`{name}`",
        _compiled_step(name),
        eager=NOTHING,
        rtol=5e-2 if name == "Muon" else 1e-8,
    )
    for name in OPTIMIZERS
]
NO_SPARSE = (
    "a sparse tensor has no shards. Of the gradient of an embedding: leave out sparse=True and take an optimizer for "
    "dense gradients; otherwise take full_tensor() of the inputs"
)
CASES += [
    Case(
        f"Optimizers, {kind}, three steps",
        "`SparseAdam`, `Embedding(sparse=True)`",
        _sparse(sharded),
        eager=NO_SPARSE,
        compiled=NO_SPARSE,
    )
    for kind, sharded in (("plain parameters", False), ("parameters in uneven shards", True))
]
