"""`local_lipschitz`: how much can the network stretch distances near an input? Both ends of the bracket are proved.

One engine, three bounds, from cheap to tight; the least counts:

* *boxes* (`enclose`), for every program: local gains layer by layer;
* *gradient*, where the network is affine up to pointwise activations and max pooling: with reference slopes s of every
  activation on the ball, secant slopes within w of them, `‖δf‖ ≤ (‖J‖ + Σ_i ‖G_i diag(w_i)‖·L_i)‖δx‖`, J the Jacobian and
  G_i the derivative by activation i of the reference network, L_i a local bound of what enters it;
* *multipliers*, for networks of moderate size: the best S-procedure bound of the neurons that may switch.

By the same multipliers the constant of the whole space (`whole_bound`): every neuron may switch, whatever the input.
"""

import contextlib
import functools
import time
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Literal

import torch
from torch import Tensor, fx, nn

from equipoise.core import (
    Bracket,
    Refused,
    frobenius,
    inflate,
    proving,
    require_one_of,
    require_positive,
    row_lengths,
)
from equipoise.lipschitz.attack import lower_ends
from equipoise.lipschitz.capture import as_batch, as_function, capture
from equipoise.lipschitz.chains import chain_total
from equipoise.lipschitz.enclose import Box, enclose
from equipoise.lipschitz.local.backward import (
    ENTRIES,
    Ball,
    Slopes,
    difference_spread,
    enclose_ball,
    slope_ranges,
    walk,
    whole_space,
)
from equipoise.lipschitz.local.graph import Network, Unsupported, read_network
from equipoise.lipschitz.local.multipliers import best_multipliers, count_switching, reduced_maps
from equipoise.lipschitz.logs import exp_up, log_root, log_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.rounding import Rounding
from equipoise.norms import spectral_norm
from equipoise.norms.spectral import Cache

Effort = Literal["auto", "fast", "multipliers"]
ChainMethod = Literal["auto", "closed", "multipliers"]

#: limits of `effort="auto"`: neurons of the network, and of those that may switch
NEURONS, SWITCHING = 20_000, 400
#: most switching neurons on a ball, and on the whole space, where all may switch: a factorisation takes n³/3 operations and
#: some 60·n² bytes
MOST, WHOLE = 6000, 3000
#: neurons up to which the whole space has multipliers unasked: about a second
AFFORDABLE = 500
#: more outputs than this would need too many backward passes
OUTPUTS = 1024


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

    `lower ≤ sup ‖f(a) − f(b)‖/‖a − b‖ ≤ upper` over `a ≠ b` with `‖a − x‖, ‖b − x‖ ≤ radius`. The lower end is the
    stretch of a pair of inputs, found by gradient ascent, with the rounding of its evaluation in float64 subtracted. The upper
    end is the least of the global bound and of the bounds of this module.

    Guarantee: both ends hold for the real function of the stored weights, rounding included.

    Args:
        model: a module in evaluation mode, as for `lipschitz_bound`.
        x: a batch of inputs; both ends of the bracket are float64 tensors of shape `(len(x),)`.
        radius: of the ball, in ℓ2.
        steps: of the search for a pair. 0 leaves the lower end at 0.
        rtol: relative gap asked of every operator norm.
        seed: of the starting points.
        effort: `fast` leaves out the multipliers. `multipliers` takes one backward pass per neuron that may switch and a few
            dozen factorisations of a matrix of that size, where the network is affine up to pointwise activations and
            max pooling. `auto` takes them for up to 20,000 neurons of which 400 may switch. What is left out is said in the
            bracket's `note`.
        seconds: budget per sample of the multipliers, in seconds of processor time; the best bound proved so far is returned
            when it ends.

    Returns:
        A bracket with both ends per sample, and the note.

    >>> net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> b = local_lipschitz(net, torch.randn(4, 3), 0.01)
    >>> b.lower.shape, bool((b.lower <= b.upper).all())
    (torch.Size([4]), True)

    References: Yang et al. 2020 (empirical local Lipschitz constant).
    """
    x = as_batch(x)
    require_positive(radius=radius, rtol=rtol)
    require_one_of(Effort, effort=effort)
    if seconds is not None:
        require_positive(seconds=seconds)

    program = capture(model, x[:1])
    cache = Cache(rtol)
    reach = inflate(float(row_lengths(x.detach().double().flatten(1)).max()) + radius)
    with proving():
        run = propagate(program, reach, rtol, cache)
        engine = LocalBound(run, cache, effort, seconds)
        upper = torch.tensor(
            [engine.upper(sample[None], radius) for sample in x], dtype=torch.float64
        )
    lower, note = torch.zeros_like(upper), ""
    if steps > 0 and (upper > 0).any():
        values = Rounding(run, cache).evaluate
        lower, note = lower_ends(as_function(program), values, x, radius, steps, seed)
    if (lower > upper).any():
        raise AssertionError(
            "an attack exceeded the certified bound: this is a bug of equipoise, please report it"
        )
    note = "; ".join(text for text in (*engine.notes, note) if text)
    return Bracket(lower, upper, method="pairs of values, certified on the ball", note=note)


@dataclass
class LocalBound:
    """The network once propagated, and read as affine maps and curves where it is that; `notes` say what was left out.

    Args:
        run: propagated on a ball that contains all others.
        cache: of operator norms.
        effort: see `local_lipschitz`.
        seconds: of processor time per sample.
    """

    run: Propagation
    cache: Cache
    effort: Effort = "auto"
    seconds: float | None = None
    network: Network | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self.network = read_network(self.run, self.cache)
        except Unsupported as reason:
            self.say(f"boxes only: {reason}")

    @functools.cached_property
    def whole(self) -> float:
        """Logarithm of a bound on the whole space."""
        return whole_bound(self.run, self.cache)

    def say(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def upper(self, x: Tensor, radius: float) -> float:
        """Upper bound of the Lipschitz constant on the ball around one sample.

        Args:
            x: a batch of one.
            radius: of the ball, in ℓ2.
        """
        outputs = self.run.program.outputs
        # an empty output stays where it is
        if not any(self.run.facts[o].signal.numel for o in outputs):
            return 0.0
        boxes = enclose(self.run, x, radius, self.cache)
        layered = log_root(boxes[o].log for o in outputs)
        best = exp_up(min(layered, self.run.fused, self.whole))
        return (
            best
            if self.network is None
            else min(best, self._by_slopes(self.network, boxes, x, radius))
        )

    def _by_slopes(
        self, network: Network, boxes: dict[fx.Node, Box], x: Tensor, radius: float
    ) -> float:
        """By the gradient, and by multipliers where the network is not too large for them."""
        if network.sizes[-1] > OUTPUTS or network.sizes[-1] * network.widest > ENTRIES:
            self.say(f"boxes only: the network has {network.sizes[-1]:,} outputs")
            return inf
        large = self.effort == "auto" and network.neurons > NEURONS
        if large:
            self.say(
                f"no multipliers: {network.neurons:,} neurons; effort='multipliers' tries them"
            )
        exact = self.effort != "fast" and not large

        began = time.process_time()
        deadline = inf if self.seconds is None else began + self.seconds
        known = {k: exp_up(boxes[node].log) for node, k in network.places.items() if node in boxes}
        ball = enclose_ball(
            network, x, radius, bounds=None if exact else (), deadline=deadline, known=known
        )
        if ball is None:
            self.say("boxes only: values beyond the floats")
            return inf
        slopes = slope_ranges(ball)
        best = gradient_bound(ball, slopes)
        if not exact:
            return best

        n = count_switching(slopes)
        if n > (SWITCHING if self.effort == "auto" else MOST):
            self.say(
                f"no multipliers: {n:,} neurons may switch; a smaller radius has fewer, effort='multipliers' takes {MOST:,}"
            )
            return best
        outputs = torch.eye(network.sizes[-1], dtype=torch.float64)
        found = best_multipliers(reduced_maps(ball, slopes, outputs), deadline=deadline)
        if found is None:
            self.say("no multipliers: their bound could not be proved in float64")
            return best
        ended = "; the time was up" if time.process_time() > deadline else ""
        self.say(f"multipliers of {n:,} neurons that may switch, {found.steps} steps{ended}")
        return min(best, found.bound)


def gradient_bound(ball: Ball, slopes: Slopes) -> float:
    """`‖J‖ + Σ_i ‖G_i diag(w_i)‖·L_i`, rounded up; per activation also `Σ_j w_j·‖G_ij‖·L_ij`, where that is less.

    Args:
        ball: with bounds of the differences of every node.
        slopes: middle and half-width of every activation's secant slopes on the ball.
    """
    network = ball.network
    switching = 0.0

    def through(i: int, A: Tensor) -> tuple[Tensor, None]:
        nonlocal switching
        source = network.activations[i].source
        middle, width = slopes[i]
        moving = width > 0
        if moving.any():
            G = A[:, moving] * width[moving]
            together = _norm(G) * ball.total[source]
            apart = float(frobenius(G, (0,)) @ ball.lip[source][moving]) * (1 + 1e-9)
            switching = inflate(switching + inflate(min(together, apart)))
        return A * middle, None

    rows = torch.eye(network.sizes[-1], dtype=torch.float64)
    J, _, error = walk(
        network, network.last, rows, through, difference_spread(ball, slopes), offset=False
    )
    total = inflate(_norm(J) + switching + float(frobenius(error[None])))
    return inf if isnan(total) else total


def _norm(G: Tensor) -> float:
    """Upper bound of the spectral norm; infinite beyond the floats."""
    if not torch.isfinite(G).all():
        return inf
    return float(spectral_norm(G, rtol=1e-6).upper) if G.any() else 0.0


def whole_bound(run: Propagation, cache: Cache, chain: ChainMethod = "auto") -> float:
    """Logarithm of a proved constant on the whole space, from several layers together; infinite where there is none.

    Guarantee: as `lipschitz_bound`, for all inputs.

    Args:
        run: of the network.
        cache: of operator norms.
        chain: as for `lipschitz_bound`.

    Raises:
        Refused: `chain` is `multipliers`, and there are none for this network.
    """
    best = chain_total(run)
    if chain == "multipliers":
        return min(best, _neuron_bound(run, cache, WHOLE))
    if chain == "auto":
        with contextlib.suppress(Refused):
            best = min(best, _neuron_bound(run, cache, AFFORDABLE))
    return best


def _neuron_bound(run: Propagation, cache: Cache, most: int) -> float:
    """LipSDP-Neuron of any feed-forward graph: with slopes of every activation in `[a, b]` everywhere, `δy = m δz + w v`,
    `|v| ≤ |δz|`, one multiplier per neuron (see `multipliers`).
    """
    try:
        network = read_network(run, cache)
    except Unsupported as reason:
        raise Refused(f"no multipliers: {reason}; use chain='closed'") from reason
    if network.neurons > most or not 0 < network.sizes[-1] <= OUTPUTS:
        raise Refused(
            f"multipliers take up to {most:,} neurons and {OUTPUTS:,} outputs, this network has {network.neurons:,} and "
            f"{network.sizes[-1]:,}; use chain='closed'"
        )
    with proving():
        outputs = torch.eye(network.sizes[-1], dtype=torch.float64)
        found = best_multipliers(reduced_maps(*whole_space(network), outputs))
    if found is None:
        raise Refused("the bound by multipliers could not be proved in float64; use chain='closed'")
    return log_up(found.bound)
