"""What training loops have around a step."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.ecosystem.case import RIGHT, Case, Setting, gradients, net, values


def _data(here: Setting) -> tuple[Any, Any]:
    return here.partition(values(7, 4)), here.partition(values(7, 4, seed=1))


def _mse(model: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: (model(x) - y).square().mean()


def _both(run: Callable[[Setting, nn.Module], Any]) -> dict[str, Callable[[Setting], Any]]:
    """With plain parameters, and with parameters sharded."""
    return {
        "": lambda here: run(here, net()),
        ", parameters sharded": lambda here: run(here, here.shard_parameters(net())),
    }


def _accumulated(here: Setting, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data(here)
    loss_of = here.compile(_mse(model))
    for part in range(3):
        (loss_of(x + part, y) / 3).backward()
    optimizer.step()
    return list(model.parameters()), gradients(model)


def _clipped(how: Callable[..., Any], limit: float, **options: Any) -> Callable[[Setting, nn.Module], Any]:
    def run(here: Setting, model: nn.Module) -> Any:
        here.compile(_mse(model))(*_data(here)).backward()
        total = how(model.parameters(), limit, **options)
        return total, gradients(model)

    return run


def _averaged(here: Setting, model: nn.Module) -> Any:
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data(here)
    loss_of = here.compile(_mse(model))
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    return [list(a.parameters()) for a in averages], [a(x) for a in averages]


def _scheduled(here: Setting, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    chain = schedulers.ChainedScheduler(
        [schedulers.CosineAnnealingLR(optimizer, 5), schedulers.StepLR(optimizer, 2), schedulers.LinearLR(optimizer)]
    )
    x, y = _data(here)
    loss_of = here.compile(_mse(model))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        chain.step()
        plateau.step(loss)
        losses.append(loss)
    return losses, optimizer.param_groups[0]["lr"]


def _autocast(here: Setting) -> Any:
    model = net().float()
    x, y = here.partition(values(7, 4).float()), here.partition(values(7, 4, seed=1).float())

    def loss_of(x: Any, y: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        return (out.float() - y).square().mean()

    loss = here.compile(loss_of)(x, y)
    loss.backward()
    return loss, gradients(model)


def _scaled(here: Setting, model: nn.Module) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data(here)
    loss_of = here.compile(_mse(model))
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(x, y * torch.inf if step == 1 else y)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters()), scaler.get_scale()


def _overflow_on_one_rank(here: Setting, model: nn.Module) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data(here)
    loss_of = here.compile(_mse(model))
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(x, y)).backward()
        if step == 0:
            next(model.parameters()).grad[-1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters()), scaler.get_scale()


def _recomputed(reentrant: bool) -> Callable[[Setting, nn.Module], Any]:
    def run(here: Setting, model: nn.Module) -> Any:
        def loss_of(x: Any, y: Any) -> Any:
            return (checkpoint(model, x, use_reentrant=reentrant) - y).square().mean()

        x, y = _data(here)
        x.requires_grad_()
        loss = here.compile(loss_of)(x, y)
        loss.backward()
        return loss, x.grad, gradients(model)

    return run


def _selectively_recomputed(here: Setting) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keep = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)

    def loss_of(x: Any, y: Any) -> Any:
        return (checkpoint(model, x, use_reentrant=False, context_fn=contexts) - y).square().mean()

    model = net()
    x, y = _data(here)
    loss = here.compile(loss_of)(x, y)
    loss.backward()
    return loss, gradients(model)


def _hooked(here: Setting) -> Any:
    model, seen = net(), []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, out: out + 1)
    if not here.compiled:  # Dynamo has none, with plain tensors either
        model[2].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0],))
    model[0].weight.register_hook(lambda g: g * 5)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x, y = _data(here)
    x.requires_grad_()
    out = here.compile(_mse(model))(x, y)
    out.backward()
    return out, x.grad, gradients(model), seen


def _saved_tensors_hooked(here: Setting) -> Any:
    model, packed = net(), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t * 1

    x, y = _data(here)
    x.requires_grad_()
    loss_of = here.compile(_mse(model))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t * 1):
        loss = loss_of(x, y)
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        again = loss_of(x, y)
    again.backward()
    return loss, x.grad, gradients(model)


def _parametrized(kind: str, sharded: bool = False) -> Callable[[Setting], Any]:
    class Symmetric(nn.Module):
        def forward(self, w: Any) -> Any:
            return w.triu() + w.triu(1).transpose(-1, -2)

    def run(here: Setting) -> Any:
        model = net(width=4)
        if sharded:
            here.shard_parameters(model)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if kind == "weight_norm":
                parametrizations.weight_norm(model[0])
            elif kind == "old weight_norm":
                nn.utils.weight_norm(model[0])
            elif kind == "spectral_norm":
                parametrizations.spectral_norm(model[0], n_power_iterations=2)
            elif kind == "old spectral_norm":
                nn.utils.spectral_norm(model[0])
            elif kind == "orthogonal":
                parametrizations.orthogonal(model[0])
            else:
                parametrize.register_parametrization(model[0], "weight", Symmetric())
            for name, vector in model.named_buffers():  # drawn for the parameter's layout
                start = values(len(vector), seed=len(name))
                vector.copy_(start / start.norm())
        x, y = _data(here)
        loss = here.compile(_mse(model))(x, y)
        loss.backward()
        return loss, gradients(model)

    return run


def _copied(here: Setting, model: nn.Module) -> Any:
    x, y = _data(here)
    twin, x_too = copy.deepcopy(model), copy.deepcopy(x)
    x_too.add_(1)
    with torch.no_grad():
        twin[0].weight.mul_(2)
    loss = here.compile(_mse(twin))(x_too, y)
    loss.backward()
    return loss, x, list(model.parameters()), gradients(twin)


def _pickled(here: Setting, model: nn.Module) -> Any:
    x, y = pickle.loads(pickle.dumps(_data(here)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    loss = here.compile(_mse(model))(x, y)
    loss.backward()
    return loss, gradients(model)


def _loaded(here: Setting) -> Any:
    rows = [values(4, seed=i) for i in range(6)]
    model = here.compile(net())
    return [model(here.partition(batch)).sum() for batch in torch.utils.data.DataLoader(rows, batch_size=3)]


def _dataset_of_shards(here: Setting) -> Any:
    x, y = _data(here)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    loss_of = here.compile(_mse(net()))
    return [loss_of(a, b) for a, b in loader]


def _numbers(here: Setting) -> Any:
    x, y = _data(here)
    loss = here.compile(_mse(net()))(x, y)
    return f"{loss:.3f}", float(loss), loss.item(), loss.detach().numpy().item(), bool(loss > 0), loss.detach().tolist()


ALL_OR_NONE = (
    "This happens when a compiled function returns multiple outputs that require gradients, but .backward() is only "
    "called on some of them. To fix: call .detach() on forward outputs you don't need gradients for"
)
"""Torch's words, pytorch#172556: such a hook assigns a weight to its module, so that the graph returns it."""

SECTION = "Training loops"
CASES = [
    Case(SECTION, feature + suffix, run)
    for feature, of_model in [
        ("gradient accumulation", _accumulated),
        ("`clip_grad_norm_`", _clipped(clip_grad_norm_, 0.1)),
        (
            "`clip_grad_norm_`, infinity norm, `foreach=True`",
            _clipped(clip_grad_norm_, 0.1, norm_type=torch.inf, foreach=True),
        ),
        ("`clip_grad_value_`", _clipped(clip_grad_value_, 0.01)),
        ("`AveragedModel`, mean and EMA", _averaged),
        ("learning-rate schedulers, `ReduceLROnPlateau`", _scheduled),
        ("`GradScaler`, with a step that overflows", _scaled),
        ("`GradScaler`, a gradient that overflows in one row", _overflow_on_one_rank),
        ("activation checkpointing", _recomputed(False)),
        ("activation checkpointing, reentrant", _recomputed(True)),
        ("`copy.deepcopy`", _copied),
        ("`pickle`, `torch.save` of a module, on the same rank", _pickled),
    ]
    for suffix, run in _both(of_model).items()
]
CASES += [
    Case(SECTION, "`autocast` to bfloat16", _autocast, rtol=5e-2),
    Case(SECTION, "selective activation checkpointing", _selectively_recomputed),
    Case(SECTION, "forward, backward and gradient hooks", _hooked),
    Case(SECTION, "`saved_tensors_hooks`, `save_on_cpu`", _saved_tensors_hooked),
    Case(SECTION, "`DataLoader`, batches sharded afterwards", _loaded),
    Case(SECTION, "`TensorDataset` of sharded tensors", _dataset_of_shards),
    Case(SECTION, "`float(loss)`, `item`, `tolist`, `numpy`, format strings", _numbers),
]
CASES += [
    Case(
        SECTION,
        f"{name}{', parameters in shards' if b else ''}",
        _parametrized(kind, b),
        compiled=ALL_OR_NONE if b and kind in ("old weight_norm", "old spectral_norm") else RIGHT,
    )
    for name, kind in [
        ("`parametrize`", "symmetric"),
        ("`parametrizations.weight_norm`", "weight_norm"),
        ("`nn.utils.weight_norm`", "old weight_norm"),
        ("`parametrizations.spectral_norm`", "spectral_norm"),
        ("`nn.utils.spectral_norm`", "old spectral_norm"),
        ("`parametrizations.orthogonal`", "orthogonal"),
    ]
    for b in (False, True)
]
