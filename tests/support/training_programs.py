"""Training programs that a seed draws: a model with plain parameters, and steps that use autograd in many ways.

A program runs on plain inputs and on sharded ones and makes the same choices on both, so that what it notes can be
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Batch = Callable[[Tensor, int, list[int]], Tensor]
"""Shards a full input along a dim, to sizes of three shards; or leaves it plain."""


class Residual(nn.Module):
    """An MLP with a pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nnf.gelu(self.first(self.norm(x))))


class Slices(nn.Module):
    """Attends to three means of rows, as the demo's network does: sums over rows in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.assign, self.value = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.assign(x).softmax(-1)
        means = weights.transpose(0, 1) @ self.value(x) / (weights.sum(0).unsqueeze(-1) + 1e-3)
        return x + weights @ means


class Scale(nn.Module):
    """Uses a parameter twice, another one without rows, and has one that is not used and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full([WIDTH], 0.7)), nn.Parameter(torch.zeros(WIDTH))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.scale.exp() * self.frozen + self.shift.square().sum()


class Neighbours(nn.Module):
    """A convolution along the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(0, 1).unsqueeze(0)).squeeze(0).transpose(0, 1)


class Buckets(nn.Module):
    """Looks rows of a table up by what the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().abs().sum(-1).long().clamp(0, 4))


class Normalized(nn.Module):
    """A linear layer whose weight plain ops make of two parameters, as weight norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.direction = nn.Parameter(torch.ones(WIDTH, 1)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nnf.linear(x, self.length.clamp(min=0.1) * self.direction / self.direction.norm(dim=1, keepdim=True))


class Mixing(nn.Module):
    """Functions that sharded tensors implement above autograd: `einsum`, Fourier transforms, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("nc,cd->nd", x, self.weight).tanh()
        x = torch.fft.irfft(torch.fft.rfft(x * self.scale, dim=0), n=x.shape[0], dim=0)
        return nnf.pad(x.transpose(0, 1).unsqueeze(0), (1, 1), mode="reflect").squeeze(0).transpose(0, 1)[2:]


class Attention(nn.Module):
    """Attends to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.key_value(x).chunk(2, -1)
        return x + (self.query(x) @ key.transpose(0, 1) / WIDTH).softmax(-1) @ value


LAYERS: Sequence[Callable[[], nn.Module]] = (
    Residual,
    Slices,
    Scale,
    Neighbours,
    Buckets,
    Mixing,
    Normalized,
    Attention,
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Sequential(nn.Tanh(), nn.LayerNorm(WIDTH)),
)


class Net(nn.Module):
    """Some layers, one of them perhaps twice, each perhaps with activation checkpointing.

    Args:
        random: draws them.
        compiled: whether it will be compiled, so that nothing may be drawn that Dynamo does not trace.
    """

    def __init__(self, random: Random, compiled: bool) -> None:
        super().__init__()
        layers = [random.choice(LAYERS)() for _ in range(random.randint(2, 4))]
        if random.random() < 0.3:
            layers.append(layers[0])
        self.layers = nn.ModuleList(layers)
        ways = [None, None, None, False] if compiled else [*[None] * 8, False, False, True]
        self.reentrant = [random.choice(ways) for _ in layers]
        self.halves_gradients = not compiled and random.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        for layer, reentrant in zip(self.layers, self.reentrant, strict=True):
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
            if self.halves_gradients and x.requires_grad:
                x.register_hook(lambda g: g * 0.5)
        return x


def _optimizer(random: Random, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps: gradients that are 0 but for rounding would have steps of any sign.
    foreach = random.choice([None, True, False])
    makes: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=foreach),
        lambda: torch.optim.AdamW(parameters, lr=0.01, eps=0.1, foreach=foreach),
        lambda: torch.optim.Adagrad(parameters, lr=0.01, eps=0.1, foreach=foreach),
        lambda: torch.optim.RMSprop(parameters, lr=0.01, eps=0.1, foreach=foreach),
    ]
    return random.choice(makes)()


class Program:
    """A training program.

    Args:
        seed: draws everything.
        batch: makes inputs of the model.
        compile_: compiles the model, if it is compiled.

    Attributes:
        noted: what the program computed, each with a name that says how.
    """

    def __init__(
        self, seed: int, batch: Batch, compile_: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    ) -> None:
        self._random = random = Random(seed)
        self._batch = batch
        self._compiled = compile_ is not None
        torch.manual_seed(seed)
        self._model = Net(random, self._compiled).double()
        self._run = self._model if compile_ is None else compile_(self._model)
        self._nests = any(self._model.reentrant)
        self._leaves = [p for p in self._model.parameters() if p.requires_grad]
        self.noted: list[tuple[str, Tensor | None]] = []

    def run(self) -> None:
        """Runs the program."""
        random = self._random
        steps_in_hooks = random.random() < 0.15
        way = random.choice(self._ways(steps_in_hooks))
        if steps_in_hooks:
            for p in self._leaves:
                p.register_post_accumulate_grad_hook(self._descend)
        else:
            self._register_hooks(several=way not in (self._autograd_grad, self._penalty) and not self._nests)
        optimizer = _optimizer(random, self._leaves)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=random.random() < 0.3 and not steps_in_hooks)
        clips = random.choice([None, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
        for step in range(random.randint(1, 3)):
            optimizer.zero_grad(set_to_none=random.random() < 0.7)
            for _ in range(random.randint(1, 2)):
                way(scaler)
                self._note(f"step {step}, {way.__name__}: gradient", [p.grad for p in self._leaves])
            if steps_in_hooks:
                continue
            scaler.unscale_(optimizer)
            if clips is not None:
                clips([p for p in self._leaves if p.grad is not None], 0.3)
            scaler.step(optimizer)
            scaler.update()
        self._note("parameter", [p.detach() for p in self._leaves])

    def _ways(self, steps_in_hooks: bool) -> list[Callable[[Any], None]]:
        """The ways to compute gradients that a program may take."""
        ways = [self._backward, self._detour]
        if steps_in_hooks:  # the steps write to what further passes would need
            return ways
        ways.append(self._two_losses)
        if not self._compiled:
            ways.append(self._backward_twice)
        if not self._nests:  # else torch refuses them
            ways += [self._chosen_inputs, self._autograd_grad]
            if not self._compiled:
                ways.append(self._penalty)
        return ways

    def _loss(self) -> Tensor:
        """The loss of a new batch, in new shards."""
        random = self._random
        rows = random.randint(4, 9)
        cuts = sorted(random.randint(0, rows) for _ in range(2))
        sizes = [cuts[0], cuts[1] - cuts[0], rows - cuts[1]]
        dim = 0
        if random.random() < 0.15:
            dim, sizes = 1, random.choice([[2, 0, 4], [3, 1, 2], [2, 2, 2]])
        full = torch.randn(
            rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(random.getrandbits(32))
        )
        x = self._batch(full, dim, sizes)
        if self._nests or random.random() < 0.2:
            x.requires_grad_()
        out = self._run(x)
        losses: list[Callable[[], Tensor]] = [
            lambda: out.square().mean(),
            lambda: out.sin().sum(),
            lambda: out[1:3].square().sum() + out.sum() * 0.1,
            lambda: out.logsumexp(0).sum(),
            lambda: nnf.smooth_l1_loss(out, torch.zeros_like(out)),
            lambda: out.norm(),
        ]
        loss = random.choice(losses)()
        self._note("loss", [loss.detach()])
        return loss

    def _backward(self, scaler: Any) -> None:
        scaler.scale(self._loss()).backward()

    def _backward_twice(self, scaler: Any) -> None:
        loss = scaler.scale(self._loss())
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()

    def _two_losses(self, scaler: Any) -> None:
        first, second = self._loss(), self._loss()
        scaler.scale(second).backward()
        scaler.scale(first).backward()

    def _detour(self, scaler: Any) -> None:
        """The gradient of the loss for itself, by hand."""
        loss = scaler.scale(self._loss())
        loss.backward(torch.full_like(loss, 0.25))

    def _some_leaves(self) -> list[nn.Parameter]:
        return self._random.sample(self._leaves, self._random.randint(1, len(self._leaves)))

    def _chosen_inputs(self, scaler: Any) -> None:
        scaler.scale(self._loss()).backward(inputs=self._some_leaves())

    def _autograd_grad(self, scaler: Any) -> None:
        leaves = self._some_leaves()
        for p, g in zip(
            leaves, torch.autograd.grad(scaler.scale(self._loss()), leaves, allow_unused=True), strict=True
        ):
            p.grad = g

    def _penalty(self, scaler: Any) -> None:
        """Double backward."""
        loss = self._loss()
        found = torch.autograd.grad(loss, self._some_leaves(), create_graph=True, allow_unused=True)
        scaler.scale(loss + sum(0.1 * g.square().sum() for g in found if g is not None)).backward()

    def _register_hooks(self, several: bool) -> None:
        """Hooks of leaves that see and change gradients; they are not linear, so they must see whole ones.

        Args:
            several: whether a hook may be of several leaves. Torch does not allow that with `torch.autograd.grad`; with
                re-entrant checkpoints it calls the hook once for each nested backward pass, in any order.
        """
        random = self._random
        if random.random() < 0.4:
            random.choice(self._leaves).register_hook(lambda g: g.clamp(-0.2, 0.2))
        if random.random() < 0.3:
            random.choice(self._leaves).register_post_accumulate_grad_hook(_square)
        if several and random.random() < 0.3:
            seen = self._some_leaves()
            torch.autograd.graph.register_multi_grad_hook(
                seen, lambda gs: self._note("a hook's gradient", gs), mode="all"
            )

    def _descend(self, p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p -= 0.01 * p.grad
        p.grad = None

    def _note(self, what: str, values: Sequence[Tensor | None]) -> None:
        self.noted += [(f"{what} {i}", None if v is None else v.detach().clone()) for i, v in enumerate(values)]


def _square(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(p.grad.abs().clamp(max=1))
