"""Products of branches, softmax, normalisations and steep functions in float64: values, and how far the real ones may be off.

`near` takes every operand with a bound of its error, entry by entry, and returns the result with one: for any operands within
those errors, and with the rounding of its own evaluation. So it bounds the rounding of a forward pass, and, with half-widths in
the place of errors, encloses a node on a ball. With q = a/b, y = softmax(x), E the largest error of a row,

    |ab − a'b'| ≤ |a|·e_b + e_a·(|b| + e_b),     |q − q'| ≤ (e_a + |q|·e_b)/(|b| − e_b),     |y − y'| ≤ y·(exp(e + E) − 1),

and a normalisation is the quotient of `c = x − mean(x)` and `σ = √(mean(c²) + ε)`, with `|σ − σ'| ≤ ‖e_c‖₂/√n` and σ' ≥ √ε.
A function that grows or falls on either side of 0 is farthest from its value at an end of the interval, or at 0 inside of it.
Model of arithmetic: as in `rounding`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.modules import flat_tensors
from equipoise.core.precision import float64, gamma, inflate
from equipoise.lipschitz.rules import Call, Signal
from equipoise.lipschitz.rules.shapes import SOFTMAX
from equipoise.lipschitz.values import aten_name, exactly, first_of

#: values, and bounds of how far the real ones may be off
Near = tuple[Tensor, Tensor]
Values = Mapping[fx.Node, Tensor]
Rule = Callable[..., Near]
_TINY = 1e-290  # more than underflow can take off


def _rounded(value: Tensor, error: Tensor, size: Tensor, operations: int = 0) -> Near:
    """With the rounding of some operations on numbers of this size, and of a few elementary functions."""
    rounding = gamma(operations + 64, torch.float64) * size
    return value, inflate((error + rounding) * (1 + 1e-9)) + _TINY


def _plus(a: Near, b: Near) -> Near:
    (x, ex), (y, ey) = a, b
    return _rounded(x + y, ex + ey, (x + y).abs())


def _times(a: Near, b: Near) -> Near:
    (x, ex), (y, ey) = a, b
    return _rounded(x * y, x.abs() * ey + ex * (y.abs() + ey), (x * y).abs())


def _over(a: Near, b: Near) -> Near:
    (x, ex), (y, ey) = a, b
    q, least = x / y, y.abs() * (1 - 2.0**-50) - ey
    error = torch.where(least > 0, (ex + q.abs() * ey) / least, math.inf)
    return _rounded(q, error, q.abs())


def _matrix_product(a: Near, b: Near) -> Near:
    (x, ex), (y, ey) = a, b
    error = x.abs() @ ey + ex @ (y.abs() + ey)
    return _rounded(x @ y, error, x.abs() @ y.abs(), x.shape[-1])


def _steep(function: Callable[[Tensor], Tensor], a: Near) -> Near:
    """Of a function that grows or falls on either side of 0."""
    x, e = a
    reach = e + 2.0**-50 * x.abs()
    value = function(x)
    inner = torch.minimum(torch.maximum(torch.zeros_like(x), x - reach), x + reach)
    others = torch.stack([function(t) for t in (x - reach, x + reach, inner)])
    return _rounded(value, (others - value).abs().amax(0), others.abs().amax(0) + value.abs())


def _softmax(kind: str, a: Near, dims: Any) -> Near:
    """Softmax, its logarithm, or the logarithm of the sum of exponentials.

    A term exp(d) is off by at most |d| units, and a sum of n terms, one of which is 1, by 2n more.
    """
    x, e = a
    most, top = e.amax(dims, keepdim=True), x.amax(dims, keepdim=True)
    lowered = x - top
    total = lowered.exp().sum(dims, keepdim=True)
    n = 2 * x.numel() // top.numel()
    if kind == "logsumexp":
        value = top + total.log()
        return _rounded(value, most, top.abs() + value.abs() + 2, n)
    if kind == "log_softmax":
        value = lowered - total.log()
        return _rounded(value, e + most, lowered.abs() + value.abs() + 2, n)
    value = lowered.exp() / total
    error = (value * torch.expm1(e + most)).nan_to_num(nan=1.0, posinf=1.0).clamp_max(1)
    # exp is 0 beyond
    return _rounded(value, error, value * (lowered.abs().clamp_max(800) + 2), n)


def _normalised(a: Near, dims: tuple[int, ...], eps: float, centred: bool = True) -> Near:
    """`(x − mean)/√(var + ε)` over some dimensions, or x over its root mean square."""
    x, e = a
    n = math.prod(x.shape[d] for d in dims)
    if centred:
        size = x.abs() + x.abs().mean(dims, keepdim=True)
        shifted = x - x.mean(dims, keepdim=True)
        x, e = _rounded(shifted, e + e.mean(dims, keepdim=True), size, n)
    spread = (x.square().mean(dims, keepdim=True) + eps).sqrt()
    moved = e.square().mean(dims, keepdim=True).sqrt()
    off = _rounded(spread, moved, spread, n)[1] + 1e-150
    least = (spread - off).clamp_min(math.sqrt(eps)) * (1 - 2.0**-50)
    y = x / spread
    return _rounded(y, (e + y.abs() * off) / least, y.abs())


def _scaled(call: Call, y: Near, shape: Sequence[int]) -> Near:
    """`y·weight + bias`, where there are any, with constants of this shape."""
    weight, bias = call.constant("weight"), call.constant("bias")
    if weight is not None:
        c = float64(weight).reshape(shape)
        y = _times(y, (c, torch.zeros_like(c)))
    if bias is None:
        return y
    c = float64(bias).reshape(shape)
    return _plus(y, (c, torch.zeros_like(c)))


def _layer_norm(call: Call, x: Near) -> Near:
    shape = call["normalized_shape"]
    eps = torch.finfo(call.x.dtype).eps if call["eps"] is None else float(call["eps"])
    dims = tuple(range(-len(shape), 0))
    return _scaled(call, _normalised(x, dims, eps, "rms" not in aten_name(call.node)), shape)


def _group_norm(call: Call, x: Near) -> Near:
    value = x[0]
    groups = call.get("num_groups", value.shape[1])
    split = [t.reshape(len(value), groups, -1) for t in x]
    y, e = _normalised((split[0], split[1]), (-1,), float(call["eps"]))
    shape = [-1, *[1] * (value.dim() - 2)]
    return _scaled(call, (y.reshape(value.shape), e.reshape(value.shape)), shape)


def _gated(call: Call, x: Near) -> Near:
    a, b = zip(*(t.chunk(2, call["dim"]) for t in x), strict=True)
    return _times(a, _steep(torch.sigmoid, b))


def _unary(function: Callable[[Tensor], Tensor]) -> Rule:
    return lambda call, x: _steep(function, x)


def _exponential(kind: str) -> Rule:
    def rule(call: Call, x: Near) -> Near:
        value, error = _softmax(kind, x, call["dim"])
        return value.reshape(call.shape), error.reshape(call.shape)

    return rule


#: rules of operations on their first operand
_OF_ONE: dict[str, Rule] = {
    "square.default": _unary(torch.square),
    "exp.default": _unary(torch.exp),
    "sqrt.default": _unary(torch.sqrt),
    "rsqrt.default": _unary(torch.rsqrt),
    "reciprocal.default": _unary(torch.reciprocal),
    "log.default": _unary(torch.log),
    "pow.Tensor_Scalar": lambda call, x: _steep(lambda t: t.pow(call["exponent"]), x),
    "log_softmax.int": _exponential("log_softmax"),
    "_log_softmax.default": _exponential("log_softmax"),
    "logsumexp.default": _exponential("logsumexp"),
    "glu.default": _gated,
    **{name: _exponential("softmax") for name in SOFTMAX},
    **dict.fromkeys(
        ("layer_norm.default", "native_layer_norm.default", "rms_norm.default"), _layer_norm
    ),
    **dict.fromkeys(("group_norm.default", "instance_norm.default"), _group_norm),
}
#: and on the first two
_OF_TWO: dict[str, Callable[[Near, Near], Near]] = {
    "add.Tensor": _plus,
    "mul.Tensor": _times,
    "div.Tensor": _over,
    "matmul.default": _matrix_product,
    "bmm.default": _matrix_product,
}
_LENGTHS = ("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
#: entries moved, chosen or overwritten by constant masks and positions
_MOVED = (
    "where.self", "masked_fill.Scalar", "masked_fill.Tensor", "index.Tensor", "gather.default", "index_select.default",
    "slice_scatter.default", "select_scatter.default", "copy.default", "select.int", "slice.Tensor",
)  # fmt: skip


def known(call: Call) -> bool:
    """Whether `near` takes this operation."""
    name = aten_name(call.node)
    if call.get("alpha", 1) != 1 or any(
        t.is_complex() for t in flat_tensors(call.node.meta["val"])
    ):
        return False
    if name in _LENGTHS:
        return call.get("ord", call.get("p")) in (None, 2, math.inf)
    return name in _OF_ONE or name in _OF_TWO or name in _MOVED


def near(call: Call, values: Values, errors: Values) -> Near:
    """The node for operands that are off by at most these errors; an error is infinite or NaN where nothing is known.

    Args:
        call: the node.
        values: of its operands.
        errors: of its operands.
    """
    name = aten_name(call.node)
    if not known(call):
        value = first_of(exactly(call.node, values, call.lookup)).double()
        return value, torch.full_like(value, math.inf)
    if name in _LENGTHS:
        # |‖a‖ − ‖b‖| ≤ ‖a − b‖
        value, error = (exactly(call.node, t, call.lookup) for t in (values, errors))
        return _rounded(value, error, value + error, call.x.numel)
    if name in _MOVED:
        value = exactly(call.node, values, call.lookup)
        return value, exactly(call.node, errors, lambda n: _unmoved(call.lookup(n))).clamp_min(0)

    def operand(given: Any) -> Near:
        if isinstance(given, Signal):
            return values[given.node], errors[given.node]
        c = float64(given)
        return c, torch.zeros_like(c)

    operands = list(call.arguments.values())
    if name in _OF_TWO:
        return _OF_TWO[name](operand(operands[0]), operand(operands[1]))
    return _OF_ONE[name](call, operand(operands[0]))


def _unmoved(constant: Any) -> Any:
    """A constant is off by nothing; masks and positions stay what they are."""
    floats = isinstance(constant, Tensor) and constant.is_floating_point()
    return torch.zeros_like(constant) if floats else constant
