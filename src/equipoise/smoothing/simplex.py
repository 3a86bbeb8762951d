"""Maps from logits to the simplex (softmax, sparsemax, hardmax with temperature T and mass r), their constants and their choice.

`τ_{T,r}(z) = r·τ(z/(r·T))`: non-negative, sums to r. Since radii divide scores and constants by r, mass r at
temperature T certifies exactly what mass 1 at temperature r·T does; the mass matters for margins of the plain network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import (
    POSITIVE,
    Floats,
    InputError,
    as_upper,
    describe,
    require_number,
    require_one_of,
)
from equipoise.smoothing.bounds import Gaussian, Smoothness
from equipoise.smoothing.planning import Plan, plan_counts, plan_scores
from equipoise.smoothing.procedures import DEFAULT, find_procedure

MapName = Literal["softmax", "sparsemax", "hardmax"]
_UP = 1 + 2.0**-49  # a handful of rounded operations


def sparsemax(z: Tensor) -> Tensor:
    """The Euclidean projection on the simplex: `max(z_k − θ, 0)` with θ such that the entries sum to 1, over the last axis.

    Its gradient is exact wherever it exists: on the support S, `J = I − 11ᵀ/|S|`. Reference: Martins & Astudillo (2016);
    Held, Wolfe, Crowder (1974).

    >>> sparsemax(torch.tensor([1.0, 0.5, -1.0])).tolist()
    [0.75, 0.25, 0.0]
    """
    z = z - z.detach().amax(dim=-1, keepdim=True)
    ordered = z.sort(dim=-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    total = ordered.cumsum(dim=-1) - 1
    size = (rank * ordered > total).sum(dim=-1, keepdim=True)
    theta = total.gather(-1, size - 1) / size.to(z.dtype)
    return (z - theta).relu()


def hardmax(z: Tensor) -> Tensor:
    """1 on the (first) largest entry, 0 elsewhere; piecewise constant, so it passes no gradient.

    >>> hardmax(torch.tensor([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    z = z.detach()
    return torch.zeros_like(z).scatter_(-1, z.argmax(dim=-1, keepdim=True), 1.0)


class _Row(NamedTuple):
    """What a map is at T = 1 and r = 1, with the sharp constants of a component and of a difference of two."""

    run: Callable[[Tensor], Tensor]
    component: Callable[[int], float]
    pair: float


_MAPS = {
    "softmax": _Row(lambda z: z.softmax(-1), lambda c: 1 / (2 * sqrt(2)), sqrt(2) / 2),
    "sparsemax": _Row(sparsemax, lambda c: sqrt((c - 1) / c), sqrt(2)),
    "hardmax": _Row(hardmax, lambda c: inf, inf),
}


@dataclass(frozen=True)
class SimplexMap:
    """A simplex map with its temperature and mass: callable on logits, and it knows its Lipschitz constants.

    >>> m = SimplexMap("softmax", temperature=2.0)
    >>> m(torch.zeros(4)).tolist(), str(m)
    ([0.25, 0.25, 0.25, 0.25], 'softmax at temperature 2')
    """

    name: MapName = "softmax"
    temperature: float = 1.0
    mass: float = 1.0

    def __post_init__(self) -> None:
        require_one_of(_MAPS, name=self.name)
        for what in ("temperature", "mass"):
            require_number(getattr(self, what), what, least=POSITIVE)

    def __call__(self, logits: Tensor) -> Tensor:
        """Scores of mass `mass` over the last axis."""
        return self.mass * _MAPS[self.name].run(logits / (self.mass * self.temperature))

    @property
    def votes(self) -> bool:
        """Whether every draw is one vote: scores are 0 or the mass, and counts say all about a sample."""
        return self.name == "hardmax"

    def __str__(self) -> str:
        if self.votes:
            return self.name
        tail = "" if self.mass == 1 else f", mass {self.mass:g}"
        return f"{self.name} at temperature {self.temperature:g}{tail}"

    def component_lipschitz(self, network: Any, classes: int) -> float:
        """Upper bound of `Lip(τ_k∘f)` per unit of mass, `Lip(f)·c_τ/(T·r)`: what the radii need.

        Args:
            network: sound bound of the network's Lipschitz constant.
            classes: number of classes.
        """
        require_number(classes, "classes", least=2, whole=True)
        return self._composed(network, _MAPS[self.name].component(classes))

    def pair_lipschitz(self, network: Any) -> float:
        """Upper bound of `Lip((τ_y − τ_k)∘f)` per unit of mass."""
        return self._composed(network, _MAPS[self.name].pair)

    def _composed(self, network: Any, constant: float) -> float:
        upper = as_upper(network)
        return upper * constant / (self.temperature * self.mass) * _UP if upper > 0 else 0.0


def map_grid(temperatures: Sequence[float] | None = None) -> list[SimplexMap]:
    """The grid of LVM-RS: hardmax, and softmax and sparsemax at 50 log-spaced temperatures from 0.01 to 50.

    >>> len(map_grid())
    101
    """
    values = np.geomspace(0.01, 50, 50) if temperatures is None else temperatures
    grid = [SimplexMap("hardmax")]
    return grid + [SimplexMap(name, float(t)) for name in ("softmax", "sparsemax") for t in values]


def apply_map(simplex: SimplexMap, logits: Floats) -> Floats:
    """Scores of mass 1 in float64, clipped to [0, 1].

    Args:
        simplex: the map.
        logits: (…, c).
    """
    z = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64))
    return scores_of(simplex, z).numpy()


def scores_of(simplex: SimplexMap, logits: torch.Tensor) -> torch.Tensor:
    """The same on tensors (any device).

    Args:
        simplex: the map.
        logits: (…, c).
    """
    z = logits.double()
    return (simplex(z) / simplex.mass).clamp_(0, 1)


def plan_map(
    simplex: SimplexMap,
    logits: Floats,
    procedure: str,
    n: int,
    noise: Gaussian,
    alpha: float,
    lipschitz: Any = None,
) -> Plan:
    """The plan of one map: the hardmax is planned on counts, the others on scores.

    Args:
        simplex: the map.
        logits: of the selection draws, (N, n0, c).
        procedure: name of a row.
        n: number of estimation draws.
        noise: its level and variation.
        alpha: risk per input.
        lipschitz: sound bound of the network's Lipschitz constant.
    """
    row = find_procedure(procedure)
    scores = apply_map(simplex, logits)
    if simplex.votes:
        return plan_counts(row, scores.sum(axis=1), n, noise, alpha)
    return plan_scores(
        row, scores, n, noise, alpha, map_smoothness(simplex, logits.shape[-1], lipschitz)
    )


def map_smoothness(simplex: SimplexMap, classes: int, lipschitz: Any) -> Smoothness:
    """Constants of the scores `τ_T∘f` from a sound bound of Lip(f); none without one.

    Args:
        simplex: the map.
        classes: number of classes.
        lipschitz: sound bound of the network's Lipschitz constant, or None.
    """
    if lipschitz is None:
        return Smoothness()
    return Smoothness(
        simplex.component_lipschitz(lipschitz, classes), simplex.pair_lipschitz(lipschitz)
    )


def choose_map(
    logits: Floats,
    n: int,
    sigma: float,
    alpha: float,
    *,
    procedure: str = DEFAULT,
    lipschitz: Any = None,
    grid: Sequence[SimplexMap] | None = None,
    per_input: bool = False,
) -> list[SimplexMap]:
    """The map with the largest expected radius for n estimation draws.

    Args:
        logits: of the selection draws, (N, n0, c).
        n: number of estimation draws.
        sigma: noise level.
        alpha: risk per input.
        procedure: to plan for.
        lipschitz: sound bound of the network's Lipschitz constant.
        grid: candidate maps, default `map_grid()`.
        per_input: choose the best map of each input, as in the thesis; its certificates then speak of that input's own map
            (errata 17). Default: one map for all, the best on average.

    Returns:
        One map per input.
    """
    if not isinstance(logits, np.ndarray) or logits.ndim != 3 or logits.shape[1] < 2:
        raise InputError(
            f"expected a NumPy array of logits (inputs, at least 2 draws, classes), got {describe(logits)}"
        )
    candidates = list(map_grid() if grid is None else grid)
    noise = Gaussian(sigma)
    expected = np.stack(
        [plan_map(m, logits, procedure, n, noise, alpha, lipschitz).expected for m in candidates]
    )
    if per_input:
        return [candidates[k] for k in expected.argmax(axis=0)]
    finite = np.clip(expected, 0, 1e6 * sigma)
    return [candidates[int(finite.mean(axis=1).argmax())]] * len(logits)
