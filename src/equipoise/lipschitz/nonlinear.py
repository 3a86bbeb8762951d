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

from equipoise.core import flat_tensors, float64, gamma, inflate
from equipoise.lipschitz.rules import Call, Signal
from equipoise.lipschitz.rules.pointwise import STEEP
from equipoise.lipschitz.rules.shapes import SOFTMAX
from equipoise.lipschitz.values import aten_name, exactly

#: values, and bounds of how far the real ones may be off
Near = tuple[Tensor, Tensor]
Values = Mapping[fx.Node, Tensor]
Rule = Callable[..., Near]


def _rounded(value: Tensor, error: Tensor, size: Tensor, operations: int = 0) -> Near:
    """With the rounding of some operations on numbers of this size, and of a few elementary functions."""
    rounding = gamma(operations + 64, torch.float64) * size
    # and more than underflow can take off
    return value, inflate((error + rounding) * (1 + 1e-9)) + 1e-290


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


def steep(function: Callable[[Tensor], Tensor], a: Near) -> Near:
    """The values of a function that grows or falls on either side of 0.

    Args:
        function: of every entry, off by a few units in the last place.
        a: its argument.
    """
    x, e = a
    reach = e + 2.0**-50 * x.abs()
    value = function(x)
    inner = torch.minimum(torch.maximum(torch.zeros_like(x), x - reach), x + reach)
    others = torch.stack([function(t) for t in (x - reach, x + reach, inner)])
    return _rounded(value, (others - value).abs().amax(0), others.abs().amax(0) + value.abs())


def _log_sum(a: Near, dims: Any) -> Near:
    """The logarithm of the sum of exponentials, 1-Lipschitz in the largest entry: n terms, one of which is 1."""
    x, e = a
    top = x.amax(dims, keepdim=True)
    value = top + (x - top).exp().sum(dims, keepdim=True).log()
    n = 2 * x.numel() // top.numel()
    return _rounded(value, e.amax(dims, keepdim=True), top.abs() + value.abs() + 2, n)


def _log_softmax(a: Near, dims: Any) -> Near:
    value, error = _log_sum(a, dims)
    return _plus(a, (-value, error))


def _softmax(call: Call, a: Near) -> Near:
    x, e = a
    # what is masked has a weight of 0, up to underflow
    x = torch.maximum(x, x.amax(call["dim"], keepdim=True) - 1e4)
    value, error = steep(torch.exp, _log_softmax((x, e), call["dim"]))
    return value, error.clamp_max(1)


def _whole_log_sum(call: Call, a: Near) -> Near:
    value, error = _log_sum(a, call["dim"])
    return value.reshape(call.shape), error.reshape(call.shape)


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
    dims = tuple(range(-len(shape), 0))
    centred = "rms" not in aten_name(call.node)
    return _scaled(call, _normalised(x, dims, float(call["eps"]), centred), shape)


def _group_norm(call: Call, x: Near) -> Near:
    value = x[0]
    groups = call.get("num_groups", value.shape[1])
    split = [t.reshape(len(value), groups, -1) for t in x]
    y, e = _normalised((split[0], split[1]), (-1,), float(call["eps"]))
    shape = [-1, *[1] * (value.dim() - 2)]
    return _scaled(call, (y.reshape(value.shape), e.reshape(value.shape)), shape)


def _gated(call: Call, x: Near) -> Near:
    a, b = zip(*(t.chunk(2, call["dim"]) for t in x), strict=True)
    return _times(a, steep(torch.sigmoid, b))


def _entrywise(function: Callable[[Tensor], Tensor]) -> Rule:
    return lambda call, x: steep(function, x)


_LOG_SOFTMAX = ("log_softmax.int", "_log_softmax.default")
#: rules of operations on their first operand
_OF_ONE: dict[str, Rule] = {
    "pow.Tensor_Scalar": lambda call, x: steep(lambda t: t.pow(call["exponent"]), x),
    "logsumexp.default": _whole_log_sum,
    "glu.default": _gated,
    "layer_norm.default": _layer_norm,
    "native_layer_norm.default": _layer_norm,
    "rms_norm.default": _layer_norm,
    "group_norm.default": _group_norm,
    "instance_norm.default": _group_norm,
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(_LOG_SOFTMAX, lambda call, x: _log_softmax(x, call["dim"])),
    **{f"{name}.default": _entrywise(getattr(torch, name)) for name in STEEP},
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
    return name in (*_OF_ONE, *_OF_TWO, *_MOVED)


def near(call: Call, values: Values, errors: Values) -> Near:
    """The node for operands that are off by at most these errors; an error is infinite or NaN where nothing is known.

    Args:
        call: a node that is `known`.
        values: of its operands.
        errors: of its operands.
    """
    name = aten_name(call.node)
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
