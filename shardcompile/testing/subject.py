"""The runner of `assert_matches_single_device`: a copy of the module, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardcompile.compat.testing import keystr, tree_flatten_with_path
from shardcompile.testing.agreement import CheckFailed, Failure
from shardcompile.testing.trial import (
    describe_value,
    detach,
    full_value,
    go_backward,
    gradient_problems,
    shard_problems,
)


@dataclass(frozen=True)
class Plan:
    """What a step consists of.

    Attributes:
        backward: whether it has a backward pass and, if there are parameters, an optimizer's step.
        optimizer: makes the optimizer; None for SGD with a learning rate of 0.01.
        parallelize: shards the parameters of a copy of the module over the mesh.
    """

    backward: bool
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    parallelize: Callable[[nn.Module, DeviceMesh], object] | None


class Subject:
    """A function, or a copy of a module, that runs steps.

    Args:
        module_or_fn: the user's module or function.
        plan: the parts of a step.
        mesh: the mesh. The module is copied to its device.
        sharded: whether to shard parameters as the plan says.

    Attributes:
        call: the function or module that a step calls. A compiled one may replace it.
    """

    call: Callable[..., Any]

    def __init__(self, module_or_fn: Callable[..., object], plan: Plan, mesh: DeviceMesh, sharded: bool) -> None:
        self.call = module_or_fn
        self._plan = plan
        self._module: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._inputs: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        self._learnt: dict[str, Any] = {}
        if isinstance(module_or_fn, nn.Module):
            self._module = self.call = _copy(module_or_fn, plan, mesh, sharded)
            trainable = [p for p in self._module.parameters() if p.requires_grad]
            if plan.backward and trainable:
                self._optimizer = (plan.optimizer or _sgd)(trainable)

    def forward(self, args: list[object], kwargs: dict[str, object]) -> dict[str, object]:
        """Starts a step with the forward pass.

        Returns:
            The results, by name.

        Raises:
            CheckFailed: a local shard does not match its layout.
        """
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._inputs = {f"input {k!r}": v for k, v in [*enumerate(args), *kwargs.items()]}
        # Without a backward pass the step runs without gradients, so that it has one graph.
        with torch.set_grad_enabled(self._plan.backward):
            self._results = _named_results(self.call(*args, **kwargs))
        _check_shards({name: shard_problems(v) for name, v in self._results.items()})
        return self._results

    def learn(self) -> dict[str, object]:
        """Runs the backward pass and the optimizer's step.

        Returns:
            The gradients, parameters and buffers, by name.

        Raises:
            CheckFailed: no result requires a gradient, or a local shard does not match its layout.
        """
        if self._plan.backward and not go_backward(list(self._results.values()), "results"):
            raise CheckFailed([Failure("no result requires a gradient (backward=False leaves gradients out)")])
        leaves = self._leaves() if self._plan.backward else {}
        _check_shards({f"grad of {name}": gradient_problems(x) for name, x in leaves.items()})
        gradients = {f"grad of {name}": x.grad for name, x in leaves.items()}
        if self._optimizer is not None:
            self._optimizer.step()
        self._learnt = gradients | self._state()
        return self._learnt

    def gather(self) -> dict[str, Any]:
        """Gathers copies of all values of this step as full tensors."""
        return {name: _keep(full_value(detach(v))) for name, v in (self._results | self._learnt).items()}

    def _leaves(self) -> dict[str, Tensor]:
        inputs = {n: x for n, x in self._inputs.items() if isinstance(x, Tensor) and x.requires_grad}
        parameters = {} if self._module is None else dict(self._module.named_parameters())
        return inputs | {n: p for n, p in parameters.items() if p.requires_grad}

    def _state(self) -> dict[str, object]:
        if self._module is None:
            return {}
        parameters = {f"{n} after the step": p for n, p in self._module.named_parameters()}
        return parameters | {f"buffer {n} after the step": b for n, b in self._module.named_buffers()}


def same_on_every_rank(named: Mapping[str, object]) -> str:
    """Describes the properties of values that must be rank-invariant before the ranks can gather them."""
    return "\n".join(f"{name}: {describe_value(v)}" for name, v in named.items())


def _copy(module: nn.Module, plan: Plan, mesh: DeviceMesh, sharded: bool) -> nn.Module:
    module = copy.deepcopy(module).to(mesh.device_type)
    if not sharded or plan.parallelize is None:
        return module
    returned = plan.parallelize(module, mesh)
    return returned if isinstance(returned, nn.Module) else module


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _named_results(result: object) -> dict[str, object]:
    leaves, structure = tree_flatten_with_path(result)
    return {"structure of the output": str(structure)} | {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    """Names a leaf: ``output``, ``output 'loss'``, ``output 0`` or, if nested deeper, ``output[0]['loss']``."""
    if len(path) == 1 and (key := getattr(path[0], "key", getattr(path[0], "idx", None))) is not None:
        return f"output {key!r}"
    return f"output{keystr(path)}"


def _check_shards(problems: Mapping[str, list[str]]) -> None:
    found = [Failure(f"{name} is malformed", p) for name, several in problems.items() for p in several]
    if found:
        raise CheckFailed(found)


def _keep(x: object) -> object:
    return x.clone() if isinstance(x, Tensor) else x
