"""`local_lipschitz`: how much can the network stretch distances near an input? Attacked from below, certified from above."""

from __future__ import annotations

import copy
import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bracket
from equipoise.core.errors import InputError
from equipoise.core.precision import full_precision, up
from equipoise.lipschitz.batches import flat_outputs
from equipoise.lipschitz.capture import as_examples, capture
from equipoise.lipschitz.chains import chain_total
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.linearise import gradient_bound
from equipoise.lipschitz.local.switching import Switching
from equipoise.lipschitz.logs import exp_up, log_root
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.zonotope import zonotope_bound
from equipoise.norms.bracket import Cache

Effort = Literal["auto", "fast", "zonotope", "multipliers"]
#: with more input entries than this `effort="auto"` leaves the zonotope out: it takes minutes and gigabytes
SMALL = 256


def local_lipschitz(
    model: nn.Module,
    x: Tensor,
    radius: float,
    *,
    steps: int = 20,
    rtol: float = 1e-3,
    seed: int = 0,
    effort: Effort = "auto",
    seconds: float | None = None,
) -> Bracket:
    """Bracket, per sample, of the Lipschitz constant in ℓ2 on the ball of `radius` around each `x`.

    `lower ≤ sup ‖f(a) − f(b)‖/‖a − b‖ ≤ upper` over `a ≠ b` with `‖a − x‖, ‖b − x‖ ≤ radius`. The lower end is a
    pair of inputs found by
    gradient ascent, or the Jacobian norm by power iteration, in float64 and shrunk by 10⁻⁶. The upper end is the
    least of: the global bound; the product of local gains with neurons that cannot move dropped; the gradient bound of
    `linearise`; with `effort="multipliers"` the best S-procedure bound of the neurons that may switch on the ball
    (`multipliers`), their ranges by backward linear relaxation; with `effort="zonotope"` the bound of a relational enclosure.

    Args:
        model: a module in evaluation mode, as for `lipschitz_bound`.
        x: a batch of inputs; both ends of the bracket are float64 tensors of shape `(len(x),)`.
        radius: of the ball, in ℓ2.
        steps: of gradient ascent and of power iteration. 0 leaves the lower end at 0.
        rtol: relative gap asked of every operator norm.
        seed: of the starting points.
        effort: `fast` leaves out what follows. `multipliers` takes one backward pass per neuron that may switch and a few
            dozen factorisations of a matrix of that size, where the network is affine up to pointwise activations and
            max pooling. `zonotope` carries every input direction through it instead, as many forward passes as the input
            has entries and more. `auto` takes the multipliers for up to 20,000 neurons of which 900 may switch, says so
            in the bracket's `note` where it does not, and then takes the zonotope for inputs of at most 256 entries.
        seconds: budget per sample of the multipliers; the best bound proved so far is returned when it ends.

    >>> net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> b = local_lipschitz(net, torch.randn(4, 3), 0.01)
    >>> b.lower.shape, bool((b.lower <= b.upper).all())
    (torch.Size([4]), True)

    References: Yang et al. 2020 (empirical local Lipschitz constant); Huang et al. 2021 (local bounds by pruning).
    """
    (x,) = as_examples(x)
    if not (radius > 0 and math.isfinite(radius)):
        raise InputError(f"radius must be a positive number, got {radius}")
    if x.dim() < 2:
        raise InputError(f"x needs a batch dimension, got shape {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise InputError("x has non-finite values")
    if effort not in get_args(Effort):
        raise InputError(f"effort must be one of {', '.join(get_args(Effort))}, got {effort!r}")
    if seconds is not None and not seconds > 0:
        raise InputError(f"seconds must be positive, got {seconds}")
    program = capture(model, x[:1])
    cache = Cache(rtol)
    reach = up(float(torch.linalg.vector_norm(x.detach().double().flatten(1), dim=1).max()) * (1 + 1e-12) + radius)
    with torch.no_grad(), full_precision():
        run = propagate(program, reach, rtol, cache)
        switching = Switching.of(run, cache, effort, seconds)
        found = [certified(run, sample[None], radius, cache, effort, switching) for sample in x]
        upper = torch.tensor(found, dtype=torch.float64)
    lower = attacked(model, x, radius, steps, seed) if steps > 0 else torch.zeros_like(upper)
    if bool((lower > upper * (1 + 1e-6)).any()):
        raise AssertionError("an attack exceeded the certified bound: this is a bug of equipoise, please report it")
    return Bracket(torch.minimum(lower, upper), upper, method="attack, certified on the ball", note=switching.note)


def certified(
    run: Propagation,
    x: Tensor,
    radius: float,
    cache: Cache,
    effort: Effort = "fast",
    switching: Switching | None = None,
) -> float:
    """Upper bound of the Lipschitz constant on the ball around one sample."""
    boxes = enclose(run, x, radius, cache)
    layered = log_root(boxes[o].log for o in run.program.outputs)
    chain = chain_total(run)
    whole = min(layered, run.fused, math.inf if chain is None else chain)
    upper = min(exp_up(whole), gradient_bound(run, boxes, x, cache))
    by_multipliers = math.inf if switching is None else switching.bound(x, radius)
    small = effort == "auto" and math.isinf(by_multipliers) and x.numel() <= SMALL
    if effort == "zonotope" or small:
        upper = min(upper, zonotope_bound(run, boxes, x, radius, cache)[0])
    return min(upper, by_multipliers)


def attacked(model: nn.Module, x: Tensor, radius: float, steps: int, seed: int) -> Tensor:
    """Lower ends: the best of finite pairs trained by projected gradient ascent and of Jacobian norms, in float64."""
    model = copy.deepcopy(model).double().requires_grad_(False)
    x = x.detach().double()
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    best, direction = _jacobian(model, x, noise(), steps)
    a = project(0.5 * radius * direction, radius)
    b = -a + project(0.1 * radius * unit(noise()), radius)
    for step in range(steps):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        with torch.enable_grad():
            ratio = stretch(model, x + a, x + b)
            grad_a, grad_b = torch.autograd.grad(ratio.sum(), (a, b))
        best = torch.maximum(best, ratio.detach())
        size = radius * 0.2 * (1 - step / steps)
        a, b = (project(d.detach() + size * unit(g), radius) for d, g in ((a, grad_a), (b, grad_b)))
    with torch.no_grad():
        best = torch.maximum(best, stretch(model, x + a, x + b))
    return best * (1 - 1e-6)


def unit(v: Tensor) -> Tensor:
    """Every sample divided by its norm."""
    return v / torch.linalg.vector_norm(v.flatten(1), dim=1).clamp_min(1e-300).reshape(-1, *[1] * (v.dim() - 1))


def project(d: Tensor, radius: float) -> Tensor:
    """Every sample scaled into the ball."""
    norms = torch.linalg.vector_norm(d.flatten(1), dim=1).reshape(-1, *[1] * (d.dim() - 1))
    return d * (radius * (1 - 1e-9) / norms.clamp_min(radius))


def _stacked(model: nn.Module, x: Tensor) -> Tensor:
    """The outputs of every sample as one row; sample by sample where they have no batch dimension."""
    parts = flat_outputs(model(x))
    if all(t.dim() > 0 and len(t) == len(x) for t in parts):
        return torch.cat([t.reshape(len(t), -1) for t in parts], 1)
    return torch.stack([torch.cat([t.flatten() for t in flat_outputs(model(one[None]))]) for one in x])


def stretch(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """`‖f(a) − f(b)‖/‖a − b‖` per sample, less what float64 rounding may have added; 0 for pairs too close to tell."""
    fa, fb = _stacked(model, a), _stacked(model, b)
    gap = torch.linalg.vector_norm((a - b).flatten(1), dim=1)
    noise = 1e-11 * (fa.detach().abs().amax(1) + fb.detach().abs().amax(1)) * math.sqrt(fa.shape[1])
    size = (torch.linalg.vector_norm(fa - fb, dim=1) - noise).clamp_min(0)
    return torch.where(gap > 1e-9, size / gap.clamp_min(1e-9), torch.zeros_like(gap))


def _jacobian(model: nn.Module, x: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Power iteration on JᵀJ at every sample by vjp; `‖Jᵀu‖/‖u‖` is a lower bound of ‖J‖ for every u."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        out = _stacked(model, leaf)
        u = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        size = torch.zeros(len(x), dtype=torch.float64)
        for _ in range(steps):
            (v,) = torch.autograd.grad(out, leaf, unit(u), retain_graph=True)
            size = torch.maximum(size, torch.linalg.vector_norm(v.flatten(1), dim=1))
            h = 1e-6
            with torch.no_grad():
                u = _stacked(model, x + h * unit(v)) - _stacked(model, x - h * unit(v))
    return size, unit(v)
