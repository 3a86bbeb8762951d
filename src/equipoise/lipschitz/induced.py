"""Operator norms induced by ℓ1 and ℓ∞: largest absolute column and row sums, of layers and of whole networks.

For a matrix `‖W‖_∞ = max_i Σ_j |w_ij|` and `‖W‖_1 = max_j Σ_i |w_ij|`. A convolution is a matrix whose rows hold every
kernel entry at most once (zero padding), so `|K|` applied to an image of ones gives all row sums at once, and its adjoint
all column sums: exact, borders and strides included. Other paddings may read a pixel several times; the sums of absolute
values are then upper bounds.

Reference: Gouk et al. 2021, *Regularisation of neural networks by enforcing Lipschitz continuity*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from equipoise.core.bounds import Bound, Bracket, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import gamma, require_finite, up
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.forms import Adjoint, Conv, Dense, Linear, Pad, Scale
from equipoise.lipschitz.logs import exp_up, log_product, log_sum, log_up
from equipoise.lipschitz.places import where
from equipoise.lipschitz.propagate import OPAQUE, Propagation, propagate
from equipoise.lipschitz.rules import Step
from equipoise.norms.geometry import (
    Convolution,
    apply,
    effective_weight,
    from_kernel,
    from_module,
    input_shape,
    module_kind,
)

Order = Literal["l1", "linf"]


def induced_norm(
    operator: Tensor | nn.Module, order: Order, *, input_size: int | tuple[int, ...] | None = None
) -> Bracket:
    """The norm of a matrix or layer induced by ℓ1 or ℓ∞, exact up to rounding where the padding is zeros.

    Args:
        operator: a matrix `(m, n)`, an `nn.Linear` or a convolution (transposed ones included).
        order: `l1` (largest column sum) or `linf` (largest row sum).
        input_size: spatial size of a convolution's input; unknown: the supremum over all sizes.

    >>> W = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    >>> round(float(induced_norm(W, "l1").upper), 6), round(float(induced_norm(W, "linf").upper), 6)
    (5.0, 3.0)
    """
    if order not in ("l1", "linf"):
        raise InputError(f"order must be l1 or linf, got {order!r}")
    with torch.no_grad():
        if isinstance(operator, Tensor):
            if operator.dim() != 2:
                raise InputError(f"expected a matrix (m, n), got shape {tuple(operator.shape)}")
            return _largest(
                require_finite(operator.detach()).double().abs().sum(1 if order == "linf" else 0), operator.numel()
            )
        if module_kind(operator) is nn.Linear:
            return induced_norm(effective_weight(operator), order)
        conv = from_module(operator, input_size)
        transposed = isinstance(operator, nn.modules.conv._ConvTransposeNd)
        return conv_induced(conv, order if not transposed else ("l1" if order == "linf" else "linf"))


def _largest(sums: Tensor, terms: int, exact: bool = True) -> Bracket:
    top = float(sums.max())
    slack = gamma(terms + 8, torch.float64)
    return Bracket(top * (1 - slack) if exact else 0.0, up(top * (1 + slack)), method="sums of absolute values")


def conv_induced(conv: Convolution, order: Order) -> Bracket:
    """The same for a convolution operator; with unknown size every kernel entry counts in the sums."""
    K = require_finite(conv.kernel).double().abs()
    if not conv.known:
        flat = K.flatten(3).sum(-1) * _copies(conv)  # (groups, out, in)
        strides = [axis.stride for axis in conv.axes]
        return _largest(
            flat.sum(2 if order == "linf" else 1), K.numel(), all(s == 1 for s in strides) or order == "linf"
        )
    positive = Convolution(K, conv.axes, conv.padding)
    ones = torch.ones(1, *input_shape(conv), dtype=torch.float64)
    exact = conv.padding == "zeros"
    if order == "linf":
        return _largest(apply(positive, ones), K[0, 0].numel() * 4, exact)
    with torch.enable_grad():
        x = ones.requires_grad_()
        (sums,) = torch.autograd.grad(apply(positive, x).sum(), x)
    return _largest(sums, K[0].numel() * 4 * math.prod(1 + a.left + a.right for a in conv.axes), exact)


def _copies(conv: Convolution) -> float:
    """How often padding may repeat a pixel, at most, over all sizes."""
    return 1.0 if conv.padding == "zeros" else math.prod(1 + axis.left + axis.right for axis in conv.axes)


def induced_bound(model: nn.Module | ExportedProgram, example_input: Any = None, order: Order = "linf") -> Bound:
    """Product bound of a network in ℓ1 or ℓ∞: `‖f(x) − f(x')‖ ≤ value·‖x − x'‖` in that norm, layer by layer.

    Dense layers, convolutions, batch norm, pointwise activations, sums, concatenations, pooling, means and views; other
    operations are refused with the node. Batch norm is not folded.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> induced_bound(net, torch.zeros(1, 3), "l1").kind
    <Kind.UPPER: 'upper'>
    """
    if order not in ("l1", "linf"):
        raise InputError(f"order must be l1 or linf, got {order!r}")
    program = capture(model, example_input)
    run = propagate(program, None, rtol=0.1)
    logs: dict[fx.Node, float] = dict.fromkeys(program.inputs, 0.0)
    with torch.no_grad():
        for node in program.nodes:
            step = run.steps[node]
            if step.kind == OPAQUE:
                raise _unknown(node, step, order)
            terms = [
                log_product(log_up(_gain(run, node, step, order, i)), logs[s.node])
                for i, (s, _) in enumerate(step.gains)
            ]
            apart = step.combine == "root" and order == "linf"
            logs[node] = max(terms, default=-math.inf) if apart else log_sum(terms)
    ends = [logs[o] for o in program.outputs]
    total = max(ends, default=-math.inf) if order == "linf" else log_sum(ends)
    return Bound(exp_up(total), Kind.UPPER, f"product of {order} norms")


_KEEP = {
    "view",
    "selection",
    "identity",
    "piece",
    "split",
    "shift",
    "sort",
    "constant padding",
    "concatenation",
    "sum",
    "difference",
}
_POSITIVE = {"mean", "sum over entries", "average pooling"}


def _gain(run: Propagation, node: fx.Node, step: Step, order: Order, which: int) -> float:
    """The constant of one operation with respect to its input number `which`, in the norm asked for."""
    signal, gain = step.gains[which]
    if step.kind in _KEEP | {"maximum"} and gain != 1:  # copies by broadcasting, other factors
        raise _unknown(node, step, order)
    if step.kind in _KEEP | {"maximum"}:
        return 1.0  # sorting and maxima contract in every ℓp
    if step.slopes is not None:
        return gain
    if step.kind == "max pooling":
        return 1.0 if order == "linf" else float(round(gain * gain))
    if step.kind in _POSITIVE:
        return _positive(node, signal.shape, order)
    if step.linear is not None:
        found = _linear(step.linear, order)
        if found is not None:
            return found
    raise _unknown(node, step, order)


def _unknown(node: fx.Node, step: Step, order: Order) -> Refused:
    return Refused(f"{where(node)}: no rule for «{step.kind}» in {order}; use lipschitz_bound, which is for ℓ2")


def _linear(form: Linear, order: Order) -> float | None:
    if isinstance(form, Dense):
        return up(float(induced_norm(form.matrix, order).upper))
    if isinstance(form, Scale):
        return up(float(form.factor.abs().max()) + form.error)
    if isinstance(form, Adjoint):
        return _linear(form.conv, "l1" if order == "linf" else "linf")
    if isinstance(form, Conv) and form.error == 0:
        conv = from_kernel(
            form.weight, form.padding, form.stride, form.dilation, form.groups, list(form.amount), form.size
        )
        return float(conv_induced(conv, order).upper)
    if isinstance(form, Pad) and (order == "linf" or form.padding == "zeros"):
        return 1.0
    return None


def _positive(node: fx.Node, shape: tuple[int, ...], order: Order) -> float:
    """A linear operation with non-negative weights: its row sums are its values on ones, its column sums those of the adjoint."""
    ones = torch.ones(shape, dtype=torch.float64)
    run: Callable[[Tensor], Tensor] = lambda x: node.target(x, *node.args[1:], **node.kwargs)  # type: ignore[operator] # noqa: E731
    if order == "linf":
        sums = run(ones)
    else:
        with torch.enable_grad():
            x = ones.requires_grad_()
            (sums,) = torch.autograd.grad(run(x).sum(), x)
    return up(float(sums.max()) * (1 + gamma(ones.numel() + 64, torch.float64)))
