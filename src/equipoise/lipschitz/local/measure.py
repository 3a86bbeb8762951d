"""`local_lipschitz`: how much can the network stretch distances near an input? Attacked from below, certified from above.

By the same multipliers the constant of the whole space (`whole_bound`): every neuron may switch, whatever the input.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bracket
from equipoise.core.errors import InputError, Refused, require_one_of
from equipoise.core.precision import full_precision, inflate
from equipoise.lipschitz.attack import lower_ends
from equipoise.lipschitz.capture import as_examples, capture
from equipoise.lipschitz.chains import chain_total
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.linearise import gradient_bound
from equipoise.lipschitz.local.backward import Slopes, enclose_ball, slope_ranges, whole_space
from equipoise.lipschitz.local.graph import Activation, Network, Unsupported, read_network
from equipoise.lipschitz.local.multipliers import best_multipliers
from equipoise.lipschitz.local.reduced import count_switching, reduced_maps
from equipoise.lipschitz.logs import exp_up, log_root, log_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.zonotope import zonotope_bound
from equipoise.norms.spectral import Cache

#: limits of `effort="auto"`: neurons of the network, and of those that may switch
NEURONS, SWITCHING = 20_000, 400
#: most switching neurons on a ball, and on the whole space, where all may switch: a factorisation takes n³/3 operations and
#: some 60·n² bytes
MOST, WHOLE = 6000, 3000
#: more outputs than this would need too many backward passes
OUTPUTS = 1024


@dataclass
class Switching:
    """The network as affine maps and curves, or the reason why not; `note` tells what happened to the last sample."""

    network: Network | None
    unasked: bool
    seconds: float | None = None
    note: str = ""

    @classmethod
    def of(cls, run: Propagation, cache: Cache, effort: str, seconds: float | None = None) -> Switching:
        """Read the network, unless the effort leaves it out."""
        if effort not in ("auto", "multipliers"):
            return cls(None, True)
        try:
            network = read_network(run, cache)
        except Unsupported as reason:
            return cls(None, True, note=f"no multipliers: {reason}")
        if network.sizes[-1] > OUTPUTS:
            return cls(None, True, note=f"no multipliers: the network has {network.sizes[-1]:,} outputs")
        unasked = effort == "auto"
        if unasked and network.neurons > NEURONS:
            note = f"no multipliers: {network.neurons:,} neurons; effort='multipliers' tries them"
            return cls(None, True, note=note)
        return cls(network, unasked, seconds)

    def bound(self, x: Tensor, radius: float) -> float:
        """Upper bound of the Lipschitz constant on the ball; infinite where none was found."""
        if self.network is None:
            return math.inf
        began = time.monotonic()
        deadline = math.inf if self.seconds is None else began + self.seconds
        ball = enclose_ball(self.network, x, radius, deadline=deadline)
        if ball is None:
            self.note = "no multipliers: values beyond the floats"
            return math.inf
        slopes = slope_ranges(ball)
        n = count_switching(slopes)
        if n > (SWITCHING if self.unasked else MOST):
            guess = 30 * 12 * n**3 / 1e10
            more = "effort='multipliers' tries" if n <= MOST else "a smaller radius has fewer"
            self.note = f"no multipliers: {n:,} neurons may switch, some {guess:,.0f} s; {more}"
            return math.inf
        outputs = torch.eye(self.network.sizes[-1], dtype=torch.float64)
        found = best_multipliers(reduced_maps(ball, slopes, outputs), deadline=deadline)
        if found is None:
            self.note = "no multipliers: their bound could not be proved in float64"
            return math.inf
        took = time.monotonic() - began
        ended = "; the time was up" if time.monotonic() > deadline else ""
        self.note = f"multipliers of {n:,} neurons that may switch, {found.steps} steps, {took:.1f} s{ended}"
        return found.bound


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
            has entries and more. `auto` takes the multipliers for up to 20,000 neurons of which 400 may switch, says so
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
    require_one_of(get_args(Effort), effort=effort)
    if seconds is not None and not seconds > 0:
        raise InputError(f"seconds must be positive, got {seconds}")
    program = capture(model, x[:1])
    cache = Cache(rtol)
    reach = inflate(float(torch.linalg.vector_norm(x.detach().double().flatten(1), dim=1).max()) * (1 + 1e-12) + radius)
    with torch.no_grad(), full_precision():
        run = propagate(program, reach, rtol, cache)
        switching = Switching.of(run, cache, effort, seconds)
        found = [certified(run, sample[None], radius, cache, effort, switching) for sample in x]
        upper = torch.tensor(found, dtype=torch.float64)
    lower, note = lower_ends(model, program, x, radius, steps, seed) if steps > 0 else (torch.zeros_like(upper), "")
    if bool((lower > upper * (1 + 1e-6)).any()):
        raise AssertionError("an attack exceeded the certified bound: this is a bug of equipoise, please report it")
    note = "; ".join(text for text in (switching.note, note) if text)
    return Bracket(torch.minimum(lower, upper), upper, method="attack, certified on the ball", note=note)


def certified(
    run: Propagation,
    x: Tensor,
    radius: float,
    cache: Cache,
    effort: Effort = "fast",
    switching: Switching | None = None,
) -> float:
    """Upper bound of the Lipschitz constant on the ball around one sample."""
    if not any(run.facts[o].signal.numel for o in run.program.outputs):  # an empty output stays where it is
        return 0.0
    boxes = enclose(run, x, radius, cache)
    layered = log_root(boxes[o].log for o in run.program.outputs)
    chain = chain_total(run)
    whole = min(layered, run.fused, math.inf if chain is None else chain)
    upper = min(exp_up(whole), gradient_bound(run, boxes, x))
    by_multipliers = math.inf if switching is None else switching.bound(x, radius)
    small = effort == "auto" and math.isinf(by_multipliers) and x.numel() <= SMALL
    if effort == "zonotope" or small:
        upper = min(upper, zonotope_bound(run, boxes, x, radius, cache)[0])
    return min(upper, by_multipliers)


def whole_bound(run: Propagation, cache: Cache) -> float:
    """Logarithm of a proved constant on the whole space; refused, with the reason, where there is none.

    LipSDP-Neuron of any feed-forward graph: with slopes of every activation in `[a, b]` everywhere, `δy = m δz + w v`,
    `|v| ≤ |δz|`, one multiplier per neuron (see `multipliers`). Guarantee: as `lipschitz_bound`, for all inputs.
    """
    try:
        network = read_network(run, cache)
    except Unsupported as reason:
        raise Refused(f"no multipliers: {reason}; use chain='closed'") from reason
    if network.neurons > WHOLE or network.sizes[-1] > OUTPUTS:
        seconds = 30 * 12 * network.neurons**3 / 1e10
        raise Refused(
            f"multipliers take up to {WHOLE:,} neurons and {OUTPUTS:,} outputs, this network has {network.neurons:,} and "
            f"{network.sizes[-1]:,} (some {seconds:,.0f} s and {60 * network.neurons**2 / 1e9:,.1f} GB); use chain='closed'"
        )
    with torch.no_grad(), full_precision():
        ball = whole_space(network, torch.zeros(network.sizes[0], dtype=torch.float64))
        outputs = torch.eye(network.sizes[-1], dtype=torch.float64)
        found = best_multipliers(reduced_maps(ball, everywhere(network), outputs))
    if found is None:
        raise Refused("the bound by multipliers could not be proved in float64; use chain='closed'")
    return log_up(found.bound)


def everywhere(network: Network) -> Slopes:
    """Middle and half-width of the slopes that every activation has anywhere."""
    found: Slopes = {}
    for k in network.activations:
        node = network.nodes[k]
        assert isinstance(node, Activation)
        low, high = node.curve.slopes
        size = torch.ones(network.sizes[k], dtype=torch.float64)
        middle = (low + high) / 2
        found[k] = middle * size, inflate(max(high - middle, middle - low) * size)
    return found
