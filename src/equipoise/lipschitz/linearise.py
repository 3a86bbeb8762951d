"""A local bound from the gradient: the network as one linear map plus the neurons that may switch.

On a ball every activation has secant slopes `S_i` within `w_i` of reference slopes `s_i`, entry by entry. If
everything else is affine,

    f(x) − f(x') = J δx + Σ_i G_i (S_i − s_i) δz_i,      ‖f(x) − f(x')‖ ≤ (‖J‖ + Σ_i ‖G_i diag(w_i)‖·L_i)·‖δx‖,

with J the Jacobian and G_i the derivative by the output of activation i, both of the *reference* network, and L_i a
local Lipschitz bound of its
input. J and G_i have as many rows as the network has outputs, so a few backward passes give them whole, where a product of norms
sees one layer at a time. Rounding of the backward passes is bounded by the gains of the graph and added.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import frobenius, gamma, inflate
from equipoise.lipschitz.enclose import Box
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.operations import Affine, Copy, Join, Weighted
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Step
from equipoise.lipschitz.values import exactly
from equipoise.maps.linear import Convolution, Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms import spectral_norm

#: more outputs than this would need too many backward passes
OUTPUTS = 128


def gradient_bound(run: Propagation, boxes: dict[fx.Node, Box], x: Tensor) -> float:
    """Upper bound of the local Lipschitz constant; infinite where the network is not affine up to pointwise activations."""
    if len(run.program.outputs) != 1 or len(run.program.inputs) != 1:
        return math.inf
    for node in run.program.nodes:
        step = run.steps[node]
        if not isinstance(step.map, Affine | Pointwise) or (step.combine == "root" and not isinstance(step.map, Join)):
            return math.inf
    slopes = {
        n: secant_slopes(run.steps[n], boxes[run.steps[n].gains[0][0].node])
        for n in run.program.nodes
        if run.steps[n].curve is not None
    }
    values = _reference_pass(run, x, {n: s[0] for n, s in slopes.items()})
    out = values[run.program.outputs[0]]
    if out.numel() > OUTPUTS:
        return math.inf
    watched = [
        n
        for n in [run.program.inputs[0], *run.program.nodes]
        if isinstance(values[n], Tensor) and values[n].requires_grad
    ]
    rows = [_gradients(out, k, watched, values) for k in range(out.numel())]
    stacked = {n: torch.stack([row[i].flatten() for row in rows]) for i, n in enumerate(watched)}
    noise = _backward_noise(run, stacked)
    source = run.program.inputs[0]
    total = inflate(_norm(stacked[source]) + noise[source])
    for node, (_, width) in slopes.items():
        if node not in stacked or not bool((width > 0).any()):
            continue
        total = inflate(total + _switching(run, node, width, stacked[node], noise[node], boxes))
    return total


def secant_slopes(step: Step, box: Box) -> tuple[Tensor, Tensor]:
    """Reference slope and half-width per entry of an activation whose input lies in `box`."""
    assert step.curve is not None
    shape = step.gains[0][0].shape
    if box.mid is not None and box.half is not None:
        lows, highs = step.curve.secants(box.mid, box.half)
    else:
        lows, highs = (torch.full(shape, s, dtype=torch.float64) for s in step.curve.slopes)
    middle = (lows + highs) / 2
    return middle, inflate((highs - lows) / 2 + 2.0**-52 * middle.abs())


def _reference_pass(run: Propagation, x: Tensor, slopes: dict[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """The reference network in float64 with a graph for gradients: activations replaced by their reference slopes."""
    values: dict[fx.Node, Any] = {run.program.inputs[0]: x.detach().double().clone().requires_grad_()}

    with torch.enable_grad():
        for node in run.program.nodes:
            step = run.steps[node]
            if node in slopes:
                values[node] = values[step.gains[0][0].node] * slopes[node]
            elif isinstance(step.map, Copy) and step.map.same:
                values[node] = values[step.gains[0][0].node]
            else:
                values[node] = exactly(node, values, run.program.constants.__getitem__)
    return values


def _gradients(out: Tensor, k: int, watched: list[fx.Node], values: dict[fx.Node, Any]) -> list[Tensor]:
    """Gradient of output k by every watched node."""
    chosen = torch.zeros(out.numel(), dtype=out.dtype)
    chosen[k] = 1.0
    tensors = [values[n] for n in watched]
    found = torch.autograd.grad(out, tensors, chosen.reshape(out.shape), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def _norm(G: Tensor) -> float:
    return float(spectral_norm(G, rtol=1e-6).upper) if bool(G.any()) else 0.0


def _length(values: Tensor) -> float:
    return float(frobenius(values.reshape(1, -1)))


def _backward_noise(run: Propagation, grads: dict[fx.Node, Tensor]) -> dict[fx.Node, float]:
    """Bound of the rounding in every gradient (Frobenius over all rows), carried backward with the gains of the graph."""
    noise: dict[fx.Node, float] = dict.fromkeys(run.facts, 0.0)
    sizes = {n: _length(g) for n, g in grads.items()}
    for node in reversed(run.program.nodes):
        step = run.steps[node]
        fresh = _roughness(run, node) * (sizes.get(node, 0.0) + noise[node])
        for signal, gain in step.gains:
            own = sizes.get(signal.node, 0.0)
            noise[signal.node] = inflate(noise[signal.node] + inflate(gain * noise[node]) + fresh + 16 * 2.0**-53 * own)
    return noise


def _roughness(run: Propagation, node: fx.Node) -> float:
    """Rounding of one backward step relative to the gradient that enters it: `γ_n·‖|W|‖` for linear maps."""
    step = run.steps[node]
    top = max((g for _, g in step.gains), default=0.0)
    form = step.linear
    if isinstance(form, Matrix):
        size = float(torch.linalg.vector_norm(form.matrix.double()))
        return gamma(form.matrix.shape[0] + 16, torch.float64) * inflate(size)
    if isinstance(form, Convolution):
        taps = math.prod(form.weight.shape[2:])
        size = float(torch.linalg.vector_norm(form.weight.double())) * math.sqrt(taps)
        return gamma(taps * form.weight.shape[0] + 16, torch.float64) * inflate(size)
    count = max(run.facts[s.node].signal.numel for s, _ in step.gains)
    return gamma(count + 16, torch.float64) * max(1.0, top) * (64.0 if isinstance(step.map, Weighted) else 1.0)


def _switching(
    run: Propagation, node: fx.Node, width: Tensor, G: Tensor, noise: float, boxes: dict[fx.Node, Box]
) -> float:
    """`‖G diag(w)‖·L` of one activation, or the sum over its neurons of `w_j·‖G_j‖·‖row_j‖·L(base)` where that is smaller."""
    before = run.steps[node].gains[0][0].node
    w = width.flatten()
    active = w > 0
    together = inflate((_norm(G[:, active] * w[active]) + noise * float(w.max())) * exp_up(boxes[before].log))
    facts = run.facts[before]
    if (
        facts.base is None
        or not isinstance(facts.form, Matrix | Convolution)
        or not math.isfinite(boxes[facts.base].log)
    ):
        return together
    weight = facts.form.matrix if isinstance(facts.form, Matrix) else facts.form.weight
    if isinstance(facts.form, Convolution) and facts.form.padding != "zeros":
        return together
    rows = inflate(frobenius(weight.double().flatten(1), (-1,)) + facts.form.error)
    shape = [1] * width.dim()
    shape[1 if isinstance(facts.form, Convolution) else -1] = -1
    spread = rows.reshape(shape).expand(width.shape).flatten()
    each = (w * spread)[active]
    columns = frobenius(G[:, active], (0,))
    base = exp_up(boxes[facts.base].log)
    apart = inflate((float((columns * each).sum()) * (1 + 1e-9) + noise * _length(each)) * base)
    rows_only = inflate(_length(spread[active]) * base)
    mixed = inflate((_norm(G[:, active] * w[active]) + noise * float(w.max())) * inflate(rows_only))
    return min(together, apart, mixed)
