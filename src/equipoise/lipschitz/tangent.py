"""The affine operations of a captured graph as maps of float64 tensors: with or without offsets, or in absolute values.

`apply` runs one node on given inputs. Without offsets it is the linear part, to be mapped over a batch of directions;
with `magnitude` all coefficients are replaced by their absolute values, which bounds what rounding can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import float64, gamma
from equipoise.lipschitz.rules import Call, Signal, Step
from equipoise.maps.linear import Diagonal

_WEIGHTED = {"linear", "convolution", "transposed convolution", "matmul"}
_ARITHMETIC = {"sum", "difference", "shift"}
#: entries are copied, never combined: no rounding
_COPIES = {"view", "selection", "identity", "concatenation", "constant padding", "reflect padding", "circular padding",
           "replicate padding"}  # fmt: skip
_AVERAGES = {"mean", "average pooling", "sum over entries"}
KINDS = _WEIGHTED | _ARITHMETIC | _COPIES | _AVERAGES | {"batch norm", "scaling"}
#: directions mapped at once
CHUNK = 256

Values = Mapping[fx.Node, Tensor]


def supported(call: Call, step: Step) -> bool:
    """Whether `apply` knows this node: an affine operation whose coefficients are constants of the graph."""
    if step.kind not in KINDS or not step.gains:
        return False
    if step.kind in _ARITHMETIC | {"scaling"}:
        return "self" in call.arguments and "other" in call.arguments
    if step.kind == "batch norm":
        return isinstance(step.linear, Diagonal)
    if step.kind in _WEIGHTED:
        return isinstance(call.get("weight"), Tensor) and call["weight"].dim() > 1
    if step.kind == "concatenation":
        return "tensors" in call.arguments
    return len(step.gains) == 1 and len(call.node.all_input_nodes) == 1


def apply(call: Call, step: Step, values: Values, *, offset: bool = False, magnitude: bool = False) -> Tensor:
    """The node on `values` (batches of one), its offset left out unless asked for."""
    kind = step.kind
    if kind == "identity":
        return values[step.gains[0][0].node]
    if kind in _ARITHMETIC:
        return _arithmetic(call, values, offset, magnitude)
    if kind == "scaling":
        return _scaling(call, values, magnitude)
    if kind == "batch norm":
        return _batch_norm(call, step, values, offset, magnitude)
    arguments = {name: _concrete(value, values, offset) for name, value in call.arguments.items()}
    if kind in _WEIGHTED:
        size = torch.abs if magnitude else torch.nn.Identity()
        arguments["weight"] = size(arguments["weight"])
        bias = arguments.get("bias")
        arguments["bias"] = size(bias) if offset and bias is not None else None
    if kind == "constant padding" and arguments.get("value"):
        fill = float(arguments["value"]) if offset else 0.0
        arguments["value"] = abs(fill) if magnitude else fill
    if kind == "concatenation" and magnitude:
        arguments["tensors"] = [t.abs() for t in arguments["tensors"]]
    result: Tensor = call.node.target(**arguments)  # type: ignore[operator]
    return result


def roundoff(call: Call, step: Step) -> float:
    """γ of the inner products the node takes; 0 where it only moves entries."""
    if step.kind in _COPIES:
        return 0.0
    if step.kind in _WEIGHTED:
        W: Tensor = call["weight"]
        return gamma(max(W[0].numel(), W[:, 0].numel()) + 16, torch.float64)
    count = step.gains[0][0].numel if step.kind in _AVERAGES else 0
    return gamma(count + 16, torch.float64)


def pushforward(call: Call, step: Step, blocks: Mapping[fx.Node, Tensor | None]) -> Tensor:
    """The linear part applied to a batch of directions per input; None stands for directions that are zero there."""
    nodes = list(blocks)
    given = {n: t for n, t in blocks.items() if t is not None}
    shapes = {s.node: s.shape for s, _ in step.gains}
    absent = {n: torch.zeros((), dtype=torch.float64).expand(shapes[n]) for n in nodes if n not in given}
    if step.kind == "identity":
        return given[nodes[0]]

    def one(*directions: Tensor) -> Tensor:
        return apply(call, step, {**absent, **dict(zip(given, directions, strict=True))})

    parts = zip(*(t.split(CHUNK) for t in given.values()), strict=True)
    return torch.cat([torch.func.vmap(one)(*part) for part in parts])


def _concrete(value: Any, values: Values, offset: bool) -> Any:
    if isinstance(value, Signal):
        return values[value.node]
    if isinstance(value, list | tuple) and any(isinstance(v, Signal | Tensor) for v in value):
        return [_concrete(v, values, offset) if isinstance(v, Signal) else float64(v) * float(offset) for v in value]
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _arithmetic(call: Call, values: Values, offset: bool, magnitude: bool) -> Tensor:
    alpha = float(call.get("alpha", 1))
    name = str(call.node.target)
    factors = {"self": 1.0, "other": -alpha if "sub" in name else alpha}
    if "rsub" in name:
        factors = {"self": -alpha, "other": 1.0}
    total: Tensor | None = None
    for key, factor in factors.items():
        value = call[key]
        if not isinstance(value, Signal) and not offset:
            continue
        term = values[value.node] if isinstance(value, Signal) else float64(value)
        term = term.abs() * abs(factor) if magnitude else (term if factor == 1 else term * factor)
        total = term if total is None else total + term
    assert total is not None
    return total if tuple(total.shape) == call.shape else total.expand(call.shape)


def _scaling(call: Call, values: Values, magnitude: bool) -> Tensor:
    a, b = call["self"], call["other"]
    x, constant = (a, float64(b)) if isinstance(a, Signal) else (b, float64(a))
    constant = constant.abs() if magnitude else constant
    return values[x.node] / constant if ".div" in str(call.node.target) else values[x.node] * constant


def _batch_norm(call: Call, step: Step, values: Values, offset: bool, magnitude: bool) -> Tensor:
    assert isinstance(step.linear, Diagonal)
    x = values[step.gains[0][0].node]
    shape = [1] * x.dim()
    shape[1] = -1
    scale = step.linear.factor.reshape(shape)
    mean = call["running_mean"].double().reshape(shape)
    shift = call["bias"].double().reshape(shape) if call["bias"] is not None else torch.zeros_like(mean)
    if magnitude:
        scale, mean, shift = scale.abs(), -mean.abs(), shift.abs()
    return (x - mean) * scale + shift if offset else x * scale
