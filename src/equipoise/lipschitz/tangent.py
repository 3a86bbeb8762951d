"""The affine operations of a captured graph as maps of float64 tensors: with or without offsets, or in absolute values.

`apply` runs one node on given inputs. Without offsets it is the linear part, to be mapped over a batch of directions;
with `magnitude` all coefficients are replaced by their absolute values, which bounds what rounding can do.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from equipoise.core.precision import gamma
from equipoise.lipschitz.operations import Average, Copy, Join, Padded, Piece, Pieces, Scaled, Sum, Weighted
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.values import first_of, replay

Values = Mapping[fx.Node, Tensor]


def supported(call: Call, step: Step) -> bool:
    """Whether `apply` knows this node: an affine operation whose coefficients are constants of the graph."""
    match step.map:
        case Copy(same=True) | Pieces() | Piece() | Padded() | Join() | Weighted() | Scaled() | Sum():
            return True
        case Copy() | Average():
            return len(call.node.all_input_nodes) == 1
        case _:
            return False


def apply(call: Call, step: Step, values: Values, *, offset: bool = False, magnitude: bool = False) -> Tensor:
    """The node on `values` (batches of one), its offset left out unless asked for."""
    x = values[step.gains[0][0].node]
    match step.map:
        case Copy(same=True) | Pieces():
            return x
        case Piece(index=index):
            return replay(step.gains[0][0].node, x)[index]
        case Copy() | Average():
            return first_of(replay(call.node, x))
        case Padded(fill=fill, run=run):
            return run(x, (abs(fill) if magnitude else fill) if offset else 0.0)
        case Weighted(weight=weight, bias=bias, run=run):
            W, b = weight.double(), bias.detach().double() if offset and bias is not None else None
            return run(x, W.abs(), None if b is None else b.abs()) if magnitude else run(x, W, b)
        case Scaled(factor=factor, shift=shift, size=size):
            plain = factor.numel() == 1 and float(factor) in (1.0, -1.0 if magnitude else 1.0)
            y = x if plain else x * (factor.abs() if magnitude else factor)
            more = (size if magnitude else shift) if offset else None
            return _expanded(y if more is None else y + more, call)
        case Sum(weights=weights, shift=shift):
            factors = [abs(w) if magnitude else w for w in weights]
            terms = [
                values[s.node] if w == 1 else values[s.node] * w for (s, _), w in zip(step.gains, factors, strict=True)
            ]
            if offset and shift is not None:
                terms.append(shift.abs() if magnitude else shift)
            return _expanded(functools.reduce(torch.add, terms), call)
        case Join(parts=parts, run=run):
            given = iter([values[s.node] for s, _ in step.gains])
            fixed = [None if c is None else c.abs() if magnitude else c for c in parts]
            return run([next(given) if c is None else c * float(offset) for c in fixed])
        case _:
            raise AssertionError(f"{call.node.name} is not affine")


def _expanded(total: Tensor, call: Call) -> Tensor:
    return total if tuple(total.shape) == call.shape else total.expand(call.shape)


def roundoff(step: Step, dtype: torch.dtype = torch.float64) -> float:
    """γ of the inner products the node takes, evaluated in a dtype; 0 where it only moves entries."""
    match step.map:
        case Copy() | Pieces() | Piece() | Padded() | Join():
            return 0.0
        case Weighted(weight=W):
            return gamma(max(W[0].numel(), W[:, 0].numel()) + 16, dtype)
        case Average():
            return gamma(step.gains[0][0].numel + 16, dtype)
        case _:
            return gamma(16, dtype)
