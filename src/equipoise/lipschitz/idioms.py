"""Activations written out, as people and exporters do: x·σ(βx), x·(1 + erf(kx))/2, x·tanh(softplus(x)), log of a softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from equipoise.lipschitz.values import functional

_aten = torch.ops.aten
#: an operation and its arguments; None stands for the result of the one before
Chain = list[tuple[Any, tuple[Any, ...]]]
#: of a logarithm that is one operation with what it is taken of
_LOGS = {_aten.sigmoid.default: _aten.log_sigmoid.default, _aten.softmax.int: _aten.log_softmax.int}
#: factors out of this range are left alone
_SMALLEST, _LARGEST = 1e-6, 1e6


def idiom(node: fx.Node) -> Chain | None:
    """The operations that a written-out activation is."""
    if node.op != "call_function" or node.kwargs:
        return None
    match functional(node.target):
        case _aten.mul.Tensor | _aten.div.Tensor:
            return _gated(node)
        case _aten.log.default:
            inner: Any = node.args[0]
            return [(_LOGS[_target(inner)], inner.args)] if _target(inner) in _LOGS and not inner.kwargs else None
        case _aten.where.self:
            return _softplus(*node.args)
    return None


def _gated(node: fx.Node) -> Chain | None:
    """`c·x·g(kx)` for g = σ, 1 + erf, tanh∘softplus: by φ(x) = x·g(x) it is `(c/k)·φ(kx)`."""
    scale, factors = _product(node)
    if len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        found = _gate(x, gate)
        if found is not None:
            operation, inner, outer = found
            chain: Chain = [(operation, (x,))]
            if inner != 1:
                chain = [(_aten.mul.Tensor, (x, inner)), (operation, (None,))]
            return chain if scale * outer == 1 else [*chain, (_aten.mul.Tensor, (None, scale * outer))]
    return None


def _gate(x: fx.Node, gate: fx.Node) -> tuple[Any, float, float] | None:
    """φ with k and the factor outside, where `gate` is g(kx)."""
    if gate.kwargs:
        return None
    target, inner = _target(gate), gate.args[0] if gate.args else None
    if target is _aten.sigmoid.default and (k := _multiple(inner, x)) is not None:
        return _aten.silu.default, k, 1 / k
    if target is _aten.tanh.default and _target(inner) is _aten.softplus.default and inner.args == (x,):  # type: ignore[union-attr]
        return _aten.mish.default, 1.0, 1.0
    if target in (_aten.add.Tensor, _aten.add.Scalar) and gate.args[1] == 1 and _target(inner) is _aten.erf.default:
        k = _multiple(inner.args[0], x)  # type: ignore[union-attr]
        if k is not None:  # x·(1 + erf(kx)) = 2·GELU(sx)/s for s = k·√2, and the slopes of GELU(sx)/s are those of GELU
            s = k * math.sqrt(2)
            s = 1.0 if abs(s - 1) < 1e-15 else s
            return _aten.gelu.default, s, 2 / s
    return None


def _softplus(condition: Any, x: Any, other: Any) -> Chain | None:
    """`where(x > 20, x, softplus(x))`, which is what PyTorch's softplus does itself."""
    if _target(condition) not in (_aten.gt.Tensor, _aten.gt.Scalar) or _target(other) is not _aten.softplus.default:
        return None
    return [(_aten.softplus.default, (x,))] if condition.args == (x, 20) and other.args == (x,) else None


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
