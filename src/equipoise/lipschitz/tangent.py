"""Operations of a captured graph in float64: their values, what they make of errors in their operands, what they round.

`apply` runs an affine node on given inputs. Without offsets it is the linear part, to be mapped over a batch of directions;
with `magnitude` all coefficients are replaced by their absolute values, which bounds what rounding can do.
`value`, `carried` and `local_rounding` are the three terms of a running error analysis (Higham 2002, §3), of affine
operations, activations, maxima and sorting; enclosures of balls and bounds of rounding are both made of them.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import gamma, inflate, unit_roundoff
from equipoise.lipschitz.operations import (
    Average,
    Copy,
    Join,
    Largest,
    Padded,
    Scaled,
    Sorted,
    Sum,
    Weighted,
)
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.values import exactly, first_of, perform, replay
from equipoise.maps.pointwise import Pointwise

Values = Mapping[fx.Node, Tensor]


def supported(call: Call, step: Step) -> bool:
    """Whether `apply` knows this node: an affine operation whose coefficients are constants of the graph.

    Args:
        call: the node.
        step: the answer of its rule.
    """
    match step.map:
        case Copy(same=True) | Padded() | Join() | Weighted() | Scaled() | Sum():
            return True
        case Copy() | Average():
            return len(call.node.all_input_nodes) == 1
        case _:
            return False


def apply(
    call: Call, step: Step, values: Values, *, offset: bool = False, magnitude: bool = False
) -> Tensor:
    """The node on values.

    Args:
        call: the node.
        step: what its rule says.
        values: batches of one of the nodes that `step` names.
        offset: whether its constant part is added.
        magnitude: with the absolute values of all coefficients.
    """
    coefficient: Any = abs if magnitude else lambda value: value
    x = values[step.gains[0][0].node]
    match step.map:
        case Copy(same=True):
            return x
        case Copy() | Average():
            return first_of(replay(call.node, x))
        case Padded(fill=fill, run=run):
            return run(x, coefficient(fill) if offset else 0.0)
        case Weighted(weight=weight, bias=bias, run=run):
            b = coefficient(bias.detach().double()) if offset and bias is not None else None
            return run(x, coefficient(weight.double()), b)
        case Scaled(factor=factor, shift=shift, size=size):
            factor = coefficient(factor)
            y = x if factor.numel() == 1 and float(factor) == 1 else x * factor
            more = (size if magnitude else shift) if offset else None
            return (y if more is None else y + more).expand(call.shape)
        case Sum(weights=weights, shift=shift):
            terms = [
                values[s.node] if coefficient(w) == 1 else values[s.node] * coefficient(w)
                for (s, _), w in zip(step.gains, weights, strict=True)
            ]
            if offset and shift is not None:
                terms.append(coefficient(shift))
            return functools.reduce(torch.add, terms).expand(call.shape)
        case Join(parts=parts, run=run):
            operands = iter([values[s.node] for s, _ in step.gains])
            return run(
                [next(operands) if c is None else coefficient(c) * float(offset) for c in parts]
            )
        case _:
            raise AssertionError(f"{call.node.name} is not affine")


def roundoff(step: Step, dtype: torch.dtype = torch.float64) -> float:
    """γ of the inner products the node takes, evaluated in a dtype; 0 where it only moves entries.

    Args:
        step: the answer of the node's rule.
        dtype: in which the node is evaluated.
    """
    match step.map:
        case Copy() | Padded() | Join():
            return 0.0
        case Weighted(weight=W):
            return gamma(max(W[0].numel(), W[:, 0].numel()) + 16, dtype)
        case Average():
            return gamma(step.gains[0][0].numel + 16, dtype)
        case _:
            return gamma(16, dtype)


#: units in the last place that an elementary function may be off, relative to argument and result
_ULPS = 32
#: PyTorch's softplus is x beyond βx = 20: less than this, divided by β, from what it stands for
_JUMP = 2.2e-9


def activated(call: Call, curve: Pointwise, x: Tensor) -> Tensor:
    """φ(x) as a real function; by the network's own operation where only that knows it.

    Args:
        call: the activation.
        curve: φ.
        x: its argument.
    """
    if curve.function is not None:
        return curve.function(x)
    return perform(call.node, lambda _: x)


def value(call: Call, step: Step, values: Values) -> Tensor:
    """The node in float64.

    Args:
        call: the node.
        step: what its rule says.
        values: of its operands and of the nodes that `step` names.
    """
    match step.map:
        case Pointwise():
            return activated(call, step.map, values[step.gains[0][0].node])
        case Largest() | Sorted():
            return first_of(exactly(call.node, values, call.lookup))
        case _:
            return apply(call, step, values, offset=True)


def carried(call: Call, step: Step, errors: Values) -> Tensor:
    """What the operation makes of errors in its operands, entry by entry.

    Args:
        call: the node.
        step: what its rule says.
        errors: bounds of the errors of the nodes that `step` names.
    """
    match step.map:
        case Pointwise():
            return inflate(next(iter(errors.values())) * step.map.gain)
        case Largest(sliding=True):
            return first_of(exactly(call.node, errors, call.lookup))
        case Largest() if len(step.gains) > 1 or tuple(step.gains[0][0].shape) == call.shape:
            return torch.stack([e.expand(call.shape) for e in errors.values()]).amax(0)
        case Largest() | Sorted():
            return torch.stack([e.amax() for e in errors.values()]).amax().expand(call.shape)
        case _:
            return apply(call, step, errors, magnitude=True)


def local_rounding(
    call: Call, step: Step, sizes: Values, value: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """What the operation rounds itself; infinite where the dtype may overflow.

    Args:
        call: the node.
        step: what its rule says.
        sizes: bounds of the magnitudes of the nodes that `step` names.
        value: of the node.
        dtype: of the pass; None: the float64 pass of `value`, whose activations are the real functions up to rounding.
    """
    deployed = dtype is not None
    dtype = dtype or torch.float64
    u, kind = unit_roundoff(dtype), torch.finfo(dtype)
    match step.map:
        case Pointwise(function=function, hinge=hinge, exact=exact, gain=gain):
            size = next(iter(sizes.values()))
            top = value.abs() + gain * size
            # constants are rounded to the dtype
            limits = 2 * u if deployed and hinge is None else 0.0
            # an operation that only the network knows
            ulps = _ULPS if function is not None else 16 * _ULPS
            off = limits if exact else ulps * u
            rounding = off * (top + size) + (kind.tiny if off else 0.0)
            if deployed and call.node.target is torch.ops.aten.softplus.default:
                rounding = rounding + _JUMP / float(call["beta"])
        case Copy() if deployed and step.gains[0][0].dtype != call.node.meta["val"].dtype:
            top = value.abs() + next(iter(sizes.values())).amax()
            rounding = 2 * u * top + kind.tiny
        case _:
            g = 0.0 if isinstance(step.map, Largest | Sorted) else roundoff(step, dtype)
            if g == 0:
                return torch.zeros_like(value)
            top = apply(call, step, sizes, offset=True, magnitude=True)
            rounding = g * top + 4 * kind.tiny * max(1, *(s.numel for s, _ in step.gains))
    return torch.where(top < kind.max / 4, inflate(rounding) * (1 + 1e-9), math.inf)
