"""Product bounds of whole networks in ℓ1 and ℓ∞, from the norms of their layers in `norms.induced`."""

from math import inf, prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from equipoise.core import Bound, Kind, Refused, Shape, gamma, inflate, require_one_of
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.capture import Program, capture
from equipoise.lipschitz.logs import exp_up, log_product, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.report import last_matrix
from equipoise.lipschitz.rules import Step
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.lipschitz.values import replay, where
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.induced import Order, map_norm


def induced_bound(
    model: nn.Module | ExportedProgram, example_input: Any = None, order: Order = "linf"
) -> Bound:
    """Product bound of a network in ℓ1 or ℓ∞: `‖f(x) − f(x')‖ ≤ value·‖x − x'‖` in that norm, layer by layer.

    Dense layers, convolutions, batch norm, pointwise activations, sums, concatenations, pooling, means and views; other
    operations are refused with the node. Batch norm is not folded.

    Args:
        model: a module in evaluation mode, or an exported program.
        example_input: a floating tensor, or a tuple of them; not read for an exported program.
        order: the norm, `l1` or `linf`, of inputs and outputs.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> induced_bound(net, torch.zeros(1, 3), "l1").kind
    <Kind.UPPER: 'upper'>
    """
    require_one_of(("l1", "linf"), order=order)
    program = capture(model, example_input)
    total = _total(program, _logs(propagate(program, None, rtol=0.1), order), order)
    return Bound(exp_up(total), Kind.UPPER, f"product of {order} norms")


def induced_pairs(run: Propagation, order: Order) -> Tensor:
    """Upper bounds of the constants of `f_i − f_j` in ℓ1 or ℓ∞, float64 (classes, classes), for an output (1, classes).

    `|δf_i − δf_j| ≤ 2·L_∞‖δx‖_∞` and `≤ L_1‖δx‖_1`; where the network ends in a linear layer with rows w also
    `‖w_i − w_j‖_*` times the constant of what comes before it, `‖·‖_*` being dual to the norm. The smaller of both.

    Args:
        run: of a network with one output.
        order: `l1` or `linf`.
    """
    logs = _logs(run, order)
    classes = shape_of(run.program.outputs[0])[-1]
    whole = exp_up(_total(run.program, logs, order)) * (2 if order == "linf" else 1)
    constants = torch.full((classes, classes), inflate(whole), dtype=torch.float64)

    last = last_matrix(run)
    if last is not None and not last[2]:
        weight, base, _ = last
        apart = torch.stack([(weight - row).abs() for row in weight])
        sizes = apart.sum(2) if order == "linf" else apart.amax(2)
        slack = 1 + gamma(weight.shape[1] + 16, torch.float64)
        constants = torch.minimum(constants, inflate(sizes * slack * exp_up(logs[base])))
    return constants


def _total(program: Program, logs: dict[fx.Node, float], order: Order) -> float:
    """The logarithm of the constant of all outputs together."""
    ends = [logs[o] for o in program.outputs]
    return max(ends, default=-inf) if order == "linf" else log_sum(ends)


def _logs(run: Propagation, order: Order) -> dict[fx.Node, float]:
    """Logarithms of the product bounds of every node."""
    program = run.program
    logs = dict.fromkeys(program.inputs, 0.0)
    with torch.no_grad():
        for node in program.nodes:
            step = run.steps[node]
            if isinstance(step.map, op.Opaque) and step.map.inside:
                raise _unknown(node, step, order)
            gains = [gain_of(node, step, order, i) for i in range(len(step.gains))]
            if inf in gains:
                raise _unknown(node, step, order)
            terms = [
                log_product(log_up(gain), logs[s.node])
                for gain, (s, _) in zip(gains, step.gains, strict=True)
            ]
            apart = step.combine == "root" and order == "linf"
            logs[node] = max(terms, default=-inf) if apart else log_sum(terms)
    return logs


def gain_of(node: fx.Node, step: Step, order: Order, which: int) -> float:
    """The constant of one operation with respect to one input in ℓ1 or ℓ∞; infinite where there is no rule.

    In ℓ1 every copy of an entry counts, in ℓ∞ none does; sorting and maxima contract in both.

    Args:
        node: the operation.
        step: the answer of its rule.
        order: `l1` or `linf`.
        which: number of the input among the gains of the step.
    """
    signal, gain = step.gains[which]
    absolute = order == "linf"
    copies = 1.0 if absolute else float(max(1, prod(shape_of(node)) // max(1, signal.numel)))
    match step.map:
        case op.Copy() | op.Padded() | op.Join() | op.Sorted():
            return 1.0 if absolute else float(round(gain * gain))
        case op.Sum(weights=weights):
            return inflate(abs(weights[which]) * copies)
        case op.Scaled(factor=factor):
            return inflate(inflate(float(factor.abs().max())) * copies)
        case op.Largest(windows=windows, sliding=True):
            return 1.0 if absolute else float(windows)
        case op.Largest() | op.Choice():
            return copies
        case Pointwise():
            return gain
        case op.Average():
            return _positive(node, signal.shape, order)
        case op.Weighted(form=form) if form is not None and not getattr(form, "error", 0.0):
            return float(map_norm(form, order).upper)
    return inf


def _unknown(node: fx.Node, step: Step, order: Order) -> Refused:
    return Refused(
        f"{where(node)}: no rule for «{step.label}» in {order}; use lipschitz_bound, which is for ℓ2"
    )


def _positive(node: fx.Node, shape: Shape, order: Order) -> float:
    """A linear operation with non-negative weights: its row sums are its values on ones, its column sums those of the adjoint."""
    ones = torch.ones(shape, dtype=torch.float64)
    if order == "linf":
        sums = replay(node, ones)
    else:
        with torch.enable_grad():
            x = ones.requires_grad_()
            (sums,) = torch.autograd.grad(replay(node, x).sum(), x)
    return inflate(float(sums.max()) * (1 + gamma(ones.numel() + 64, torch.float64)))
