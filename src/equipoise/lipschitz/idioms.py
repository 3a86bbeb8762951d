"""Activations written out, as people and exporters do.

`x·σ(βx)`, `x·(1 + erf(kx))/2`, `x·(1 + tanh(ax + bx³))/2` with the constants of GELU, `x·tanh(softplus(x))`, log of a softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from equipoise.lipschitz.values import functional

_aten = torch.ops.aten
#: an operation, its arguments and its keywords; None stands for the result of the one before
Chain = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]
#: of a logarithm that is one operation with what it is taken of
_LOGS = {_aten.sigmoid.default: _aten.log_sigmoid.default, _aten.softmax.int: _aten.log_softmax.int}
#: factors out of this range are left alone
_SMALLEST, _LARGEST = 1e-6, 1e6
#: a and b of GELU's tanh form, by the power that they stand before
_TANH_FORM = {1: math.sqrt(2 / math.pi), 3: 0.044715 * math.sqrt(2 / math.pi)}


def idiom(node: fx.Node) -> Chain | None:
    """The operations that a written-out activation is."""
    if node.op != "call_function" or node.kwargs:
        return None
    match functional(node.target):
        case _aten.mul.Tensor | _aten.div.Tensor:
            return _gated(node)
        case _aten.log.default:
            inner: Any = node.args[0]
            return [(_LOGS[_target(inner)], inner.args, {})] if _target(inner) in _LOGS and not inner.kwargs else None
        case _aten.where.self:
            return _softplus(*node.args)
    return None


def _gated(node: fx.Node) -> Chain | None:
    """`c·x·g(kx)` for g = σ, 1 + erf, GELU's 1 + tanh, tanh∘softplus: by φ(x) = x·g(x) it is `(c/k)·φ(kx)`."""
    scale, factors = _product(node)
    if len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        found = _gate(x, gate)
        if found is not None:
            operation, keywords, inner, outer = found
            chain: Chain = [(operation, (x,), keywords)]
            if inner != 1:
                chain = [(_aten.mul.Tensor, (x, inner), {}), (operation, (None,), keywords)]
            return chain if scale * outer == 1 else [*chain, (_aten.mul.Tensor, (None, scale * outer), {})]
    return None


def _gate(x: fx.Node, gate: fx.Node) -> tuple[Any, dict[str, Any], float, float] | None:
    """φ and its keywords with k and the factor outside, where `gate` is g(kx)."""
    if gate.kwargs:
        return None
    target, inner = _target(gate), gate.args[0] if gate.args else None
    if target is _aten.sigmoid.default and (k := _multiple(inner, x)) is not None:
        return _aten.silu.default, {}, k, 1 / k
    if target is _aten.tanh.default and _target(inner) is _aten.softplus.default and inner.args == (x,):  # type: ignore[union-attr]
        return _aten.mish.default, {}, 1.0, 1.0
    if target not in (_aten.add.Tensor, _aten.add.Scalar) or gate.args[1] != 1:
        return None
    if _target(inner) is _aten.tanh.default and _is_tanh_form(inner.args[0], x):  # type: ignore[union-attr]
        return _aten.gelu.default, {"approximate": "tanh"}, 1.0, 2.0
    if _target(inner) is _aten.erf.default:
        k = _multiple(inner.args[0], x)  # type: ignore[union-attr]
        if k is not None:  # x·(1 + erf(kx)) = 2·GELU(sx)/s for s = k·√2, and the slopes of GELU(sx)/s are those of GELU
            s = k * math.sqrt(2)
            s = 1.0 if abs(s - 1) < 1e-15 else s
            return _aten.gelu.default, {}, s, 2 / s
    return None


def _is_tanh_form(node: Any, x: fx.Node) -> bool:
    """Whether the node is `ax + bx³` as in GELU, where in single precision the constants may be rounded to it."""
    powers = _polynomial(node, x)
    near = 1e-15 if x.meta["val"].dtype == torch.float64 else 2**-23
    return powers.keys() == _TANH_FORM.keys() and all(abs(powers[k] / v - 1) <= near for k, v in _TANH_FORM.items())


def _polynomial(node: Any, x: fx.Node) -> dict[int, float]:
    """Coefficients of a node by powers of x, up to the third; empty where it is no such polynomial."""
    if node is x:
        return {1: 1.0}
    if isinstance(node, int | float) and not isinstance(node, bool):
        return {0: float(node)}
    if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
        return {}
    a, b = (_polynomial(value, x) for value in node.args)
    match _target(node):
        case _aten.add.Tensor | _aten.add.Scalar if a and b:
            return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}
        case _aten.mul.Tensor | _aten.mul.Scalar:
            return _multiplied(a, b)
        case _aten.pow.Tensor_Scalar if node.args[1] in (2, 3):
            square = _multiplied(a, a)
            return square if node.args[1] == 2 else _multiplied(square, a)
    return {}


def _multiplied(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for i, u in a.items():
        for k, v in b.items():
            found[i + k] = found.get(i + k, 0.0) + u * v
    return found if max(found, default=9) <= 3 else {}


def _softplus(condition: Any, x: Any, other: Any) -> Chain | None:
    """`where(x > 20, x, softplus(x))`, which is what PyTorch's softplus does itself."""
    if _target(condition) not in (_aten.gt.Tensor, _aten.gt.Scalar) or _target(other) is not _aten.softplus.default:
        return None
    return [(_aten.softplus.default, (x,), {})] if condition.args == (x, 20) and other.args == (x,) else None


def _product(node: Any) -> tuple[float, list[fx.Node]]:
    """A product of nodes and numbers, taken apart."""
    target = _target(node)
    if target is _aten.neg.default:
        scale, factors = _product(node.args[0])
        return -scale, factors
    if target in (_aten.mul.Tensor, _aten.div.Tensor) and not node.kwargs:
        first, second = node.args
        divided = target is _aten.div.Tensor
        if isinstance(second, int | float) and not isinstance(second, bool) and _SMALLEST < abs(second) < _LARGEST:
            scale, factors = _product(first)
            return scale / second if divided else scale * second, factors
        if not divided and isinstance(first, fx.Node) and isinstance(second, fx.Node):
            (a, left), (b, right) = _scaled(first), _scaled(second)
            return a * b, [left, right]
    return 1.0, [node] if isinstance(node, fx.Node) else []


def _scaled(node: fx.Node) -> tuple[float, fx.Node]:
    """A node times numbers, taken apart."""
    scale, factors = _product(node)
    return (scale, factors[0]) if len(factors) == 1 else (1.0, node)


def _multiple(node: Any, x: fx.Node) -> float | None:
    """k, where the node is k·x."""
    scale, found = _scaled(node) if isinstance(node, fx.Node) else (0.0, None)
    return scale if found is x and _SMALLEST < abs(scale) < _LARGEST else None


def _target(node: Any) -> Any:
    """The operation of a node, in its functional form."""
    return functional(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else None
