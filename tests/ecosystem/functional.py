"""torch.func, losses with derivatives in them, higher-order ops, export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import func

from tests.ecosystem.case import NOT_IN_TORCH, NOTHING, RIGHT, Case, Setting, gradients, net, values


def _state(model: torch.nn.Module) -> dict[str, Any]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def _loss(model: torch.nn.Module) -> Callable[..., Any]:
    return lambda state, x: func.functional_call(model, state, (x,)).square().mean()


def _grad_of_parameters(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    return here.compile(lambda s, x: func.grad(_loss(model))(s, x))(_state(model), x)


def _grad_of_captured(here: Setting) -> Any:
    """The input is no argument of the function that is differentiated."""
    model, x = net(), here.partition(values(7, 4))
    return here.compile(lambda s, x: func.grad(lambda s: _loss(model)(s, x))(s))(_state(model), x)


def _grad_of_input(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    return here.compile(func.grad(lambda x: model(x).square().mean()))(x)


def _grad_and_value(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    return here.compile(lambda s, x: func.grad_and_value(_loss(model))(s, x))(_state(model), x)


def _vjp(here: Setting) -> Any:
    model, x, v = net(), here.partition(values(7, 4)), here.partition(values(7, 4, seed=3))

    def run(x: Any, v: Any) -> Any:
        out, pull = func.vjp(model, x)
        return out, pull(v)

    return here.compile(run)(x, v)


def _jvp_of_input(here: Setting) -> Any:
    model, x, v = net(), here.partition(values(7, 4)), here.partition(values(7, 4, seed=3))
    return here.compile(lambda x, v: func.jvp(model, (x,), (v,)))(x, v)


def _jvp_of_parameters(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    s, t = _state(model), _state(net(seed=5))
    return here.compile(lambda s, t, x: func.jvp(lambda s: _loss(model)(s, x), (s,), (t,)))(s, t, x)


def _hessian_of_parameters(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(lambda w, x: func.hessian(lambda w: torch.tanh(x @ w).square().mean())(w))(values(4, seed=2), x)


def _jacrev(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(lambda w, x: func.jacrev(lambda w: torch.tanh(x @ w).square().mean(0))(w))(
        values(4, 2, seed=2), x
    )


def _jacfwd(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(lambda w, x: func.jacfwd(lambda w: torch.tanh(x @ w).square().mean(0))(w))(
        values(4, 2, seed=2), x
    )


def _hessian_of_input(here: Setting) -> Any:
    x = here.partition(values(5, 2))
    return here.compile(func.hessian(lambda x: x.sin().prod(-1).sum()))(x)


def _vmap_rows(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    model = net()
    return here.compile(func.vmap(lambda row: model(row).square().sum()))(x)


def _vmap_columns(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(func.vmap(lambda column: column.cos().sum(), in_dims=1))(x)


def _vmap_of_plain(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(lambda ws, x: func.vmap(lambda w: (x @ w).sum())(ws))(values(3, 4, seed=2), x)


def _per_sample(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    per = func.vmap(func.grad(_loss(model)), in_dims=(None, 0))
    return here.compile(lambda s, x: per(s, x))(_state(model), x)


def _laplacian_by_autograd(here: Setting) -> Any:
    """The Laplacian of a network at collocation points: what a physics-informed loss is made of."""
    model = net()
    points = here.partition(values(7, 4)).requires_grad_()

    def loss_of(points: Any) -> Any:
        u = model(points)[:, 0]
        (du,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        laplacian = 0
        for d in range(2):
            (second,) = torch.autograd.grad(du[:, d].sum(), points, create_graph=True)
            laplacian = laplacian + second[:, d]
        return (laplacian - 1).square().mean()

    # Before torch 2.12 there is no such switch, and Dynamo does not trace `autograd.grad` at all.
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        loss = here.compile(loss_of)(points)
    loss.backward()
    return loss, gradients(model)


def _laplacian_by_func(here: Setting) -> Any:
    model, points = net(), here.partition(values(7, 4))

    def loss_of(points: Any) -> Any:
        def u(point: Any) -> Any:
            return model(point)[0]

        second = func.vmap(func.hessian(u))(points)
        return (second.diagonal(dim1=-2, dim2=-1).sum(-1) - 1).square().mean()

    loss = here.compile(loss_of)(points)
    loss.backward()
    return loss, gradients(model)


def _laplacian_by_jvp(here: Setting) -> Any:
    model, points = net(), here.partition(values(7, 4))

    def loss_of(points: Any) -> Any:
        direction = torch.zeros_like(points)
        direction[:, 0] = 1

        def slope(p: Any) -> Any:
            return func.jvp(lambda q: model(q)[:, 0], (p,), (direction,))[1]

        return func.jvp(slope, (points,), (direction,))[1].square().mean()

    loss = here.compile(loss_of)(points)
    loss.backward()
    return loss, gradients(model)


def _forward_ad(here: Setting) -> Any:
    import torch.autograd.forward_ad as fwd

    x, v = here.partition(values(7, 4)), here.partition(values(7, 4, seed=3))
    model = net()

    def run(x: Any, v: Any) -> Any:
        with fwd.dual_level():
            return tuple(fwd.unpack_dual(model(fwd.make_dual(x, v)).square().sum()))

    return here.compile(run)(x, v)


def _autograd_functional(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    w = values(4, seed=2)

    def run(x: Any, w: Any) -> Any:
        return torch.autograd.functional.hessian(lambda w: torch.tanh(x @ w).square().mean(), w)

    return here.compile(run)(x, w)


def _functional_call(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    state = {k: v.requires_grad_() for k, v in _state(net(seed=4)).items()}
    loss = here.compile(lambda s, x: _loss(model)(s, x))(state, x)
    loss.backward()
    return loss, [v.grad for v in state.values()]


def _linearize(here: Setting) -> Any:
    model, x, v = net(), here.partition(values(7, 4)), here.partition(values(7, 4, seed=3))

    def run(x: Any, v: Any) -> Any:
        out, push = func.linearize(model, x)
        return out, push(v)

    return here.compile(run)(x, v)


def _functionalize(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(func.functionalize(lambda x: (x * 2).add_(1)))(x)


def _ensemble(here: Setting) -> Any:
    models, x = [net(s) for s in range(3)], here.partition(values(7, 4))
    state, _ = func.stack_module_state(models)
    run = func.vmap(lambda s, x: func.functional_call(models[0], s, (x,)), in_dims=(0, None))
    return here.compile(lambda s, x: run(s, x))({k: v.detach() for k, v in state.items()}, x)


def _cond(here: Setting) -> Any:
    x = here.partition(values(7, 4)).requires_grad_()

    def run(flag: Any, x: Any) -> Any:
        return torch.cond(flag, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))

    run = here.compile(run)
    out = [run(torch.tensor(b), x) for b in (True, False)]
    (out[0] + out[1]).sum().backward()
    return out, x.grad


def _cond_sharded_flag(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)))(x)


def _cond_captured(here: Setting) -> Any:
    x = here.partition(values(7, 4))

    def run(flag: Any) -> Any:
        return torch.cond(flag, lambda: x.sin(), lambda: x.cos(), ())

    return here.compile(run)(torch.tensor(True))


def _while_captured(here: Setting) -> Any:
    from torch._higher_order_ops import while_loop

    x = here.partition(values(7, 4))

    def run(s: Any) -> Any:
        return while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + x.sum()), (torch.tensor(0), s))

    return here.compile(run)(torch.tensor(0.0, dtype=torch.float64))


def _while_loop(here: Setting) -> Any:
    from torch._higher_order_ops import while_loop

    x = here.partition(values(7, 4))

    def run(x: Any) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))

    return here.compile(run)(x)


def _scan(here: Setting) -> Any:
    from torch._higher_order_ops.scan import scan

    x = here.partition(values(5, 7, 4), dim=1)
    init = here.partition(values(7, 4, seed=1))
    return here.compile(lambda init, x: scan(lambda c, x: (c * 0.5 + x, c.sin()), init, x))(init, x)


def _associative_scan(here: Setting) -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan

    x = here.partition(values(5, 7, 4), dim=1)
    return here.compile(lambda x: associative_scan(torch.add, x, 0, combine_mode="generic"))(x)


def _map(here: Setting) -> Any:
    from torch._higher_order_ops.map import map as torch_map

    x = here.partition(values(5, 7, 4), dim=1)
    return here.compile(lambda x: torch_map(lambda row: row.sin(), x))(x)


def _nested_region(here: Setting) -> Any:
    x = here.partition(values(7, 4)).requires_grad_()

    @torch.compiler.nested_compile_region
    def layer(x: Any) -> Any:
        return x.sin() * 2

    out = here.compile(lambda x: layer(layer(x)).sum())(x)
    out.backward()
    return out, x.grad


def _flex(here: Setting) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (here.partition(values(3, 2, 6, 4, seed=s)) for s in range(3))

    def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + (i - j)

    return here.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=bias))(q, k, v)


def _export(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    return torch.export.export(model, (x,)).module()(x + 1) if here.sharded else model(x + 1)


def _export_saved(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (values(7, 4),), dynamic_shapes=({0: rows},)).module()
    return here.compile(exported)(x + 1)


def _jit(here: Setting) -> Any:
    model, x = net(), here.partition(values(7, 4))
    return torch.jit.trace(model, (x,), check_trace=False)(x + 1)


def _fx(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(torch.fx.symbolic_trace(net()))(x)


def _make_fx(here: Setting) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = here.partition(values(7, 4))
    return make_fx(net())(x)(x + 1)


def _scripted(here: Setting) -> Any:
    x = here.partition(values(7, 4))
    return here.compile(torch.jit.script(net()))(x)


TRACED = (
    "it would take shards for constants of the graph. torch.compile captures sharded tensors in one graph; a graph that "
    "torch.export has made of plain tensors runs on sharded ones"
)
NO_LAYOUT = "torch traces its function on tensors that have no layout. "
IN_SHARDS = "; or run it on local shards with shardcompile.local_map"
COND = (
    NO_LAYOUT
    + (
        "torch.where computes both branches; a Python `if` on a plain value that is the same on every rank is compiled as "
        "one of them"
    )
    + IN_SHARDS
)
STORAGES = "get_tensor_storages does not support traceable wrapper subclasses"
NO_WHILE = NO_LAYOUT + "A Python loop over a number of steps is unrolled" + IN_SHARDS
WHILE = STORAGES if "2.13" <= torch.__version__ < "2.15" else NO_WHILE
WHILE_CAPTURED = STORAGES if torch.__version__ >= "2.13" else NO_WHILE
SCAN = (
    NO_LAYOUT
    + (
        "A Python loop along a dim that is not sharded is unrolled; cumsum and the other cumulative ops work along any "
        "dim, torch._higher_order_ops.associative_scan along dims that are not sharded"
    )
    + IN_SHARDS
)
MAP = NO_LAYOUT + "torch.vmap, or a Python loop along a dim that is not sharded, does the same" + IN_SHARDS
SECTION = "`torch.func` and derivatives in a loss"
HIGHER = "Higher-order ops"
EXPORT = "Graphs beside `torch.compile`"
FORWARD_MODE = ("jvp", "jacfwd", "hessian", "linearize", "forward-mode")
CASES = [
    # Torch keeps one level of forward-mode differentiation for all threads.
    Case(section, feature, run, eager, compiled, processes=any(w in feature for w in FORWARD_MODE))
    for section, feature, run, eager, compiled in [
        (SECTION, "`functional_call`", _functional_call, RIGHT, RIGHT),
        (SECTION, "`grad`, plain parameters", _grad_of_parameters, RIGHT, RIGHT),
        (SECTION, "`grad`, plain parameters, the input from outside", _grad_of_captured, RIGHT, RIGHT),
        (SECTION, "`grad_and_value`, plain parameters", _grad_and_value, RIGHT, RIGHT),
        (SECTION, "`grad`, sharded input", _grad_of_input, RIGHT, RIGHT),
        (SECTION, "`vjp`, sharded input", _vjp, RIGHT, RIGHT),
        (SECTION, "`jvp`, sharded input", _jvp_of_input, RIGHT, RIGHT),
        (SECTION, "`jvp`, plain parameters", _jvp_of_parameters, RIGHT, RIGHT),
        (SECTION, "`linearize`, sharded input", _linearize, TRACED, NOT_IN_TORCH),
        (SECTION, "`hessian`, plain parameters", _hessian_of_parameters, RIGHT, RIGHT),
        (SECTION, "`jacrev`, plain parameters", _jacrev, RIGHT, RIGHT),
        (SECTION, "`jacfwd`, plain parameters", _jacfwd, RIGHT, RIGHT),
        (SECTION, "`hessian`, sharded input", _hessian_of_input, RIGHT, RIGHT),
        (SECTION, "`vmap` over the rows that are sharded", _vmap_rows, RIGHT, RIGHT),
        (SECTION, "`vmap` over whole columns", _vmap_columns, RIGHT, RIGHT),
        (SECTION, "`vmap` over plain weights", _vmap_of_plain, RIGHT, RIGHT),
        (SECTION, "`vmap` of `grad`: a gradient for each sample", _per_sample, RIGHT, RIGHT),
        (SECTION, "`vmap` over an ensemble of models", _ensemble, RIGHT, RIGHT),
        (SECTION, "`functionalize`", _functionalize, RIGHT, NOT_IN_TORCH),
        (SECTION, "Laplacian by `autograd.grad(create_graph=True)`", _laplacian_by_autograd, RIGHT, RIGHT),
        (SECTION, "Laplacian by `vmap` of `hessian`", _laplacian_by_func, RIGHT, RIGHT),
        (SECTION, "second derivative by `jvp` of `jvp`", _laplacian_by_jvp, RIGHT, RIGHT),
        (SECTION, "forward-mode AD, `make_dual`", _forward_ad, RIGHT, RIGHT),
        (SECTION, "`autograd.functional.hessian`, plain parameters", _autograd_functional, RIGHT, NOT_IN_TORCH),
        (HIGHER, "`cond`, plain predicate", _cond, COND, COND),
        (HIGHER, "`cond`, sharded predicate", _cond_sharded_flag, COND, COND),
        (HIGHER, "`cond`, branches that use a sharded tensor from outside", _cond_captured, COND, COND),
        (HIGHER, "`while_loop`", _while_loop, WHILE, WHILE),
        (
            HIGHER,
            "`while_loop`, a body that uses a sharded tensor from outside",
            _while_captured,
            WHILE,
            WHILE_CAPTURED,
        ),
        (HIGHER, "`scan` along a whole dim", _scan, SCAN, SCAN),
        (HIGHER, "`associative_scan` along a whole dim", _associative_scan, RIGHT, RIGHT),
        (HIGHER, "`map` along a whole dim", _map, MAP, MAP),
        (HIGHER, "`nested_compile_region`", _nested_region, RIGHT, RIGHT),
        (HIGHER, "`flex_attention`", _flex, RIGHT, RIGHT),
        (EXPORT, "`torch.export` of a model with sharded inputs", _export, TRACED, NOTHING),
        (EXPORT, "`torch.export` with plain inputs, run on sharded ones", _export_saved, RIGHT, RIGHT),
        (EXPORT, "`fx.symbolic_trace`", _fx, RIGHT, RIGHT),
        (EXPORT, "`make_fx`", _make_fx, TRACED, NOTHING),
        (EXPORT, "`jit.trace`", _jit, TRACED, NOTHING),
        (EXPORT, "`jit.script`", _scripted, RIGHT, NOT_IN_TORCH),
    ]
]
