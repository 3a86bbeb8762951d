"""The network as one linear map and the neurons that may switch: `δz = C δx + D v`, `δf = J δx + G v`.

On a ball the secant slope of neuron j lies in `[a_j, b_j]`. Where both agree the neuron is linear and part of the maps.
For the others `δy_j = m_j δz_j + w_j v_j` with `|v_j| ≤ |δz_j|`, m and w middle and half-width. One backward walk per
row gives C, D (strictly lower triangular by layers), J and G. What rounding does to a row moves it by at most `slack·‖δx‖`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.core.precision import inflate
from equipoise.lipschitz.local.backward import ENTRIES, Ball, Slopes, difference_spread, walk
from equipoise.lipschitz.local.graph import Activation


@dataclass(frozen=True)
class Reduced:
    """`C` and `D` with the rows of the outputs (J and G) below those of the switching neurons; `counts` per activation."""

    C: Tensor = field(repr=False)
    D: Tensor = field(repr=False)
    slack: Tensor = field(repr=False)
    counts: tuple[int, ...]

    @property
    def switching(self) -> int:
        """Number of neurons that may switch."""
        return self.D.shape[1]

    def outputs(self, chosen: Tensor) -> Reduced:
        """The same neurons with only some of the outputs (indices)."""
        keep = torch.cat([torch.arange(self.switching), self.switching + chosen])
        return Reduced(self.C[keep], self.D[keep], self.slack[keep], self.counts)

    def divided(self, margins: Tensor) -> Reduced:
        """The same neurons with every output divided by its margin; that division is what `multipliers.proves` has room for."""
        scale = torch.cat([torch.ones(self.switching, dtype=torch.float64), 1 / margins])
        return Reduced(self.C * scale[:, None], self.D * scale[:, None], inflate(self.slack * scale), self.counts)


def count_switching(slopes: Slopes) -> int:
    """Neurons whose slope is not a constant."""
    return sum(int((width > 0).sum()) for _, width in slopes.values())


def reduced_maps(ball: Ball, slopes: Slopes, outputs: Tensor) -> Reduced:
    """The maps of `outputs·f` for rows of outputs (p, size of the last node)."""
    network = ball.network
    index = {k: (width > 0).nonzero().flatten() for k, (_, width) in slopes.items()}
    starts, n = {}, 0
    for k, i in index.items():
        starts[k], n = n, n + len(i)
    spread = difference_spread(ball, slopes)
    p, d = len(outputs), network.sizes[0]
    C, D = torch.zeros(n + p, d, dtype=torch.float64), torch.zeros(n + p, n, dtype=torch.float64)
    slack = torch.zeros(n + p, dtype=torch.float64)

    def fill(at: int, node: int, rows: Tensor) -> None:
        place = slice(at, at + len(rows))

        def through(i: int, A: Tensor) -> tuple[Tensor, None]:
            middle, width = slopes[i]
            if len(index[i]):
                D[place, starts[i] : starts[i] + len(index[i])] = A[:, index[i]] * width[index[i]]
            return A * middle, None

        C[place], _, error = walk(network, node, rows, through, spread, offset=False)
        slack[place] = inflate(error * (1 + 1e-9))

    chunk = max(1, ENTRIES // network.widest)
    for k, i in index.items():
        node = network.nodes[k]
        assert isinstance(node, Activation)
        for first, part in enumerate(i.split(chunk) if len(i) else ()):
            unit = torch.zeros(len(part), network.sizes[node.source], dtype=torch.float64)
            unit[torch.arange(len(part)), part] = 1.0
            fill(starts[k] + first * chunk, node.source, unit)
    fill(n, len(network.nodes) - 1, outputs.double())
    return Reduced(C, D, slack, tuple(len(i) for i in index.values()))
