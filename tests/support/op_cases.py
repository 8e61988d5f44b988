"""The table of operator cases: functions of full tensors, by family."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from tests.support.op_check import B, Case, F, I, Input, P, case

Run = Callable[..., Any]


def _set(x: Tensor, index: Any, value: Any) -> None:
    """`operator.setitem`, which Dynamo (2.11 - 2.15) cannot trace."""
    x[index] = value


def _in_place(change: Run) -> Run:
    """`change` applied to a copy of the first input, which is returned."""

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        x = x.clone()
        change(x, *rest)
        return x

    return run


# Pointwise

_X = F(5, 4)


def _unary() -> list[Case]:
    plain = ("neg", "abs", "sign", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "relu", "square", "ceil", "floor",
             "round", "trunc", "frac", "erf", "isnan", "isfinite", "logical_not", "positive", "rad2deg", "sinc")  # fmt: skip
    positive = ("log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma")
    functional = ("relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "mish", "hardtanh", "relu6", "hardswish",
                  "logsigmoid", "selu", "celu", "softsign", "tanhshrink", "hardshrink", "softshrink", "hardsigmoid")  # fmt: skip
    return [
        *[case(name, getattr(torch, name), _X) for name in plain],
        *[case(name, getattr(torch, name), F(5, 4, kind="positive")) for name in positive],
        *[case(f"F.{name}", getattr(nnf, name), _X) for name in functional],
        case("gelu tanh", lambda x: nnf.gelu(x, approximate="tanh"), _X),
        case("threshold", lambda x: nnf.threshold(x, 0.1, 20.0), _X),
        case("glu other dim", lambda x: nnf.glu(x, 1), _X),
        case("prelu", nnf.prelu, F(5, 4, 3), P(4)),
        case("logit", lambda x: torch.logit(x, 1e-6), F(5, 4, kind="unit")),
        case("nan_to_num", torch.nan_to_num, F(5, 4, kind="nan")),
        case("0-d", lambda x: x.sin() * 2 + 1, F()),
    ]


def _binary() -> list[Case]:
    names = ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne")
    both = [(f"operator {n}", getattr(operator, n)) for n in names]
    both += [(n, getattr(torch, n)) for n in ("maximum", "minimum", "fmod", "atan2", "hypot", "logaddexp", "fmax")]
    shapes = {"": (F(5, 4), F(5, 4)), "row": (F(5, 4), F(4)), "column": (F(5, 4), F(5, 1)), "one": (F(1, 4), F(5, 1))}
    return [
        *[case(name, run, F(5, 4), F(5, 4, kind="positive")) for name, run in both],
        *[case(f"{n} {s}", getattr(operator, n), *i) for n in ("add", "mul", "truediv") for s, i in shapes.items() if s],
        case("add to 0-d", torch.add, F(5, 4), F()),
        case("mul by 0-d", torch.mul, F(), F(5, 4)),
        case("0-d add", torch.add, F(), F()),
        case("add alpha", lambda x, y: torch.add(x, y, alpha=3), _X, _X),
        case("sub alpha", lambda x, y: torch.sub(x, y, alpha=0.5), _X, F(4)),
        case("rsub", lambda x: 2 - x, _X),
        case("rdiv", lambda x: 2 / x, F(5, 4, kind="positive")),
        case("rpow", lambda x: 2**x, _X),
        case("numbers", lambda x: (x * 2 + 1 - 0.5) / 3, _X),
        case("add number", lambda x: x + 1, _X),
        case("mul number", lambda x: x * -2.5, _X),
        case("div number", lambda x: x / 7, _X),
        case("bool number", lambda x: x * True, _X),
        case("floor_divide", lambda x, y: x // y, _X, F(5, 4, kind="positive")),
        case("remainder", lambda x: x % 0.75, _X),
        case("div floor mode", lambda x, y: torch.div(x, y, rounding_mode="floor"), _X, F(5, 4, kind="positive")),
        case("pow number", lambda x: x**3, _X),
        case("pow tensor", torch.pow, F(5, 4, kind="positive"), F(4)),
        case("complex", lambda x, y: x * y.conj() + x.abs(), F(5, 4, dtype=torch.complex128), F(4, dtype=torch.complex128)),
        case("complex parts", lambda x: (x.real * 2, x.imag, x.angle()), F(5, 4, dtype=torch.complex128)),
        case("make complex", torch.complex, _X, _X),
        case("plain parameter", lambda x, w, b: x * w + b, _X, P(4), P(5, 1)),
        case("plain parameter alone", lambda x, w: x.sum() * w.sum() + w.sum(), _X, P(4)),
        case("plain 0-d", lambda x, w: x * w, _X, P()),
        case("plain tensor without gradient", lambda x, m: x * m, _X, Input((5, 4), sharded=False, grad=False)),
        case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), _X, _X, F(4)),
        case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2), _X, _X, F(5, 4, kind="positive")),
        case("lerp", torch.lerp, _X, _X, F(5, 1)),
        case("lerp number", lambda x, y: torch.lerp(x, y, 0.3), _X, _X),
        case("where", lambda c, x, y: torch.where(c, x, y), B(5, 4), _X, _X),
        case("where broadcast", lambda c, x, y: torch.where(c, x, y), B(5, 1), F(4), F(5, 4)),
        case("where number", lambda c, x: torch.where(c, x, 2.0), B(5, 4), _X),
        case("where of comparison", lambda x, y: torch.where(x > y, x, 2 * y), _X, F(4)),
        case("clamp", lambda x: x.clamp(-0.5, 0.8), _X),
        case("clamp min", lambda x: x.clamp(min=0.1), _X),
        case("clamp tensor", lambda x, y: torch.clamp(x, max=y), _X, F(4)),
        case("masked_fill", lambda x, m: x.masked_fill(m, -1.5), _X, B(5, 4)),
        case("masked_fill broadcast", lambda x, m: x.masked_fill(m, float("-inf")).exp(), F(3, 5, 4), B(5, 1)),
        case("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), _X, B(5, 4), F()),
        case("isclose", lambda x, y: torch.isclose(x, y, atol=1.0), _X, _X),
        case("bools", lambda a, b: (a & b, a | ~b, a ^ b, a.logical_and(b)), B(5, 4), B(4)),
        case("ints", lambda a, b: (a + b, a * b, a // (b + 1), a / (b + 1), a % 3, a << 1, -a), I(9, 5, 4), I(5, 4)),
        case("int and float", lambda a, x: a * x + a, I(9, 5, 4), F(4)),
        case("equal numbers of three types", lambda a: (a * 1, a * 1.0, a * True), I(9, 5, 4)),
        case("bool and equal numbers", lambda a: (a + True, a + 1.0, a + 1), B(5, 4)),
    ]  # fmt: skip


def _casts() -> list[Case]:
    return [
        case("float32", lambda x: x.float(), _X),
        case("bfloat16", lambda x: x.to(torch.bfloat16), _X),
        case("half", lambda x: x.half(), _X),
        case("float8", lambda x: x.to(torch.float8_e4m3fn).to(x.dtype) * 2, _X),
        case("view as ints", lambda x: x.view(torch.int64) >> 3, Input((5, 4), grad=False)),
        case("view as smaller ints", lambda x: x.view(torch.int16) >> 3, Input((5, 4), grad=False)),
        case("to int", lambda x: x.to(torch.int64), _X),
        case("to bool", lambda x: x.bool(), _X),
        case("int to float", lambda a: a.double() * 0.5, I(9, 5, 4)),
        case("to device", lambda x: x.to("cpu", torch.float32), _X),
        case("to copy", lambda x: x.to(torch.float64, copy=True), _X),
        case("to channels_last", lambda x: x.to(memory_format=torch.channels_last) * 2, F(3, 4, 2, 3)),
        case("type_as", lambda x, y: x.type_as(y), _X, F(4, dtype=torch.float32)),
        case("to other", lambda x, y: x.to(y), _X, F(4, dtype=torch.float32)),
        case("promotion", lambda x, y: x + y, _X, F(5, 4, dtype=torch.float32)),
        case("to complex", lambda x: x.to(torch.complex128) * 1j, _X),
        case("clone", lambda x: x.clone(), _X),
        case("contiguous", lambda x: x.t().contiguous(), _X),
        case("detach", lambda x: x.detach() * x, _X),
        case("view_as_real", lambda x: torch.view_as_real(x) * 2, F(5, 4, dtype=torch.complex128)),
        case("view_as_complex", lambda x: torch.view_as_complex(x) * 2j, F(5, 4, 2)),
    ]


def _inplace() -> list[Case]:
    changes: dict[str, tuple[Run, tuple[Input, ...]]] = {
        "add_": (lambda x, y: x.add_(y), (_X, _X)),
        "add_ row": (lambda x, y: x.add_(y, alpha=2), (_X, F(4))),
        "add_ number": (lambda x: x.add_(1.5), (_X,)),
        "sub_": (lambda x, y: x.sub_(y), (_X, F(5, 1))),
        "mul_": (lambda x, y: x.mul_(y), (_X, _X)),
        "mul_ number": (lambda x: x.mul_(-2), (_X,)),
        "div_": (lambda x, y: x.div_(y), (_X, F(5, 4, kind="positive"))),
        "+=": (lambda x, w: operator.iadd(x, w), (_X, P(4))),
        "exp_": (lambda x: x.exp_(), (_X,)),
        "relu_": (lambda x: x.relu_(), (_X,)),
        "clamp_": (lambda x: x.clamp_(-0.4, 0.4), (_X,)),
        "zero_": (lambda x: x.zero_(), (_X,)),
        "fill_": (lambda x: x.fill_(3.0), (_X,)),
        "fill_ tensor": (lambda x, y: x.fill_(y), (_X, F())),
        "copy_": (lambda x, y: x.copy_(y), (_X, _X)),
        "copy_ broadcast": (lambda x, y: x.copy_(y), (_X, F(4))),
        "copy_ cast": (lambda x, y: x.copy_(y), (_X, F(5, 4, dtype=torch.float32))),
        "masked_fill_": (lambda x, m: x.masked_fill_(m, 7.0), (_X, B(5, 4))),
        "addcmul_": (lambda x, y, z: x.addcmul_(y, z, value=0.5), (_X, _X, F(4))),
        "lerp_": (lambda x, y: x.lerp_(y, 0.25), (_X, _X)),
        "pow_": (lambda x: x.pow_(2), (_X,)),
        "slice of a view": (lambda x: x[1:3].mul_(2), (_X,)),
        "column of a view": (lambda x: x[:, 1].add_(1), (_X,)),
        "setitem row": (lambda x, y: _set(x, 2, y), (_X, F(4))),
        "setitem slice": (lambda x, y: _set(x, (slice(None), slice(1, 3)), y), (_X, F(5, 2))),
        "setitem number": (lambda x: _set(x, (slice(None), 0), 0.0), (_X,)),
        "transposed": (lambda x, y: x.t().add_(y), (_X, F(4, 5))),
        "flattened": (lambda x: x.view(-1).mul_(3), (_X,)),
        "view of a view": (lambda x: x[1:4].view(-1).mul_(3), (_X,)),
        "chunk": (lambda x: [c.mul_(i + 1) for i, c in enumerate(x.unbind(1))], (_X,)),
        "sum of ints": (lambda a: a.add_(3), (I(9, 5, 4),)),
        "bitwise": (lambda a, b: a.logical_and_(b), (B(5, 4), B(5, 4))),
        "float to int": (lambda a: a.add_(1.5), (I(9, 5, 4),)),
        "too wide": (lambda x, y: x.add_(y), (F(5, 1), F(5, 4))),
        "scatter_": (lambda x, i, s: x.scatter_(1, i, s), (_X, I(4, 5, 1), F(5, 1))),
        "index_add_": (lambda x, i, s: x.index_add_(0, i, s), (_X, I(5, 3), F(3, 4))),
        "index_put_": (lambda x, i, s: x.index_put_((i,), s, accumulate=True), (_X, I(5, 3), F(3, 4))),
        "squeeze_": (lambda x: x.unsqueeze(1).clone().squeeze_(1).mul_(2), (_X,)),
        "masked rows": (lambda x, m: _set(x, m, 0.0), (_X, B(5))),
        "masked elements": (lambda x: _set(x, x > 0, 1.5), (_X,)),
        "masked elements from": (lambda x, m, y: _set(x, m, y[m]), (_X, B(5, 4), _X)),
        "masked columns": (lambda x, m: _set(x, (slice(None), m), 0.0), (_X, B(4))),
        "masked columns from": (lambda x, m, y: _set(x, (slice(None), m), y[:, m] * 2), (_X, B(4), _X)),
        "masked columns of a row": (lambda x, m, y: _set(x, (1, m), y), (_X, B(4), F(4, 1))),
        "masked columns from one": (lambda x, m, y: _set(x, (slice(None), m), y), (_X, B(4), F(5, 1))),
        "masked part of a slice": (lambda x, m, y: _set(x, (slice(1, None), m), y[m]), (_X, B(4), F(4))),
        "masked_scatter_": (lambda x, m, y: x.masked_scatter_(m, y), (_X, B(5, 1), F(5, 5))),
        "index_put_ of a mask": (lambda x, m, y: x.index_put_((m,), y[m], accumulate=True), (_X, B(5), _X)),
        "indexed rows": (lambda x, y: _set(x, [0, 3], y), (_X, F(2, 4))),
        "twice": (lambda x: x.add_(1).mul_(x), (_X,)),
        "detached": (lambda x: x.detach().mul_(2), (_X,)),
        "under no_grad": (_scaled_without_gradient, (_X,)),
        "cumsum_": (lambda x: x.cumsum_(0), (_X,)),
    }
    whole = [
        case("in-place views", _turned, _X),
        case("in-place on plain", _written_to_plain, _X),
        case("in-place on parameter", _updated, _X, Input((4,), sharded=False, grad=False)),
        case("in-place on plain with gradient", lambda x: torch.zeros((), dtype=x.dtype).add_(x.sum()), _X,
             refuses="into a plain tensor"),
        case("in-place on plain parameter", lambda x, w: (w * 1).add_(x), _X, P(5, 4), refuses="into a plain tensor"),
    ]  # fmt: skip
    return whole + [
        case(f"in-place {name}", _in_place(change), *inputs)
        for name, (change, inputs) in changes.items()
    ]  # fmt: skip


def _scaled_without_gradient(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def _turned(x: Tensor) -> tuple[Tensor, ...]:
    """In-place views."""
    a, b, c, d = x.clone(), x.clone(), x.clone(), x.clone()
    return a.t_() * 2, b.transpose_(0, 1).sum(0), c.unsqueeze_(1).squeeze_(1) + x, d.unsqueeze_(0).exp()


def _written_to_plain(x: Tensor) -> tuple[Tensor, ...]:
    """A plain tensor takes the whole value, on every rank."""
    x = x.detach()
    total, whole, part = (
        torch.zeros((), dtype=x.dtype),
        torch.zeros(5, 4, dtype=x.dtype),
        torch.ones(5, 2, dtype=x.dtype),
    )
    total += x.sum()
    whole.copy_(x)
    part.mul_(x[:, :2])
    whole[0] = x.sum(0)
    return total, whole, part


def _updated(x: Tensor, w: Tensor) -> Tensor:
    """A step of plain gradient descent on a plain parameter."""
    w = w.detach().clone().requires_grad_()
    loss = (x.detach() * w).square().mean()
    (gradient,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w -= 0.1 * gradient
        w.add_(x.detach().sum(0), alpha=0.01)
    return w.detach()


# Products

_PAIRS = [
    ((4,), (4,)),
    ((4,), (4, 3)),
    ((4,), (2, 4, 3)),
    ((5, 4), (4,)),
    ((5, 4), (4, 3)),
    ((5, 4), (2, 4, 3)),
    ((2, 5, 4), (4,)),
    ((2, 5, 4), (4, 3)),
    ((2, 5, 4), (2, 4, 3)),
    ((2, 5, 4), (3, 2, 4, 3)),
    ((3, 2, 5, 4), (4,)),
    ((3, 2, 5, 4), (4, 3)),
    ((3, 2, 5, 4), (2, 4, 3)),
    ((3, 2, 5, 4), (3, 2, 4, 3)),
    ((3, 1, 5, 4), (2, 4, 3)),
    ((1, 5, 4), (3, 4, 3)),
]


def _products() -> list[Case]:
    einsums = {
        "ij,jk->ik": (F(5, 4), F(4, 3)),
        "ij,ij->": (F(5, 4), F(5, 4)),
        "ij,ij->j": (F(5, 4), F(5, 4)),
        "bhid,bhjd->bhij": (F(2, 3, 5, 4), F(2, 3, 4, 4)),
        "bij,jk->bik": (F(2, 5, 4), F(4, 3)),
        "bij,bkj->bik": (F(2, 5, 4), F(2, 3, 4)),
        "i,j->ij": (F(5), F(4)),
        "ii->i": (F(5, 5),),
        "bi,ij,bj->b": (F(5, 4), F(4, 3), F(5, 3)),
        "ij->ji": (F(5, 4),),
        "...i,ij->...j": (F(2, 5, 4), F(4, 3)),
    }
    return [
        *[case(f"matmul {len(a)}-D {len(b)}-D {a} {b}", torch.matmul, F(*a), F(*b)) for a, b in _PAIRS],
        *[case(f"matmul plain {a} {b}", torch.matmul, F(*a), P(*b)) for a, b in _PAIRS[3:14:3]],
        case("mm", torch.mm, F(5, 4), F(4, 3)),
        case("mm transposed", lambda x, y: x @ y.t(), F(5, 4), F(3, 4)),
        case("bmm", torch.bmm, F(3, 5, 4), F(3, 4, 2)),
        case("mv", torch.mv, F(5, 4), F(4)),
        case("dot", torch.dot, F(5), F(5)),
        case("outer", torch.outer, F(5), F(4)),
        case("addmm", torch.addmm, F(5, 3), F(5, 4), F(4, 3)),
        case("addmm row", torch.addmm, F(3), F(5, 4), F(4, 3)),
        case("addmm column", torch.addmm, F(5, 1), F(5, 4), F(4, 3)),
        case("addmm beta alpha", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), F(3), F(5, 4), F(4, 3)),
        case("addmm beta 0", lambda c, a, b: torch.addmm(c, a, b, beta=0), F(5, 3, kind="nan"), F(5, 4), F(4, 3)),
        case("addmm plain", torch.addmm, P(3), F(5, 4), P(4, 3)),
        case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5), F(3, 5, 2), F(3, 5, 4), F(3, 4, 2)),
        case("baddbmm broadcast", torch.baddbmm, F(1, 5, 1), F(3, 5, 4), F(3, 4, 2)),
        case("addmv", torch.addmv, F(5), F(5, 4), F(4)),
        case("addbmm", torch.addbmm, F(5, 2), F(3, 5, 4), F(3, 4, 2)),
        case("addr", torch.addr, F(5, 4), F(5), F(4)),
        case("chain_matmul", lambda a, b, c: a @ b @ c, F(5, 4), F(4, 3), F(3, 2)),
        case("gram", lambda x: x.t() @ x, F(5, 4)),
        case("tensordot", lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])), F(5, 4, 3), F(4, 3, 2)),
        case("cdist", torch.cdist, F(5, 4), F(3, 4)),
        *[case(f"einsum {text}", lambda *x, text=text: torch.einsum(text, *x), *x) for text, x in einsums.items()],
        *[case(f"linear {len(s)}-D", nnf.linear, F(*s), P(3, 4), P(3)) for s in ((4,), (5, 4), (2, 5, 4), (2, 3, 5, 4))],
        *[case(f"linear without bias {len(s)}-D", nnf.linear, F(*s), P(3, 4)) for s in ((4,), (5, 4), (2, 5, 4), (2, 3, 5, 4))],
        case("linear sharded weight", nnf.linear, F(2, 5, 4), F(3, 4), F(3)),
        case("linear sharded weight 2-D", nnf.linear, F(5, 4), F(3, 4), F(3)),
        case("bilinear", nnf.bilinear, F(5, 4), F(5, 3), P(2, 4, 3), P(2)),
        case("mm ints", torch.mm, I(5, 5, 4), I(5, 4, 3)),
        case("linear relu linear", lambda x, a, b: nnf.linear(nnf.linear(x, a).relu(), b), F(2, 5, 4), P(3, 4), P(2, 3)),
        case("mm shape error", torch.mm, F(5, 4), F(3, 4)),
    ]  # fmt: skip


# Reductions

_R = F(5, 4, 3)
_DIMS: list[Any] = [0, -1, (0, 2), (0, 1, 2)]


def _with_dims(name: str, run: Run, x: Input = _R, dims: list[Any] | None = None) -> list[Case]:
    """Over every `dims`, with and without keepdim."""
    return [
        case(f"{name} dim={dim} keepdim={keep}", lambda x, dim=dim, keep=keep: run(x, dim=dim, keepdim=keep), x)
        for n, dim in enumerate(dims or _DIMS)
        for keep in ((False, True) if n < 2 else (n % 2 == 0,))
    ]


def _reductions() -> list[Case]:
    ties, nans = F(5, 4, 3, kind="ties"), F(5, 4, 3, kind="nan")
    one = [0, 1, -1]
    whole = ("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean",
             "std_mean", "norm", "median", "logsumexp", "count_nonzero", "nansum", "nanmean", "aminmax")  # fmt: skip
    norms = [0, 1, 2, 3, 2.5, math.inf, -math.inf]
    return [
        *[case(f"{n} whole", getattr(torch, n), _R) for n in whole if n != "logsumexp"],
        *_with_dims("sum", torch.sum),
        *_with_dims("mean", torch.mean),
        *_with_dims("amax", torch.amax),
        *_with_dims("amin", torch.amin, ties),
        *_with_dims("var", torch.var),
        *_with_dims("std", torch.std),
        *_with_dims("var_mean", torch.var_mean),
        *_with_dims("logsumexp", torch.logsumexp),
        *_with_dims("logsumexp inf", torch.logsumexp, F(5, 4, 3, kind="inf"), [0]),
        *_with_dims("max", torch.max, dims=one),
        *_with_dims("min", torch.min, dims=one),
        *_with_dims("max ties", torch.max, ties, one),
        *_with_dims("max nan", torch.max, nans, one),
        *_with_dims("min nan", torch.min, nans, one),
        *_with_dims("argmax", torch.argmax, dims=[0, -1]),
        *_with_dims("argmax ties", torch.argmax, ties, [0, -1]),
        *_with_dims("argmin nan", torch.argmin, nans, [0, -1]),
        *_with_dims("prod", torch.prod, dims=[0, -1]),
        *_with_dims("prod zeros", torch.prod, F(5, 4, 3, kind="zeros"), [0, -1]),
        *_with_dims("any", torch.any, B(5, 4, 3), [0, -1, (0, 1)]),
        *_with_dims("all", torch.all, B(5, 4, 3), [0, -1, (0, 1)]),
        *_with_dims("median", torch.median, dims=[0]),
        *_with_dims("mode", torch.mode, ties, dims=[0]),
        *_with_dims("kthvalue", lambda x, dim, keepdim: torch.kthvalue(x, 2, dim, keepdim), dims=[0, 1]),
        *_with_dims("nansum", torch.nansum, nans, [0]),
        *_with_dims("quantile", lambda x, dim, keepdim: torch.quantile(x, 0.3, dim=dim, keepdim=keepdim), dims=[0]),
        *[c for p in norms for c in _with_dims(f"vector_norm {p}",
          lambda x, dim, keepdim, p=p: torch.linalg.vector_norm(x, p, dim=dim, keepdim=keepdim), dims=[0, (0, 2)])],
        *[case(f"norm {p} whole", lambda x, p=p: x.norm(p), _R) for p in norms],
        case("norm dim", lambda x: x.norm(dim=-1), _R),
        case("norm of zeros", lambda x: (x * 0).norm(), _X),
        case("argmax ties whole", torch.argmax, ties),
        case("argmax nan whole", torch.argmax, nans),
        case("max nan whole", torch.max, nans),
        case("max ties whole", torch.max, ties),
        case("argmax keepdim whole", lambda x: torch.argmax(x, keepdim=True), _R),
        case("amax ints", lambda a: (a.amax(0), a.max(), a.argmax(1), a.min(0)), I(9, 5, 4)),
        case("amax bools", lambda a: (a.amax(0), a.max(), a.sum(), a.sum(0)), B(5, 4)),
        case("any whole", torch.any, B(5, 4)),
        case("all whole", torch.all, B(5, 4)),
        case("any of floats", lambda x: (x.any(), x.all(0)), F(5, 4, kind="zeros")),
        case("sum ints", lambda a: (a.sum(), a.sum(0), a.prod(), a.double().mean()), I(5, 5, 4)),
        case("sum dtype", lambda x: x.sum(0, dtype=torch.float32), _R),
        case("mean dtype", lambda x: x.mean((0, 1), dtype=torch.float32), _R),
        case("sum of nothing", lambda x: x[:, :0].sum(1), _X),
        case("mean of nothing", lambda x: x[:, :0].mean(1), _X),
        case("sum 0-d", lambda x: x.sum(), F()),
        case("sum of empty size", lambda x: x.sum(0), F(0, 4)),
        case("amax of empty size", lambda x: x.amax(0), F(0, 4)),
        case("mean of empty size", lambda x: x.mean(0), F(0, 4)),
        case("var correction", lambda x: torch.var(x, dim=0, correction=0), _R),
        case("var correction 2.5", lambda x: torch.var(x, dim=(0, 1), correction=2.5), _R),
        case("var of one", lambda x: x[:1].var(0, correction=0), _X),
        case("std biased", lambda x: x.std(0, unbiased=False), _R),
        case("var complex", lambda x: x.var(0), F(5, 4, dtype=torch.complex128)),
        case("sum squared", lambda x: (x * x).sum(), _R),
        case("mean squared", lambda x: (x**2).mean(), _R),
        case("sum of sums", lambda x: x.sum(0).sum(), _R),
        case("sum float32", lambda x: x.sum(0), F(5, 4, dtype=torch.float32)),
        case("mean half", lambda x: x.mean(0), F(5, 4, dtype=torch.float16)),
        case("mean half large", lambda x: (x * 0 + 30000).mean(), F(5, 4, dtype=torch.float16)),
        case("norm half large", lambda x: (x * 0 + 300).norm(), F(5, 4, dtype=torch.float16)),
        case("var bfloat16", lambda x: x.var(0), F(5, 4, dtype=torch.bfloat16)),
        case("logsumexp half", lambda x: x.logsumexp(0), F(5, 4, dtype=torch.float16)),
        case("normalize", lambda x: nnf.normalize(x, dim=0), _R),
        case("normalize last", lambda x: nnf.normalize(x, p=1, dim=-1), _R),
        case("cosine_similarity", lambda x, y: nnf.cosine_similarity(x, y, dim=0), _X, _X),
        case("pairwise_distance", nnf.pairwise_distance, _X, _X),
        case("trace", torch.trace, _X),
        case("reductions of partials", lambda x: (x.sum(0) * 2 + x.sum(0)).abs().sum(), _R),
    ]  # fmt: skip


# Softmax, normalisation


def _softmaxes() -> list[Case]:
    three = F(5, 4, 3)
    return [
        *[case(f"softmax {d}", lambda x, d=d: x.softmax(d), three) for d in (0, 1, -1)],
        *[case(f"log_softmax {d}", lambda x, d=d: x.log_softmax(d), three) for d in (0, 1, -1)],
        case("softmax 0-d", lambda x: x.softmax(0), F()),
        case("softmax inf", lambda x: x.softmax(0), F(5, 4, kind="inf")),
        case("softmax dtype", lambda x: x.softmax(0, dtype=torch.float64), F(5, 4, dtype=torch.float32)),
        case("log_softmax half", lambda x: x.log_softmax(0), F(5, 4, dtype=torch.bfloat16)),
        case("softmin", lambda x: nnf.softmin(x, 0), _X),
        case("softmax twice", lambda x: x.softmax(0).softmax(1), _X),
        case("layer_norm", lambda x: nnf.layer_norm(x, (4,)), F(5, 4)),
        case("layer_norm weight bias", lambda x, w, b: nnf.layer_norm(x, (4,), w, b), F(5, 4), P(4), P(4)),
        case("layer_norm weight", lambda x, w: nnf.layer_norm(x, (4,), w), F(3, 5, 4), P(4)),
        case("layer_norm bias", lambda x, b: nnf.layer_norm(x, (4,), None, b), F(3, 5, 4), P(4)),
        case("layer_norm two dims", lambda x, w, b: nnf.layer_norm(x, (5, 4), w, b), F(3, 5, 4), P(5, 4), P(5, 4)),
        case("layer_norm all dims", lambda x, w: nnf.layer_norm(x, (5, 4), w), F(5, 4), P(5, 4)),
        case("layer_norm sharded weight", lambda x, w, b: nnf.layer_norm(x, (4,), w, b), F(3, 5, 4), F(4), F(4)),
        case("layer_norm without input gradient", lambda x, w, b: nnf.layer_norm(x.detach(), (4,), w, b), F(5, 4), P(4), P(4)),
        case("layer_norm without weight gradient", lambda x, w, b: nnf.layer_norm(x, (4,), w.detach(), b), F(5, 4), P(4), P(4)),
        case("layer_norm float32", lambda x, w: nnf.layer_norm(x, (4,), w.float()), F(5, 4, dtype=torch.float32), P(4),
             tolerance=1e-5),
        case("rms_norm", lambda x, w: nnf.rms_norm(x, (4,), w), F(3, 5, 4), P(4)),
        case("batch_norm running", _batch_norm, F(5, 4, 3), P(4)),
        case("batch_norm eval", lambda x, m, v: nnf.batch_norm(x, m, v), F(5, 4, 3), *[Input((4,), "positive", sharded=False,
             grad=False)] * 2),
        case("group_norm", lambda x, w, b: nnf.group_norm(x, 2, w, b), F(3, 4, 5), P(4), P(4)),
        case("group_norm weights", lambda x, w, b: nnf.group_norm(x, 3, w, b), F(2, 6, 3), F(6), F(6)),
        case("group_norm 2-d", lambda x: nnf.group_norm(x, 2), F(3, 6)),
        case("group_norm nan", lambda x: nnf.group_norm(x, 3), F(2, 6, 3, kind="nan")),
        case("group_norm half", lambda x: nnf.group_norm(x, 3), F(2, 6, 3, dtype=torch.bfloat16)),
        case("batch_norm", lambda x, w, b: nnf.batch_norm(x, None, None, w, b, training=True), F(5, 4, 3), P(4), P(4)),
        case("instance_norm", lambda x: nnf.instance_norm(x), F(3, 4, 5)),
    ]  # fmt: skip


def _batch_norm(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    mean, variance = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    return nnf.batch_norm(x, mean, variance, w, training=True, momentum=0.3), mean, variance


# Joins, pieces, views


def _joins() -> list[Case]:
    three = F(5, 4, 3)
    return [
        *[case(f"cat {d}", lambda x, y, d=d: torch.cat([x, y], d), F(5, 4), F(5, 4)) for d in (0, 1, -1)],
        case("cat unequal 0", lambda x, y: torch.cat([x, y], 0), F(5, 4), F(2, 4)),
        case("cat unequal 1", lambda x, y: torch.cat([x, y], 1), F(5, 4), F(5, 2)),
        case("cat with nothing", lambda x, y: torch.cat([x, y], 1), F(5, 4), F(5, 0)),
        case("cat with legacy empty", lambda x, y: torch.cat([x, y], 1), F(5, 4), F(0)),
        case("cat plain", lambda x, w: torch.cat([x, w], 0), F(5, 4), P(3, 4)),
        case("cat dtypes", lambda x, y: torch.cat([x, y], 1), F(5, 4), F(5, 4, dtype=torch.float32)),
        case("cat itself", lambda x: torch.cat([x, x, 2 * x], 1), _X),
        *[case(f"stack {d}", lambda x, y, d=d: torch.stack([x, y], d), F(5, 4), F(5, 4)) for d in (0, 1, 2, -1)],
        case("hstack", lambda x, y: torch.hstack([x, y]), F(5, 4), F(5, 2)),
        *[case(f"split {d}", lambda x, d=d: x.split(2, d), three) for d in (0, 1)],
        *[case(f"split sizes {d}", lambda x, d=d: x.split([1, x.shape[d] - 1], d), three) for d in (0, -1)],
        *[case(f"chunk {d}", lambda x, d=d: x.chunk(2, d), three) for d in (0, 1, -1)],
        case("tensor_split", lambda x: torch.tensor_split(x, 3, 0), three),
        *[case(f"unbind {d}", lambda x, d=d: x.unbind(d), F(5, 4)) for d in (0, 1)],
        case("unbind used once", lambda x: x.unbind(1)[2] * 3, F(5, 4)),
        *[case(f"select {d} {i}", lambda x, d=d, i=i: x.select(d, i), three) for d, i in ((0, 2), (1, -1), (-1, 0))],
        *[case(f"narrow {d}", lambda x, d=d: x.narrow(d, 1, 2), three) for d in (0, 1)],
        case("slice 1:4", lambda x: x[1:4], three),
        case("slice :100", lambda x: x[:100], three),
        case("slice :shape", lambda x: x[: x.shape[0]], three),
        case("slice -3:", lambda x: x[-3:], three),
        case("slice :-1", lambda x: x[:-1], three),
        case("slice ::2", lambda x: x[::2], three),
        case("slice 1::2 of dim 1", lambda x: x[:, 1::2], three),
        case("slice empty", lambda x: x[3:3], three),
        case("slice both", lambda x: x[1:4, :2], three),
        case("index int", lambda x: x[2], three),
        case("index None", lambda x: x[None, :, 1], three),
        case("index ellipsis", lambda x: x[..., -1], three),
        case("roll", lambda x: x.roll(2, 0), three),
        case("roll dims", lambda x: x.roll((1, 1), (0, 2)), three),
        case("flip", lambda x: x.flip(0), three),
        case("flip two", lambda x: x.flip((0, -1)), three),
        case("pad", lambda x: nnf.pad(x, (1, 2)), three),
        case("pad first", lambda x: nnf.pad(x, (0, 0, 0, 0, 2, 1), value=1.5), three),
        case("repeat", lambda x: x.repeat(2, 1, 3), three),
        case("tile", lambda x: x.tile((2, 1)), _X),
        case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), _X),
        case("tril", lambda x: torch.tril(x), F(5, 4)),
        case("triu", lambda x: torch.triu(x, 1), F(3, 5, 4)),
        case("diagonal", lambda x: torch.diagonal(x), F(5, 4)),
        case("diagonals", lambda x: torch.diagonal(x, 1, -1, 1), F(3, 5, 4)),
        case("diagonals that are written to", lambda x: _with_diagonals(x * 2), F(3, 4, 5)),
        case("diag_embed", lambda x: torch.diag_embed(x, -1), F(5, 3)),
        case("diag", lambda x: torch.diag(x), F(5)),
        case("unfold", lambda x: x.unfold(0, 2, 1), F(5, 4)),
        case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), F(5), F(4)),
        case("slice error", lambda x: x.select(0, 9), three),
        case("cat error", lambda x, y: torch.cat([x, y], 0), F(5, 4), F(5, 3)),
        case("rotate half", lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1), F(3, 5, 4)),
    ]


def _views() -> list[Case]:
    three = F(6, 4, 3)
    views: dict[str, tuple[Run, Input]] = {
        "view flat": (lambda x: x.view(-1), three),
        "view merge first": (lambda x: x.view(24, 3), three),
        "view merge last": (lambda x: x.view(6, 12), three),
        "view split first": (lambda x: x.view(3, 2, 4, 3), three),
        "view split first by inference": (lambda x: x.view(-1, 2, 12), three),
        "view split middle": (lambda x: x.view(6, 2, 2, 3), three),
        "view regroup": (lambda x: x.view(8, 9), three),
        "view ones": (lambda x: x.view(1, 6, 4, 1, 3), three),
        "view from ones": (lambda x: x.view(5, 4), F(1, 5, 1, 4)),
        "view same": (lambda x: x.view(6, 4, 3), three),
        "view as": (lambda x: x.view(6, 4, 3).view_as(x), three),
        "view to 1 element": (lambda x: x.view(()), F(1)),
        "view from 0-d": (lambda x: x.view(1, 1), F()),
        "view nothing": (lambda x: x.view(0, 12), F(0, 4, 3)),
        "view nothing flat": (lambda x: x.view(-1), F(5, 0)),
        "view of transposed": (lambda x: x.transpose(1, 2).view(6, 12), three),
        "view back and forth": (lambda x: x.view(24, 3).relu().view(6, 4, 3), three),
        "reshape": (lambda x: x.reshape(12, 6), three),
        "reshape of transposed": (lambda x: x.transpose(0, 1).reshape(4, 18), three),
        "reshape of permuted": (lambda x: x.permute(2, 0, 1).reshape(-1), three),
        "heads": (lambda x: x.view(2, 5, 2, 2).transpose(1, 2), F(2, 5, 4)),
        "heads and back": (lambda x: x.view(2, 5, 2, 2).transpose(1, 2).transpose(1, 2).reshape(2, 5, 4), F(2, 5, 4)),
        "flatten": (lambda x: x.flatten(), three),
        "flatten 0 1": (lambda x: x.flatten(0, 1), three),
        "flatten 1": (lambda x: x.flatten(1), three),
        "unflatten": (lambda x: x.unflatten(0, (2, 3)), three),
        "unflatten -1": (lambda x: x.unflatten(1, (-1, 2)), three),
        "permute": (lambda x: x.permute(2, 0, 1), three),
        "permute negative": (lambda x: x.permute(-1, -3, 1), three),
        "transpose": (lambda x: x.transpose(0, -1), three),
        "t": (lambda x: x.t(), _X),
        "mT": (lambda x: x.mT, three),
        "swapaxes": (lambda x: x.swapaxes(0, 1), three),
        "movedim": (lambda x: x.movedim(0, 2), three),
        "movedim several": (lambda x: x.movedim((0, 1), (1, 2)), three),
        "squeeze": (lambda x: x.squeeze(), F(1, 5, 1)),
        "squeeze none": (lambda x: x.squeeze(), _X),
        "squeeze dim": (lambda x: x.squeeze(0), F(1, 5, 1)),
        "squeeze dims": (lambda x: x.squeeze((0, 2)), F(1, 5, 1)),
        "squeeze no dim of one": (lambda x: x.squeeze(1), F(1, 5, 1)),
        "squeeze 0-d": (lambda x: x.squeeze(), F()),
        "squeeze 0-d dim": (lambda x: x.squeeze(0), F()),
        "unsqueeze": (lambda x: x.unsqueeze(0), _X),
        "unsqueeze last": (lambda x: x.unsqueeze(-1), _X),
        "unsqueeze middle": (lambda x: x.unsqueeze(1), _X),
        "expand": (lambda x: x.expand(3, 5, 4), F(5, 4)),
        "expand ones": (lambda x: x.expand(5, 4), F(5, 1)),
        "expand -1": (lambda x: x.expand(2, -1, 3), F(5, 1)),
        "expand one to one": (lambda x: x.expand(2, 1, 4), F(1, 4)),
        "expand_as": (lambda x: x.expand_as(torch.empty(5, 4)), F(1, 4)),
        "broadcast_to": (lambda x: x.broadcast_to(2, 5, 4), F(5, 1)),
        "alias": (lambda x: x[:], _X),
        "as_strided": (lambda x: x.as_strided((3, 4), (4, 1), 4), _X),
        "as_strided transposed": (lambda x: x.as_strided((4, 5), (1, 4)), _X),
        "as_strided overlapping": (lambda x: x.as_strided((4, 3), (2, 1)), _X),
        "view dtype": (lambda x: x.detach().view(torch.int64), _X),
        "size -1 error": (lambda x: x.view(7, -1), _X),
        "view error": (lambda x: x.t().view(-1), _X),
        "unflatten error": (lambda x: x.unflatten(0, (4, 3)), _X),
    }  # fmt: skip
    return [case(name, run, x) for name, (run, x) in views.items()]


# Selection by index


def _selection() -> list[Case]:
    table = F(6, 4)
    i32 = Input((5,), "index", 6, grad=False, dtype=torch.int64)
    return [
        case("embedding", nnf.embedding, I(6, 5, 2), F(6, 4)),
        case("embedding plain weight", nnf.embedding, I(6, 5, 2), P(6, 4)),
        case("embedding plain index", nnf.embedding, I(6, 5, sharded=False), F(6, 4)),
        case("embedding 0-d", nnf.embedding, I(6), F(6, 4)),
        case("embedding padding", lambda i, w: nnf.embedding(i, w, padding_idx=2), I(6, 5, 2), P(6, 4)),
        case("embedding frequency", lambda i, w: nnf.embedding(i, w, scale_grad_by_freq=True), I(3, 7), P(6, 4)),
        *[case(f"index_select {d}", lambda x, i, d=d: x.index_select(d, i), table, I(4, 5)) for d in (0, 1, -1, -2)],
        case("index_select plain", lambda x, i: x.index_select(0, i), table, I(6, 5, sharded=False)),
        case("index_select 0-d", lambda x, i: x.index_select(0, i), table, I(6)),
        case("x[i]", lambda x, i: x[i], table, i32),
        case("x[i] plain index", lambda x, i: x[i], table, I(6, 5, sharded=False)),
        case("plain[i]", lambda x, i: x[i], P(6, 4), I(6, 5)),
        case("x[i] negative", lambda x, i: x[i], table, I(6, 5, low_is_negative=True)),
        case("x[i] 2-D", lambda x, i: x[i], table, I(6, 3, 2)),
        case("x[:, i]", lambda x, i: x[:, i], table, I(4, 5)),
        case("x[i, j]", lambda x, i, j: x[i, j], table, I(4, 5), I(4, 5)),
        case("x[i, j] broadcast", lambda x, i, j: x[i, j], table, I(4, 5, 1), I(4, 3)),
        case("x[i, :, j]", lambda x, i, j: x[i, :, j], F(6, 4, 3), I(3, 5), I(3, 5)),
        case("x[:, i, j]", lambda x, i, j: x[:, i, j], F(3, 6, 4), I(4, 5), I(4, 5)),
        case("x[1, i]", lambda x, i: x[1, i], table, I(4, 5)),
        case("x[list]", lambda x: x[[0, 3, 3]], table),
        case("x[mask]", lambda x, m: x[m], F(5, 4), B(5)),
        case("x[mask] whole", lambda x, m: x[m], F(5, 4), B(5, 4)),
        case("x[mask] plain", lambda x, m: x[m], F(5, 4), B(5, sharded=False)),
        case("x[x > 0]", lambda x: x[x > 0].sum(), F(5, 4)),
        case("nonzero", lambda x: x.nonzero(), F(5, 4, kind="zeros")),
        case("masked_select", torch.masked_select, F(5, 4), B(5, 4)),
        *[case(f"gather {d}", lambda x, i, d=d: x.gather(d, i), table, I(4, 6, 4)) for d in (0, 1)],
        case("gather shorter 0", lambda x, i: x.gather(1, i), table, I(4, 3, 2)),
        case("gather shorter 1", lambda x, i: x.gather(0, i), table, I(6, 8, 2)),
        case("gather longer", lambda x, i: x.gather(1, i), table, I(4, 6, 9)),
        case("take_along_dim", lambda x, i: x.take_along_dim(i, 1), table, I(4, 6, 1)),
        case("take", torch.take, table, I(24, 5)),
        *[case(f"scatter {d}", lambda x, i, s, d=d: x.scatter(d, i, s), table,
               Input((4,) if d else (6,), "permutation", 4 if d else 6, grad=False, dtype=torch.int64), F(6, 4))
          for d in ()],
        case("scatter rows", lambda x, i, s: x.scatter(1, i, s), table, I(4, 6, 1), F(6, 1)),
        case("scatter number", lambda x, i: x.scatter(1, i, 2.5), table, I(4, 6, 1)),
        case("scatter number 0", lambda x, i: x.scatter(0, i, 2.5), table, I(6, 3, 2)),
        *[case(f"scatter_add {d}", lambda x, i, s, d=d: x.scatter_add(d, i, s), table, I(4, 6, 4), F(6, 4)) for d in (0, 1)],
        case("scatter_add shorter", lambda x, i, s: x.scatter_add(0, i, s), table, I(6, 3, 2), F(6, 4)),
        case("scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), table, I(4, 6, 4), F(6, 4)),
        *[case(f"index_add {d}", lambda x, i, s, d=d: x.index_add(d, i, s), table, I(4, 3), F(3, 4) if d == 0 else F(6, 3))
          for d in (0, 1)],
        case("index_add alpha", lambda x, i, s: x.index_add(0, i, s, alpha=-2), table, I(6, 9), F(9, 4)),
        case("index_copy", lambda x, i, s: x.index_copy(0, i, s), table,
             Input((6,), "permutation", 6, grad=False, dtype=torch.int64), F(6, 4)),
        case("index_fill", lambda x, i: x.index_fill(0, i, 2.0), table, I(6, 3)),
        case("index_put", lambda x, i, s: x.index_put((i,), s, accumulate=True), table, I(6, 9), F(9, 4)),
        case("index_put negative", lambda x, i, s: x.index_put((i - 3,), s, accumulate=True), table, I(6, 9), F(9, 4)),
        case("index_put columns", lambda x, i, s: x.index_put((None, i), s, accumulate=True), F(3, 6), I(6, 9), F(3, 9)),
        case("scatter_add longer", lambda x, i, s: x.scatter_add(0, i, s), table, I(6, 9, 4), F(9, 4)),
        case("index_add plain", lambda i, s: torch.ones(6, 4, dtype=s.dtype).index_add(0, i, s), I(6, 9), F(9, 4)),
        case("index_put broadcast", lambda x, i, s: x.index_put((i,), s, accumulate=True), table, I(6, 9), F(4)),
        case("segment sum", lambda x, i: torch.zeros(3, 4, dtype=x.dtype).index_add(0, i, x), F(7, 4), I(3, 7)),
        case("segment mean", _segment_mean, F(7, 4), I(3, 7)),
        *_by_rows(),
        case("one_hot", lambda i: nnf.one_hot(i, 6), I(6, 5)),
        case("bincount", lambda i: torch.bincount(i, minlength=7), I(6, 5)),
        case("isin", lambda i: torch.isin(i, torch.tensor([1, 3])), I(6, 5)),
        case("searchsorted", lambda x: torch.searchsorted(torch.linspace(-2, 2, 9, dtype=x.dtype), x), F(5, 4)),
        case("unique", lambda i: torch.unique(i), I(3, 7)),
    ]  # fmt: skip


def _by_rows() -> list[Case]:
    """Lookups and additions by index of whole rows, as graph networks have them."""
    table, source, index = F(6, 4), F(9, 4), I(6, 9)

    def over(index: Tensor, like: Tensor) -> Tensor:
        return index.unsqueeze(1).expand_as(like)

    def looked_up(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows = x.index_select(0, i).sin()
        sums = rows.new_zeros(6, 4).scatter_add_(0, over(j, rows), rows)
        most = rows.new_zeros(6, 4).scatter_reduce_(0, over(j, rows), rows, "amax", include_self=False)
        counts = rows.new_zeros(6).scatter_add_(0, j, torch.ones_like(rows[:, 0]))
        return sums / counts.clamp(min=1).unsqueeze(1) + most

    return [
        case("gather rows", lambda x, i: x.gather(0, i[:, None].expand(-1, 4)), table, index),
        case("gather columns", lambda x, i: x.gather(1, i.expand(6, -1)), table, I(4, 9)),
        case("scatter_add rows", lambda x, i, s: x.scatter_add(0, over(i, s), s), table, index, source),
        case("scatter number rows", lambda x, i: x.scatter(0, i[:, None].expand(-1, 4), 2.5), table, index),
        *[
            case(
                f"scatter_reduce rows {r} {own}",
                lambda x, i, s, r=r, own=own: x.scatter_reduce(0, over(i, s), s, r, include_self=own),
                *(table, index, source),
            )
            for r in ("sum", "mean", "prod", "amax", "amin")
            for own in (True, False)
        ],
        case("index_put 2-D", lambda x, i, s: x.index_put((i,), s, accumulate=True), table, I(6, 5, 2), F(5, 2, 4)),
        case("rows looked up and added", looked_up, table, index, index),
        case("embedding of sharded rows", lambda i, w: nnf.embedding(i, w, padding_idx=2).sin(), I(6, 9), table),
    ]


def _bags() -> list[Case]:
    table = F(6, 4)
    return [
        *[
            case(f"embedding_bag {m}", lambda i, w, m=m: nnf.embedding_bag(i, w, mode=m), I(6, 5, 3), table)
            for m in ("sum", "mean", "max")
        ],
        *[
            case(
                f"embedding_bag padding {m}",
                lambda i, w, m=m: nnf.embedding_bag(i, w, mode=m, padding_idx=-2),
                I(3, 5, 2),
                F(3, 4),
            )
            for m in ("sum", "mean", "max")
        ],
        *[
            case(
                f"embedding_bag {k} {m}", lambda i, w, m=m: nnf.embedding_bag(i, w, mode=m), I(6, 5, 3), F(6, 4, kind=k)
            )
            for m, k in (("mean", "nan"), ("max", "nan"), ("max", "inf"), ("max", "ties"))
        ],
        case("embedding_bag plain weight", nnf.embedding_bag, I(6, 5, 3), P(6, 4)),
        case(
            "embedding_bag weights",
            lambda i, w, s: nnf.embedding_bag(i, w, mode="sum", per_sample_weights=s),
            I(6, 5, 3),
            table,
            F(5, 3),
        ),
        case("embedding_bag half", lambda i, w: nnf.embedding_bag(i, w), I(6, 5, 3), F(6, 4, dtype=torch.bfloat16)),
        *(
            case(
                f"embedding_bag offsets {m} {p}",
                lambda i, w, m=m, p=p: nnf.embedding_bag(i, w, torch.tensor([0, 2, 2]), mode=m, padding_idx=p),
                I(6, 5),
                table,
            )
            for m in ("sum", "mean", "max")
            for p in (None, 1)
        ),
        case(
            "embedding_bag offsets weights",
            lambda i, w, s: nnf.embedding_bag(
                i, w, torch.tensor([0, 3, 5]), mode="sum", per_sample_weights=s, include_last_offset=True
            ),
            I(6, 5),
            table,
            F(5),
        ),
        case(
            "embedding_bag cut offsets",
            lambda i, w, o: nnf.embedding_bag(i, w, o.sort().values * 0),
            I(6, 5),
            table,
            I(3, 3),
        ),
        case(
            "embedding_bag frequency", lambda i, w: nnf.embedding_bag(i, w, scale_grad_by_freq=True), I(6, 5, 3), table
        ),
    ]


def _segment_mean(x: Tensor, i: Tensor) -> Tensor:
    total = torch.zeros(3, 4, dtype=x.dtype).index_add(0, i, x)
    count = torch.zeros(3, dtype=x.dtype).index_add(0, i, torch.ones_like(i, dtype=x.dtype))
    return total / count.clamp(min=1).unsqueeze(1)


# Losses


def _losses() -> list[Case]:
    cases = []
    for reduction in ("none", "mean", "sum"):
        for name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"):
            loss = getattr(nnf, name)
            cases.append(case(f"{name} {reduction}", lambda x, y, f=loss, r=reduction: f(x, y, reduction=r), _X, _X))
        classes, target = F(7, 5), I(5, 7)
        r = reduction
        cases += [
            case(f"cross_entropy {r}", lambda x, t, r=r: nnf.cross_entropy(x, t, reduction=r), classes, target),
            case(f"cross_entropy weight {r}", lambda x, t, w, r=r: nnf.cross_entropy(x, t, w, reduction=r), classes, target,
                 Input((5,), "positive", sharded=False, grad=False)),
            case(f"cross_entropy ignore_index {r}", lambda x, t, r=r: nnf.cross_entropy(x, t, ignore_index=2, reduction=r),
                 classes, target),
            case(f"cross_entropy smoothing {r}", lambda x, t, r=r: nnf.cross_entropy(x, t, label_smoothing=0.1, reduction=r),
                 classes, target),
            case(f"nll_loss {r}", lambda x, t, r=r: nnf.nll_loss(x, t, reduction=r), classes, target),
            case(f"binary_cross_entropy {r}", lambda x, y, r=r: nnf.binary_cross_entropy(x, y, reduction=r),
                 F(5, 4, kind="unit"), F(5, 4, kind="unit")),
            case(f"bce_with_logits {r}", lambda x, y, r=r: nnf.binary_cross_entropy_with_logits(x, y, reduction=r),
                 _X, F(5, 4, kind="unit")),
            case(f"kl_div {r}", lambda x, y, r=r: nnf.kl_div(x.log(), y, reduction=r), F(5, 4, kind="unit"), F(5, 4, kind="unit")),
        ]  # fmt: skip
    return [
        *cases,
        case("cross_entropy of images", nnf.cross_entropy, F(3, 5, 4), I(5, 3, 4)),
        case("cross_entropy of probabilities", nnf.cross_entropy, F(7, 5), F(7, 5, kind="unit")),
        case("cross_entropy 1-D", nnf.cross_entropy, F(5), I(5)),
        case("bce_with_logits weights", lambda x, y, w, p: nnf.binary_cross_entropy_with_logits(x, y, w, pos_weight=p), _X,
             F(5, 4, kind="unit"), F(4, kind="positive"), F(4, kind="positive")),
        case("bce weight", lambda x, y, w: nnf.binary_cross_entropy(x, y, w), F(5, 4, kind="unit"), F(5, 4, kind="unit"),
             F(4, kind="positive")),
        case("mse plain target", nnf.mse_loss, _X, Input((5, 4), sharded=False, grad=False)),
        case("kl_div batchmean", lambda x, y: nnf.kl_div(x.log(), y, reduction="batchmean"), F(5, 4, kind="unit"),
             F(5, 4, kind="unit")),
        case("gaussian_nll", nnf.gaussian_nll_loss, _X, _X, F(5, 4, kind="positive")),
        case("poisson_nll", nnf.poisson_nll_loss, _X, F(5, 4, kind="positive")),
        case("cosine_embedding", lambda x, y: nnf.cosine_embedding_loss(x, y, torch.ones(5)), _X, _X),
        case("margin_ranking", lambda x, y: nnf.margin_ranking_loss(x, y, torch.ones(5)), F(5), F(5)),
        case("triplet_margin", nnf.triplet_margin_loss, _X, _X, _X),
        case("loss plus penalty", lambda x, w: nnf.mse_loss(x, 2 * x.detach()) + 0.1 * w.norm(), _X, P(4)),
        case("accumulated", _accumulated, _X, P(4)),
    ]  # fmt: skip


def _accumulated(x: Tensor, w: Tensor) -> Tensor:
    total = x.sum()
    total += (x * w).sum()
    total += w.sum()
    total *= 2
    return total


# Attention


def _attention() -> list[Case]:
    attend = nnf.scaled_dot_product_attention
    q, k, v = F(2, 3, 5, 4), F(2, 3, 6, 4), F(2, 3, 6, 4)
    return [
        case("attention", attend, q, k, v),
        case("attention causal", lambda q, k, v: attend(q, k, v, is_causal=True), q, q, q),
        case("attention mask", lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, F(5, 6)),
        case("attention bool mask", lambda q, k, v, m: attend(q, k, v, attn_mask=m | True), q, k, v, B(5, 6)),
        case("attention plain mask", lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, P(5, 6)),
        case("attention scale", lambda q, k, v: attend(q, k, v, scale=0.3), q, k, v),
        case("attention grouped", lambda q, k, v: attend(q, k, v, enable_gqa=True), F(2, 4, 5, 4), F(2, 2, 6, 4), F(2, 2, 6, 4)),
        case("attention of nothing", lambda q, k, v, m: attend(q, k, v, attn_mask=m & False), q, k, v, B(5, 6)),
        case("attention causal of more keys", lambda q, k, v: attend(q, k, v, is_causal=True), q, k, v),
        case("attention causal of fewer keys", lambda q, k, v: attend(q, k, v, is_causal=True), k, q, q),
        case("attention masked heads", lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, B(2, 1, 5, 6)),
        case("attention half", attend, *[F(2, 3, 5, 4, dtype=torch.bfloat16)] * 3),
        case("attention 3-D", attend, F(3, 5, 4), F(3, 6, 4), F(3, 6, 4)),
        case("attention float32", attend, *[F(2, 3, 5, 4, dtype=torch.float32)] * 3),
        case("attention of one", _self_attention, F(2, 5, 4), P(12, 4), P(4, 4)),
        case("attention by hand", _attention_by_hand, F(2, 5, 4), F(2, 6, 4), F(2, 6, 4)),
    ]  # fmt: skip


def _self_attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    heads = [h.unflatten(-1, (2, 2)).transpose(1, 2) for h in nnf.linear(x, qkv).chunk(3, -1)]
    attended = nnf.scaled_dot_product_attention(*heads)
    return nnf.linear(attended.transpose(1, 2).flatten(2), out)


def _attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v


# Gradients of gradients, modules


def _penalty(x: Tensor, w: Tensor) -> Tensor:
    out = (nnf.linear(x, w).tanh() ** 2).sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return (gradient**2).sum() + out


def _hessian_product(x: Tensor, v: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x.softmax(0) * x).sum(), x, create_graph=True)
    return (gradient * v.detach()).sum()


class _ModuleCall:
    """A module as a function of its inputs and of plain parameters; a copy has a module of its own."""

    def __init__(self, module: torch.nn.Module, inputs: int) -> None:
        self._module, self._inputs = module, inputs
        self._names = [n for n, _ in module.named_parameters()]

    def __call__(self, *args: Tensor) -> Any:
        parameters = dict(zip(self._names, args[self._inputs :], strict=True))
        return torch.func.functional_call(self._module, parameters, args[: self._inputs])


def _module(make: Callable[[], torch.nn.Module], *inputs: Input) -> tuple[Run, tuple[Input, ...]]:
    torch.manual_seed(0)
    module = make().double()
    return _ModuleCall(module, len(inputs)), (*inputs, *[P(*p.shape) for p in module.parameters()])


def _deeper() -> list[Case]:
    nn = torch.nn
    modules = {
        "mlp": _module(lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 2)), F(2, 5, 4)),
        "encoder layer": _module(lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), F(2, 5, 4)),
        "multi-head attention": _module(lambda: _Attend(), F(2, 5, 4)),
        "embedding net": _module(lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)), I(6, 7)),
        "gru": _module(lambda: nn.GRU(3, 2), F(4, 2, 3)),
    }
    return [
        case("gradient penalty", _penalty, F(5, 4), P(3, 4)),
        case("hessian product", _hessian_product, F(5, 4), F(5, 4)),
        *[case(f"module {name}", run, *inputs) for name, (run, inputs) in modules.items()],
    ]


class _Attend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


# Along one dim, factories, the rest


def _gradient_of_cumprod(x: Tensor) -> Tensor:
    """Of which there is a gradient again."""
    return torch.autograd.grad(x.cumprod(0).sin().sum(), x, create_graph=True)[0]


def _scans() -> list[Case]:
    x = F(5, 4)
    return [
        *[
            case(f"{n} {d}", lambda x, n=n, d=d: getattr(torch, n)(x, d), x)
            for n in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "diff")
            for d in (0, 1)
            if n != "diff"
        ],
        *[case(f"cumprod zeros {d}", lambda x, d=d: x.cumprod(d), F(5, 4, kind="zeros")) for d in (0, 1)],
        case("cumprod complex", lambda x: x.cumprod(0), F(5, 4, dtype=torch.complex128)),
        case("cumprod dtype", lambda x: torch.cumprod(x, 0, dtype=torch.float64), F(5, 4, dtype=torch.float32)),
        case("cumprod ints", lambda a: torch.cumprod(a, dim=0), I(4, 5, 4)),
        case("cumprod twice", _gradient_of_cumprod, F(5, 4, kind="zeros")),
        *[case(f"cumulative_trapezoid {d}", lambda y, d=d: torch.cumulative_trapezoid(y, dim=d), x) for d in (0, 1)],
        case("cumulative_trapezoid x", lambda y, x: torch.cumulative_trapezoid(y, x, dim=0), x, F(5)),
        *[case(f"diff {d}", lambda x, d=d: torch.diff(x, dim=d), x) for d in (0, 1)],
        *[case(f"sort {d}", lambda x, d=d: x.sort(d), x) for d in (0, 1, -1)],
        case("sort stable", lambda x: x.sort(dim=0, stable=True, descending=True), F(5, 4, kind="ties")),
        case("sort 0-d", lambda x: x.sort(), F()),
        case("argsort", lambda x: x.argsort(0, descending=True), x),
        *[case(f"topk {d}", lambda x, d=d: x.topk(2, d), x) for d in (0, 1)],
        case("topk smallest", lambda x: x.topk(3, 0, largest=False), x),
        case("cumsum ints", lambda a: a.cumsum(0), I(9, 5, 4)),
        case("cumsum of a mask", lambda a: a.cumsum(1), B(5, 4)),
        case("cumsum 0-d", lambda x: x.cumsum(0), F()),
    ]


def _factories() -> list[Case]:
    x = F(5, 4)
    return [
        case("zeros_like", torch.zeros_like, x),
        case("ones_like", lambda x: torch.ones_like(x) * x, x),
        case("full_like", lambda x: torch.full_like(x, 2.5), x),
        case("empty_like", lambda x: torch.empty_like(x).fill_(1.0), x),
        case("zeros_like dtype", lambda x: torch.zeros_like(x, dtype=torch.int32), x),
        case("ones_like of transposed", lambda x: torch.ones_like(x.t()) + x.t(), x),
        case("new_zeros same", lambda x: x.new_zeros(5, 4) + x, x),
        case("new_zeros other", lambda x: x.new_zeros(3, 2), x),
        case("new_zeros alike", lambda x: x.new_zeros(5, 2), x),
        case("new_ones", lambda x: x.new_ones(x.shape) * x, x),
        case("new_full", lambda x: x.new_full((4, 5), 3.0), x),
        case("new_full 0-d", lambda x: x.new_full((), 3), x),
        case("new_empty", lambda x: x.new_empty(5, 4).zero_(), x),
        case("new_empty_strided", lambda x: x.new_empty_strided((5, 4), (4, 1)).zero_(), x),
        case("new_tensor", lambda x: x.new_tensor([1.0, 2.0, 3.0, 4.0]) * x, x),
        case("arange by shape", lambda x: torch.arange(x.shape[1], dtype=x.dtype) * x, x),
        case("dropout eval", lambda x: nnf.dropout(x, 0.5, training=False), x),
        case("dropout 0", lambda x: nnf.dropout(x, 0.0), x),
        case("dropout 1", lambda x: nnf.dropout(x, 1.0), x),
    ]


def _einsums() -> list[Case]:
    a, b, w = F(2, 5, 4), F(2, 4, 3), P(4, 3)
    modes, complex_weight = F(2, 3, 4, dtype=torch.complex128), F(3, 3, 4, dtype=torch.complex128)
    return [
        case("einsum of rows", lambda x, y: torch.einsum("nsc,cd->nsd", x, y), a, w),
        case("einsum turned", lambda x, y: torch.einsum("nsc,cd->dsn", x, y), a, w),
        case("einsum with a batch", lambda x, y: torch.einsum("nsc,ncd->nsd", x, y), a, b),
        case("einsum with dots", lambda x, y: torch.einsum("...c,cd->...d", x, y), a, w),
        case("einsum of both with dots", lambda x, y: torch.einsum("...sc,...cd->...ds", x, y), a, b),
        case("einsum to a number", lambda x, y: torch.einsum("nsc,nsc->", x, y), a, F(2, 5, 4)),
        case("einsum of outer products", lambda x, y: torch.einsum("nsc,m->mnsc", x, y), a, F(3)),
        case("einsum of complex numbers", lambda x, y: torch.einsum("bix,iox->box", x, y), modes, complex_weight),
        case("einsum of conjugates", lambda x, y: torch.einsum("bix,iox->box", x.conj(), y.conj()), modes, complex_weight),
        case("einsum of one", lambda x: torch.einsum("nsc->cn", x), a),
        case("einsum with a diagonal", lambda x, y: torch.einsum("nsc,nn->sc", x, y), a, F(2, 2)),
        case("einsum that broadcasts", lambda x, y: torch.einsum("nsc,nsd->ncd", x, y), a, F(2, 1, 3)),
        case("einsum that sums in one", lambda x, y: torch.einsum("nsc,cd->nd", x, y), a, w),
        case("einsum without an arrow", lambda x, y: torch.einsum("nsc,cd", x, y), a, w),
        case("einsum error", lambda x, y: torch.einsum("nsc,d->nsd", x, y.sum(0, keepdim=True)), a, w),
    ]  # fmt: skip


def _joined() -> list[Case]:
    """Views that flatten leading dims, and what ops do with them."""
    x, w = F(2, 5, 4), P(4, 3)
    return [
        case("flat rows times a matrix", lambda x, w: (x.view(-1, 4) @ w).view(2, 5, 3), x, w),
        case("flat rows", lambda x: x.view(-1, 4), x),
        case("flat", lambda x: x.reshape(-1).sin(), x),
        case("flat rows sliced", lambda x: x.view(-1, 4)[3:8] * 2, x),
        case("flat rows, one of them", lambda x: x.view(-1, 4)[6].sin(), x),
        case("flat rows summed up", lambda x: x.view(-1, 4).sum(0), x),
        case("flat rows added up one by one", lambda x: x.view(-1, 4).cumsum(0), x),
        case("softmax of flat rows", lambda x: x.view(-1, 4).softmax(0), x),
        case("places of the largest", lambda x: x.view(-1, 4).argmax(0), x),
        case("flat rows split", lambda x: torch.cat(x.view(-1, 4).split([3, 7])[::-1]), x),
        case("flat rows by index", lambda x: x.view(-1, 4)[torch.tensor([0, 9, 4])], x),
        case("flat rows by mask", lambda x: x.view(-1, 4)[torch.arange(10) % 3 == 0], x),
        case("flat rows plus others", lambda x, y: x.view(-1, 4) + y, x, F(10, 4)),
        case("flat rows and plain ones", lambda x: x.view(-1, 4) * torch.arange(40.0).view(10, 4), x),
        case("flat rows turned", lambda x: x.view(-1, 4).t().contiguous().sin(), x),
        case("flat rows padded", lambda x: nnf.pad(x.view(-1, 4), (0, 0, 1, 2)), x),
        case("flat rows flipped", lambda x: x.view(-1, 4).flip(0), x),
        case("flat rows sorted", lambda x: x.view(-1, 4).sort(0)[0], x),
        case("flat rows, put together otherwise", lambda x: x.view(-1, 4).view(5, 2, 4).sin(), x),
        case("flat rows with a dim in front", lambda x: x.view(1, -1, 4).transpose(0, 1).sin(), x),
        case("flat twice", lambda x: x.view(2, -1).view(-1).cos().view(10, 4), x),
        case("three dims flat", lambda x: x.view(-1, 2).exp().view(3, 10).sin(), F(3, 5, 2)),
        case("flat rows written to", lambda x: _writes_rows(x), x),
        case("a part of flat rows written to", lambda x: _writes_part(x), x),
        case("flat rows with themselves", lambda x: x.view(-1, 4) @ x.view(-1, 4).t(), x),
        case("flat rows, detached", lambda x: x.view(-1, 4).detach() + x.view(-1, 4), x),
        case("dropped out", lambda x: nnf.dropout(x.view(-1, 4), 0.0), x),
        case("windows of flat rows", lambda x: x.view(-1, 4).unfold(0, 3, 2).sin(), x),
    ]  # fmt: skip


def _writes_rows(x: Tensor) -> Tensor:
    y = x * 1
    y.view(-1, 4).mul_(2)
    y.view(-1, 4)[:, 1] = 3
    return y


def _writes_part(x: Tensor) -> Tensor:
    y = x * 1
    y.view(-1, 4)[2:7].add_(1)
    y.view(-1, 4)[4] = 0
    return y * 2


def _fourier() -> list[Case]:
    modes, image = F(5, 4, dtype=torch.complex128), F(3, 5, 4)
    return [
        case("fft", lambda x: torch.fft.fft(x, dim=0), F(5, 4)),
        case("rfft", lambda x: torch.fft.rfft(x), F(5, 4)),
        case("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), F(5, 4)),
        case("fft of complex numbers", lambda x: torch.fft.fft(x, dim=0, norm="ortho"), modes),
        case("ifft2", lambda x: torch.fft.ifft2(x), modes),
        case("irfft of few modes", lambda x: torch.fft.irfft(x, n=5, dim=1), modes),
        case("rfft2", lambda x: torch.fft.rfft2(x), image),
        case("rfft2 of other dims", lambda x: torch.fft.rfft2(x, dim=(2, 0), norm="ortho"), image),
        case("rfft2 of other sizes", lambda x: torch.fft.rfft2(x, s=(3, 6)), image),
        case("rfftn", lambda x: torch.fft.rfftn(x, norm="forward"), image),
        case("rfft error", lambda x: torch.fft.rfft(x, dim=4), image),
        case("rfft of nothing error", lambda x: torch.fft.rfft(x, n=0), image),
        case("irfft2", lambda x: torch.fft.irfft2(x, s=(4, 5), dim=(0, 1)), modes),
        case("hfft", lambda x: torch.fft.hfft(x, dim=0), modes),
        case("fftn of one number", lambda x: torch.fft.fftn(x), F(1, 1)),
        case("there and back", lambda x: torch.fft.irfft2(torch.fft.rfft2(x).sin(), s=(5, 4)) * x, image),
        case("fftshift", lambda x: torch.fft.fftshift(torch.fft.fft2(x)), image),
    ]


def _with_diagonals(x: Any) -> Any:
    x.diagonal(0, 1, 2).mul_(3)
    x.diagonal(-1, 2, 1)[1:] = 1
    return x


def _batches_of_matrices() -> list[Case]:
    def of(function: Any, rows: int = 4, columns: int = 4) -> Any:
        """A function of matrices that are far from singular, and apart from one another."""
        spread = torch.diag(torch.linspace(6.0, 9.0, max(rows, columns), dtype=torch.float64))[:rows, :columns]
        return lambda x, *rest: function(x + spread.to(x.dtype), *rest)

    def positive(function: Any) -> Any:
        return of(lambda x, *rest: function(x @ x.mT, *rest))

    x, right = F(5, 4, 4), F(5, 4, 3)
    return [
        case("inverses", of(torch.linalg.inv), x),
        case("determinants", of(torch.linalg.det), x),
        case("their logarithms", of(lambda x: torch.linalg.slogdet(x)[1]), x),
        case("solve each", of(torch.linalg.solve), x, right),
        case("solve each with a vector", of(torch.linalg.solve), x, F(5, 4)),
        case("determinants of transposes", of(lambda x: torch.linalg.det(x.mT) * x.sum((1, 2))), x),
        case("their logarithms, transposed", of(lambda x: torch.linalg.slogdet(x.mT)[1]), x),
        case("determinants of two batch dims", of(torch.linalg.det, 2, 2), F(3, 2, 2, 2)),
        case("solve each transpose", of(lambda x, b: torch.linalg.solve(x.mT, b)), x, right),
        case("solve each from the right", of(lambda x, b: torch.linalg.solve(x, b.mT, left=False)), x, right),
        case("solve each with all vectors", of(lambda x, b: torch.linalg.solve(x, b.unsqueeze(-1))), x, F(5, 4)),
        case("solve triangles", of(lambda x, b: torch.linalg.solve_triangular(x.triu(), b, upper=True)), x, right),
        case("cholesky of each", positive(torch.linalg.cholesky), x),
        case(
            "cholesky_solve of each", positive(lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(x))), x, right
        ),
        case("qr of each", of(lambda x: torch.linalg.qr(x)[1].abs(), 4, 3), F(5, 4, 3)),
        case("qr without q", of(lambda x: torch.linalg.qr(x.detach(), mode="r")[1].abs(), 4, 3), F(5, 4, 3)),
        case("singular values", of(torch.linalg.svdvals, 4, 3), F(5, 4, 3)),
        case("eigenvalues", positive(torch.linalg.eigvalsh), x),
        case("eigenvectors", positive(lambda x: torch.linalg.eigh(x)[1].square()), x),
        case("lu", of(lambda x: torch.linalg.lu(x)[2]), x),
        case("lu_factor and lu_solve", of(lambda x, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b)), x, right),
        case("pseudoinverses", of(torch.linalg.pinv, 4, 3), F(5, 4, 3)),
        case("exponentials", lambda x: torch.linalg.matrix_exp(x / 4), x),
        case("inverses of two batch dims", of(torch.linalg.inv, 2, 2), F(3, 2, 2, 2)),
        case("solve all with one", of(torch.linalg.solve), F(4, 4), right),
    ]


def _without_rules() -> list[Case]:
    square = F(4, 4, kind="regular")
    image = F(3, 2, 6, 5)
    return [
        case("inv", torch.linalg.inv, square),
        case("det", torch.linalg.det, square),
        case("solve", torch.linalg.solve, square, F(4, 3)),
        case("svdvals", torch.linalg.svdvals, F(5, 4)),
        case("qr", lambda x: torch.linalg.qr(x)[1].abs(), F(5, 4)),
        case("cholesky", lambda x: torch.linalg.cholesky(x @ x.t() + 4 * torch.eye(4, dtype=x.dtype)), F(4, 3)),
        case("conv2d", nnf.conv2d, image, P(4, 2, 3, 3), P(4)),
        case("conv2d padded", lambda x, w: nnf.conv2d(x, w, padding=1, stride=2), image, P(4, 2, 3, 3)),
        case("conv1d", nnf.conv1d, F(3, 2, 7), P(4, 2, 3)),
        case("conv_transpose2d", nnf.conv_transpose2d, image, P(2, 3, 2, 2)),
        case("max_pool2d", lambda x: nnf.max_pool2d(x, 2), image),
        case("avg_pool2d", lambda x: nnf.avg_pool2d(x, 2), image),
        case("adaptive_avg_pool2d", lambda x: nnf.adaptive_avg_pool2d(x, 2), image),
        case("interpolate", lambda x: nnf.interpolate(x, scale_factor=2, mode="bilinear"), image),
        case("pixel_shuffle", lambda x: nnf.pixel_shuffle(x, 2), F(2, 4, 3, 3)),
        case("unfold image", lambda x: nnf.unfold(x, 2), image),
        case("grid_sample", lambda x, g: nnf.grid_sample(x, g.tanh(), align_corners=False), image, F(3, 4, 4, 2)),
        case("kron", torch.kron, F(3, 2), F(2, 3)),
        case("cross", torch.linalg.cross, F(5, 3), F(5, 3)),
        case("cov", torch.cov, F(4, 5)),
        case("block_diag", torch.block_diag, F(3, 2), F(2, 3)),
        case("histc", lambda x: torch.histc(x.detach(), 5), F(5, 4)),
        case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), F(5, 4)),
        case("matrix_exp", torch.matrix_exp, F(3, 3)),
        case("item", lambda x: x.item() * 2, F()),
        case("item of sum", lambda x: x.sum().item(), F(5, 4)),
        case("item of max", lambda x: x.max().item(), F(5, 4)),
        case("float of mean", lambda x: float(x.mean()), F(5, 4)),
        case("bool of any", lambda x: bool((x > 0).any()), F(5, 4)),
        case("tolist", lambda x: x.detach().sum(1).tolist(), F(5, 4)),
        case("equal", lambda x, y: (torch.equal(x, y), torch.equal(x, x)), F(5, 4), F(5, 4)),
        case("allclose", lambda x, y: (torch.allclose(x, y), torch.allclose(x, x + 0)), F(5, 4), F(5, 4)),
        case("len and shape", lambda x: (len(x), x.numel(), x.dim(), tuple(x.shape), x.size(1), x.stride()), F(5, 4)),
        case("iteration", lambda x: sum(row.sum() * i for i, row in enumerate(x)), F(5, 4)),
        case("item error", lambda x: x.item(), F(5, 4)),
    ]  # fmt: skip


def _outs() -> list[Case]:
    return [
        case("out add", lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty_like(x)), _X, _X),
        case("out mm", lambda x, y: torch.mm(x.detach(), y.detach(), out=x.new_empty(x.shape[0], y.shape[1])), F(5, 4), F(4, 3)),
        case("out sum", lambda x: torch.sum(x.detach(), 0, out=x.new_empty(x.shape[1])), F(5, 4)),
        case("out max", lambda x: torch.max(x.detach(), 0, out=(x.new_empty(n := x.shape[1]), x.new_empty(n, dtype=torch.int64))),
             F(5, 4)),
        case("out cat", lambda x, y: torch.cat([x.detach(), y.detach()], out=x.new_empty(2 * x.shape[0], x.shape[1])), _X, _X),
        case("out cast", lambda x: torch.exp(x.detach(), out=torch.empty_like(x, dtype=torch.float32)), _X),
        case("out cast error", lambda x: torch.exp(x.detach(), out=torch.empty_like(x, dtype=torch.int64)), _X),
        case("out where", lambda c, x, y: torch.where(c, x.detach(), y.detach(), out=torch.empty_like(x)), B(5, 4), _X, _X),
        case("out used", _out_used, _X),
        case("out with gradient error", lambda x: torch.exp(x, out=torch.empty_like(x)), _X),
        case("out plain", lambda x: torch.exp(x.detach(), out=torch.empty(x.shape, dtype=x.dtype)), _X,
             refuses="into a plain tensor"),
        case("out cumsum", lambda x: torch.cumsum(x.detach(), 0, out=torch.empty_like(x)), _X),
        case("out softmax", lambda x: torch.softmax(x.detach(), 0, out=torch.empty_like(x)), _X),
    ]  # fmt: skip


def _out_used(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x.detach())
    torch.mul(x.detach(), 2, out=out)
    return out, out + 1


def _masks() -> list[Case]:
    return [
        case("x[:, mask]", lambda x, m: x[:, m], F(3, 5, 2), B(5)),
        case("x[:, mask] plain", lambda x, m: x[:, m], F(3, 5, 2), B(5, sharded=False)),
        case("plain[:, mask]", lambda x, m: x[:, m], P(3, 5, 2), B(5)),
        case("x[:, mask] 2-D", lambda x, m: x[:, m], F(3, 5, 2, 2), B(5, 2)),
        case("x[:, mask] of batch 1", lambda x, m: x[m], F(1, 7, 2), B(1, 7)),
        case("x[mask] of two dims", lambda x, m: x[m], F(3, 5, 2), B(3, 5)),
        case("x[mask] of three dims", lambda x, m: x[m], F(2, 3, 5, 2), B(2, 3, 5)),
        case("x[0, mask]", lambda x, m: x[0, m], F(3, 5, 2), B(5)),
        case("x[:, mask, 0]", lambda x, m: x[:, m, 0], F(3, 5, 2), B(5)),
        case("x[mask, 1:]", lambda x, m: x[m, 1:], F(5, 4), B(5)),
        case("x[..., mask]", lambda x, m: x[..., m], F(3, 2, 5), B(5)),
        case("x[None, mask, None]", lambda x, m: x[None, m, None], F(5, 4), B(5)),
        case("x[1:, mask]", lambda x, m: x[1:, m], F(3, 5), B(5)),
        case("x[mask, i]", lambda x, m: x[m, m.nonzero()[:, 0] % 4], F(5, 4), B(5)),
        case("x[0/1 mask]", lambda x, m: x[:, m.to(torch.uint8)], F(3, 5), B(5)),
        case("x[no mask]", lambda x, m: x[:, m & False], F(3, 5), B(5)),
        case("x[all mask]", lambda x, m: x[:, m | True], F(3, 5), B(5)),
        case("x[mask] whose elements are written", lambda x, m, y: x.index_put((m,), y[m]), F(3, 5, 2), B(3, 5), F(3, 5, 2)),
        case("x[mask] whose elements are added", lambda x, m, y: x.index_put((m,), y, accumulate=True), F(5, 4), B(5), F(4)),
        case("x[mask] of one value", lambda x, m, y: x.index_put((torch.ones_like(m) & m,), y), F(5, 4), B(5), F()),
        case("masked_scatter", torch.masked_scatter, F(5, 4), B(5, 4), F(4, 5)),
        case("masked_scatter of rows", torch.masked_scatter, F(1, 5, 4), B(1, 5, 1), F(5, 4)),
        case("masked_scatter of expanded rows", lambda x, m, y: x.masked_scatter(m.expand(1, 5, 4), y), F(1, 5, 4), B(1, 5, 1), F(7, 4)),
        case("masked_scatter of a batch", torch.masked_scatter, F(3, 5, 2), B(3, 5, 1), F(31)),
        case("masked_scatter of columns", torch.masked_scatter, F(3, 5), B(5), F(5, 3)),
        case("masked_scatter from plain", torch.masked_scatter, F(1, 5, 4), B(1, 5, 1), P(5, 4)),
        case("masked_select of columns", torch.masked_select, F(3, 5), B(5)),
        case("masked_select of rows", torch.masked_select, F(3, 5, 2), B(5, 1)),
        case("masked_select of what is broadcast", torch.masked_select, F(5), B(3, 5)),
        case("where of a mask", lambda m: torch.where(m), B(3, 5)),
        case("argwhere", torch.argwhere, B(3, 5, 2)),
        case("nonzero of numbers", lambda x: x.nonzero(), F(3, 5, 2, kind="zeros")),
    ]  # fmt: skip


FAMILIES: dict[str, list[Case]] = {
    "unary": _unary(),
    "binary": _binary(),
    "casts": _casts(),
    "in-place": _inplace(),
    "products": _products(),
    "reductions": _reductions(),
    "softmax and norms": _softmaxes(),
    "joins": _joins(),
    "views": _views(),
    "masks": _masks(),
    "selection": _selection(),
    "bags": _bags(),
    "losses": _losses(),
    "attention": _attention(),
    "deeper": _deeper(),
    "scans": _scans(),
    "factories": _factories(),
    "Fourier transforms": _fourier(),
    "einsums": _einsums(),
    "flattened dims": _joined(),
    "batches of matrices": _batches_of_matrices(),
    "without rules": _without_rules(),
    "out": _outs(),
}
"""Cases by family."""
