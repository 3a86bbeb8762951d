"""Choosing the simplex map and its temperature, on selection or calibration logits, never on the estimation sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from equipoise.core import InputError
from equipoise.smoothing.bounds import UNKNOWN, Gaussian, Smoothness
from equipoise.smoothing.planning import Plan, plan_counts, plan_scores
from equipoise.smoothing.procedures import DEFAULT, find_procedure
from equipoise.smoothing.ramp import Floats
from equipoise.smoothing.simplex import SimplexMap

_BLOCK = 2_000_000  # scores held at a time during the search


def map_grid(temperatures: Sequence[float] | None = None) -> list[SimplexMap]:
    """The grid of LVM-RS: hardmax, and softmax and sparsemax at 50 log-spaced temperatures from 0.01 to 50.

    >>> len(map_grid())
    101
    """
    values = np.geomspace(0.01, 50, 50) if temperatures is None else np.asarray(temperatures, dtype=np.float64)
    grid = [SimplexMap("hardmax")]
    return grid + [SimplexMap(name, float(t)) for name in ("softmax", "sparsemax") for t in values]


def apply_map(chosen: SimplexMap, logits: Floats) -> Floats:
    """Scores of mass 1 in float64, clipped to [0, 1]; a draw with a non-finite logit votes for nobody."""
    z = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64))
    return scores_of(chosen, z).numpy()


def scores_of(chosen: SimplexMap, logits: torch.Tensor) -> torch.Tensor:
    """The same on tensors (any device)."""
    z = logits.double()
    scores = (chosen(z) / chosen.mass).clamp_(0, 1)
    broken = ~torch.isfinite(z).all(dim=-1, keepdim=True)
    return scores.masked_fill_(broken, 0.0) if bool(broken.any()) else scores


def plan_map(
    chosen: SimplexMap, logits: Floats, procedure: str, n: int, noise: Gaussian, alpha: float, lipschitz: Any = None
) -> Plan:
    """What the selection logits (N, n0, c) promise under one map: the hardmax is planned on counts, the others on
    scores."""
    row = find_procedure(procedure)
    scores = apply_map(chosen, logits)
    if chosen.votes:
        return plan_counts(row, scores.sum(axis=1), n, noise, alpha)
    return plan_scores(row, scores, n, noise, alpha, map_smoothness(chosen, logits.shape[-1], lipschitz))


def map_smoothness(chosen: SimplexMap, classes: int, lipschitz: Any) -> Smoothness:
    """Constants of the scores `τ_T∘f` from a sound bound of Lip(f); none without one."""
    if lipschitz is None:
        return Smoothness()
    return Smoothness(chosen.component_lipschitz(lipschitz, classes), chosen.pair_lipschitz(lipschitz))


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
    """The map with the largest hoped radius for n estimation draws, from logits (N, n0, c).

    Global (default): one map for all, the best on average, returned N times. `per_input`: the best of each input, as in
    the thesis; its certificates then speak of that input's own map (errata 17).
    """
    if logits.ndim != 3 or logits.shape[1] < 2:
        raise InputError(f"expected logits of shape (inputs, at least 2 draws, classes), got {logits.shape}")
    candidates = list(map_grid() if grid is None else grid)
    if not candidates:
        raise InputError("the grid of maps is empty")
    hoped = np.stack(_search(candidates, logits, procedure, n, Gaussian(sigma), alpha, lipschitz))
    if per_input:
        return [candidates[k] for k in hoped.argmax(axis=0)]
    finite = np.clip(hoped, 0, 1e6 * sigma)
    return [candidates[int(finite.mean(axis=1).argmax())]] * len(logits)


def _search(
    candidates: list[SimplexMap], logits: Floats, procedure: str, n: int, noise: Gaussian, alpha: float, lipschitz: Any
) -> list[Floats]:
    """Hoped radii (N,) of every candidate. Few inputs: many candidates of one kind at once; many inputs: blocks of
    them."""
    inputs, draws, classes = logits.shape
    at_once = max(1, _BLOCK // (draws * classes))
    hoped: dict[SimplexMap, list[Floats]] = {m: [] for m in candidates}
    for start in range(0, inputs, at_once):
        part = logits[start : start + at_once]
        together = max(1, at_once // len(part))
        for name in dict.fromkeys(m.name for m in candidates):
            same = [m for m in dict.fromkeys(candidates) if m.name == name]
            for k in range(0, len(same), together):
                group = same[k : k + together]
                found = _plan_group(group, part, procedure, n, noise, alpha, lipschitz)
                for m, radius in zip(group, found, strict=True):
                    hoped[m].append(radius)
    return [np.concatenate(hoped[m]) for m in candidates]


def _plan_group(
    group: list[SimplexMap], logits: Floats, procedure: str, n: int, noise: Gaussian, alpha: float, lipschitz: Any
) -> Floats:
    """Hoped radii (maps, N) of maps of one kind: temperatures become one more batch axis."""
    if group[0].votes:
        return np.stack([plan_map(m, logits, procedure, n, noise, alpha, lipschitz).hoped for m in group])
    inputs, draws, classes = logits.shape
    effective = np.array([m.temperature * m.mass for m in group])
    scaled = (logits[None] / effective[:, None, None, None]).reshape(-1, draws, classes)
    scores = apply_map(SimplexMap(group[0].name), scaled)
    smoothness = UNKNOWN
    if lipschitz is not None:
        each = [map_smoothness(m, classes, lipschitz) for m in group]
        smoothness = Smoothness(*(np.repeat([getattr(s, f) for s in each], inputs) for f in ("component", "pair")))
    plan = plan_scores(find_procedure(procedure), scores, n, noise, alpha, smoothness)
    return plan.hoped.reshape(-1, inputs)
