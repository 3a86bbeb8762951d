"""The multipliers on the whole space: every neuron may switch, whatever the input (LipSDP-Neuron of any feed-forward graph)."""

import torch

from equipoise.core.errors import Refused
from equipoise.core.precision import full_precision, up
from equipoise.lipschitz.local.backward import Slopes, whole_space
from equipoise.lipschitz.local.graph import Activation, Network, Unsupported, read_network
from equipoise.lipschitz.local.multipliers import best_multipliers
from equipoise.lipschitz.local.reduced import reduced_maps
from equipoise.lipschitz.logs import log_up
from equipoise.lipschitz.propagate import Propagation
from equipoise.norms.bracket import Cache

#: most neurons: a factorisation takes n³/3 operations, its workspace some 60·n² bytes
MOST = 3000
#: more outputs than this would need too many backward passes
OUTPUTS = 1024


def whole_bound(run: Propagation, cache: Cache) -> float:
    """Logarithm of a proved Lipschitz constant of the network; refused, with the reason, where there is none.

    With slopes of every activation in `[a, b]` everywhere, `δy = m δz + w v`, `|v| ≤ |δz|`, one multiplier per neuron (see
    `multipliers`). Guarantee: as `lipschitz_bound`, for all inputs.
    """
    try:
        network = read_network(run, cache)
    except Unsupported as reason:
        raise Refused(f"no multipliers: {reason}; use chain='closed'") from reason
    if network.neurons > MOST or network.sizes[-1] > OUTPUTS:
        seconds = 30 * 12 * network.neurons**3 / 1e10
        raise Refused(
            f"multipliers take up to {MOST:,} neurons and {OUTPUTS:,} outputs, this network has {network.neurons:,} and "
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
        found[k] = middle * size, up(max(high - middle, middle - low) * size)
    return found
