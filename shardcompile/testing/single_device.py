"""`assert_matches_single_device`: compares a model on sharded inputs with the same model on plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing.agreement import CheckFailed, Failure, agree_on_use, together, usage_error
from shardcompile.testing.arguments import Arguments, Placements, Sizes, digest
from shardcompile.testing.compare import Tolerances, difference, tolerances
from shardcompile.testing.current import default_mesh
from shardcompile.testing.one_process import once
from shardcompile.testing.subject import Plan, Subject, same_on_every_rank

Backend = str | Callable[..., Any]


def assert_matches_single_device(
    module_or_fn: nn.Module | Callable[..., object],
    inputs: Sequence[object] | Mapping[str, object],
    placements: Sequence[Placements] | Mapping[str, Placements],
    *,
    sharding_shapes: Sequence[Sizes] | Mapping[str, Sizes] | None = None,
    mesh: DeviceMesh | None = None,
    parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None,
    compiled: bool = True,
    backend: Backend | Sequence[Backend] = "inductor",
    options: Mapping[str, object] | None = None,
    backward: bool = True,
    input_grads: bool = True,
    steps: int = 1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_graphs: int = 1,
) -> None:
    """Compares a model on sharded inputs with the same model on plain tensors. Call this on every rank.

        @pytest.mark.ranks(3)
        def test_model():
            torch.manual_seed(0)
            model = Net().double()
            x, y = torch.randn(7, 5).double(), torch.randn(7, 2).double()
            assert_matches_single_device(
                model, [x, y], [Shard(0), Shard(0)], steps=3, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
            )

    Every rank runs the model on full tensors, as a single process would. Then the ranks run the model on sharded
    tensors, eagerly and compiled with ``fullgraph=True``. Each run has its own copy of the module, on the device of the
    mesh. In every step this compares:

    * the results, which may be any pytree: values, dtypes, global shapes;
    * the gradients of inputs and parameters. The loss is a weighted sum of the results, or the result itself if it is
      one scalar;
    * parameters and buffers after the optimizer's step.

    The compiled run must have one graph. All earlier compiled code is dropped. Every run starts from the same random
    seed, but sharded tensors get other random values than plain ones, so switch dropout off.

    Args:
        module_or_fn: a module with plain parameters, which is copied for each run, or a function of tensors.
        inputs: full values, the same on every rank; a mapping passes them by name. Values that are no tensors are
            passed unchanged.
        placements: for each input one placement for each mesh dim, or a single one if there is one mesh dim. None
            leaves an input plain.
        sharding_shapes: for each input the shard sizes by mesh dim, or None. By default sizes are uneven and change
            with each step, so that several steps also check that one graph serves all partitions. The shard sizes of
            7 rows on 3 ranks are 1, 6 and 0; then 0, 1 and 6; 3, 3 and 1; 5, 0 and 2
            (`shardcompile.testing.arrange.uneven_sizes`).
        mesh: a mesh over all ranks; by default of one dim, and of GPUs if the process group has NCCL.
        parallelize: takes the copy of the module for sharded inputs, and the mesh, and shards the parameters. It must
            keep their names.
        compiled: whether to compile at all.
        backend: a backend of `torch.compile`, or several.
        options: options of `torch.compile`, for backends that are strings.
        backward: whether to run the backward pass and the optimizer. Some result must require a gradient.
        input_grads: whether floating-point inputs require gradients.
        steps: the number of steps on the same values.
        optimizer: makes an optimizer for the parameters; by default SGD with a learning rate of 0.01.
        rtol: the relative tolerance; by default `torch.testing.assert_close`'s for each dtype, which is tight for
            float64. Reductions over ranks add in another order than a single process, so float32 may need more.
        atol: the absolute tolerance; by default also that of `torch.testing.assert_close`.
        max_graphs: the most graphs that a compiled run may have.

    Raises:
        AssertionError: on every rank, if something differs. The message has the run, the step, the value, the rank,
            the difference and its index in the global tensor. A failed rank raises it even if the others are stuck in
            a collective.
        ValueError: on every rank: the arguments do not fit together, inputs or parameters differ between ranks, or the
            run on plain tensors fails.
    """
    mesh = default_mesh() if mesh is None else mesh
    plan = Plan(backward, optimizer, parallelize)
    given = agree_on_use(
        "the arguments",
        lambda: _check(module_or_fn, Arguments(inputs, placements, sharding_shapes, mesh, input_grads), plan, steps),
    )
    agree_on_use(
        "inputs and parameters must be the same on every rank, from the same seed",
        lambda: "\n".join([*given.digests(), *_digests(module_or_fn)]),
        facts=str,
    )
    expected = together(
        "on plain tensors", lambda: once(lambda: _on_plain_tensors(module_or_fn, given, plan, steps)), error=usage_error
    )
    check = _Check(module_or_fn, given, plan, expected, tolerances(rtol, atol))
    check.run("eager", lambda call: call)
    for each in _several(backend) if compiled else []:
        check.run_compiled(each, options, max_graphs)


class _Check:
    """Compares runs on sharded inputs with the expected values.

    Args:
        module_or_fn: the user's module or function.
        arguments: the user's arguments.
        plan: the parts of a step.
        expected: for every step the values of the plain run, by name.
        allowed: the tolerances for numbers.
    """

    def __init__(
        self,
        module_or_fn: Callable[..., object],
        arguments: Arguments,
        plan: Plan,
        expected: Sequence[Mapping[str, object]],
        allowed: Tolerances,
    ) -> None:
        self._module_or_fn, self._arguments, self._plan = module_or_fn, arguments, plan
        self._expected, self._allowed = expected, allowed

    def run(self, name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        """Runs all steps on sharded inputs, and compares after each step."""
        with _seed():
            mesh = self._arguments.mesh
            subject = together(name, lambda: Subject(self._module_or_fn, self._plan, mesh, sharded=True))
            subject.call = wrap(subject.call)
            for step, expected in enumerate(self._expected):
                stage = f"{name}, step {step + 1}" if len(self._expected) > 1 else name
                self._step(stage, subject, step, expected)

    def _step(self, stage: str, subject: Subject, step: int, expected: Mapping[str, object]) -> None:
        together(stage, lambda: subject.forward(*self._arguments.sharded(step)), same_on_every_rank)
        together(stage, subject.learn, same_on_every_rank)
        together(stage, lambda: self._compare(subject.gather(), expected))

    def _compare(self, got: Mapping[str, object], expected: Mapping[str, object]) -> None:
        found = []
        for name in [*expected, *(n for n in got if n not in expected)]:
            text = difference(got.get(name, _NOTHING), expected.get(name, _NOTHING), self._allowed)
            if text is not None:
                found.append(Failure(f"{name} is wrong", text))
        if found:
            raise CheckFailed(found)

    def run_compiled(self, backend: Backend, options: Mapping[str, Any] | None, max_graphs: int) -> None:
        """Runs all steps with `torch.compile`, and counts the graphs."""
        once(torch.compiler.reset)
        name = f"compiled with {backend if isinstance(backend, str) else getattr(backend, '__name__', backend)}"
        stated = None if options is None else dict(options)
        before = once(graphs_compiled)
        self.run(name, lambda call: torch.compile(call, fullgraph=True, backend=backend, options=stated))
        count = graphs_compiled() - before
        together(name, lambda: _check_graphs(count, max_graphs), lambda _: f"{count} graphs")


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _check_graphs(count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        wanted = "one graph" if limit == 1 else f"1 to {limit} graphs"
        raise CheckFailed([Failure(f"{count} graphs were compiled, expected {wanted},")])


def _several(backend: Backend | Sequence[Backend]) -> list[Backend]:
    return [backend] if isinstance(backend, str) or callable(backend) else list(backend)


def _check(module_or_fn: Any, arguments: Arguments, plan: Plan, steps: int) -> Arguments:
    if arguments.mesh.size() != dist.get_world_size():
        raise ValueError(f"the mesh has {arguments.mesh.size()} of {dist.get_world_size()} ranks; pass one with all")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    is_module = isinstance(module_or_fn, nn.Module)
    if (plan.optimizer or plan.parallelize) and not is_module:
        raise ValueError(f"optimizer and parallelize are for modules, got {type(module_or_fn).__name__}")
    if plan.optimizer and not plan.backward:
        raise ValueError("an optimizer needs gradients: pass backward=True")
    if is_module:
        sharded = [n for n, p in _state_of(module_or_fn) if type(p.detach()) is not torch.Tensor]
        if sharded:
            raise ValueError(
                f"{', '.join(sharded)}: pass a module with plain parameters, and shard them in parallelize"
            )
    for step in range(min(steps, 4)):
        arguments.sharded(step)  # placements and sizes that do not fit are refused here
    return arguments


def _state_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _digests(module_or_fn: object) -> list[str]:
    if not isinstance(module_or_fn, nn.Module):
        return []
    return [digest(name, value) for name, value in _state_of(module_or_fn)]


def _on_plain_tensors(
    module_or_fn: Callable[..., object], arguments: Arguments, plan: Plan, steps: int
) -> list[dict[str, object]]:
    with _seed():
        subject = Subject(module_or_fn, plan, arguments.mesh, sharded=False)
        found = []
        for _ in range(steps):
            subject.forward(*arguments.plain())
            subject.learn()
            found.append(subject.gather())
        return found


@contextlib.contextmanager
def _seed() -> Iterator[None]:
    """Seeds the random number generators inside the context, and restores their state afterwards."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(0)
        yield
