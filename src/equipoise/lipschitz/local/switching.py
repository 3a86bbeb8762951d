"""The bound of the neurons that may switch, sample by sample: what is tried, what is left out, and why."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.lipschitz.local.backward import enclose_ball, slope_ranges
from equipoise.lipschitz.local.graph import Network, Unsupported, read_network
from equipoise.lipschitz.local.multipliers import best_multipliers
from equipoise.lipschitz.local.reduced import count_switching, reduced_maps
from equipoise.lipschitz.propagate import Propagation
from equipoise.norms.bracket import Cache

#: limits of `effort="auto"`: neurons of the network, and of those that may switch
NEURONS, SWITCHING = 20_000, 400
#: most switching neurons at all: a factorisation and its workspace take some 60·n² bytes
MOST = 6000
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
