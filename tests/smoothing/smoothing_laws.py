"""Classifiers whose smoothed version is known exactly: what a certificate says can be compared with the truth."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from scipy.special import ndtr
from torch import nn

from equipoise.smoothing import radius_multi

SIGMA = 0.5


def too_many(wrong: np.ndarray, alpha: float) -> bool:
    """Binomial test: more errors than a true risk of α shows once in 10⁶ such checks."""
    return bool(np.sum(wrong) > stats.binom.ppf(1 - 1e-6, len(wrong), alpha))


class HalfSpace(nn.Module):
    """Two logits ±scale·w·x: the majority vote is a half-space, its distance known."""

    def __init__(self, *direction: float, scale: float = 1.0) -> None:
        super().__init__()
        self.direction, self.scale = torch.tensor(direction), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.scale * (x.flatten(1) @ self.direction.to(x.dtype))
        return torch.stack([score, -score], dim=1)


@dataclass(frozen=True)
class VoteLaw:
    """Hard votes: multinomial with known p. Among all classifiers with these p the worst has radius R_mult(p)."""

    name: str
    p: tuple[float, ...]

    def draw(self, rng: np.random.Generator, n: int, reps: int) -> np.ndarray:
        return rng.multinomial(n, self.p, reps)

    def truth(self, selected: np.ndarray) -> np.ndarray:
        """True radius for each selected class: 0 unless it is the top one."""
        p = np.asarray(self.p)
        radii = [float(radius_multi(p[k], np.delete(p, k).max(), SIGMA)) for k in range(len(p))]
        return np.asarray(radii)[selected]


VOTE_LAWS = [
    VoteLaw("half-space at distance 0.2", (float(ndtr(0.4)), float(ndtr(-0.4)))),
    VoteLaw("half-space at distance 1", (float(ndtr(2.0)), float(ndtr(-2.0)))),
    VoteLaw("three close", (0.4, 0.33, 0.27)),
    VoteLaw("one strong rival", (0.55, 0.4, 0.02, 0.02, 0.01)),
    VoteLaw("many equal rivals", (0.37, *[0.07] * 9)),
    VoteLaw("never above one half", (0.3, 0.25, 0.25, 0.2)),
]


@dataclass(frozen=True)
class ScoreLaw:
    """Soft scores of a scalar Gaussian u with known decision boundary or known means."""

    name: str
    scores: Callable[[np.ndarray], np.ndarray]
    truth: Callable[[np.ndarray], np.ndarray]
    lipschitz: float | None = None

    def draw(self, rng: np.random.Generator, n: int, reps: int) -> np.ndarray:
        return self.scores(SIGMA * rng.standard_normal((reps, n)))


def _pair(first: np.ndarray) -> np.ndarray:
    return np.stack([first, 1 - first], axis=-1)


def _ramp(d: float, slope: float) -> ScoreLaw:
    def scores(u: np.ndarray) -> np.ndarray:
        return _pair(np.clip(0.5 + slope * (u + d), 0, 1))

    return ScoreLaw(f"ramp of slope {slope:g} at distance {d:g}", scores, _distance(d), slope)


def _probit(d: float, slope: float) -> ScoreLaw:
    def scores(u: np.ndarray) -> np.ndarray:
        return _pair(ndtr(slope * (u + d)))

    return ScoreLaw(f"probit of slope {slope:g} at distance {d:g}", scores, _distance(d), slope / np.sqrt(2 * np.pi))


def _distance(d: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda selected: np.where(selected == 0, d, 0.0)


_ATOMS = np.array([[0.9, 0.08, 0.02], [0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
_WEIGHTS = np.array([0.35, 0.3, 0.2, 0.15])


def _atoms(u: np.ndarray) -> np.ndarray:
    return _ATOMS[np.searchsorted(np.cumsum(_WEIGHTS)[:-1], ndtr(u / SIGMA))]


def _atoms_truth(selected: np.ndarray) -> np.ndarray:
    return VoteLaw("", tuple(_WEIGHTS @ _ATOMS)).truth(selected)


SCORE_LAWS = [
    _ramp(0.25, 0.6),
    _ramp(0.5, 3.0),
    _ramp(0.05, 0.4),
    _probit(0.3, 1.0),
    _probit(0.3, 30.0),
    ScoreLaw("four atoms, three classes", _atoms, _atoms_truth),
]
