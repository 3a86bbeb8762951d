"""Shared by the certificate experiments: a network trained under noise, its logits at noisy inputs, and paired comparisons.

Noise is drawn once per input and all methods are rated on the same draws, so differences between methods are paired.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.core.accuracy import certified_at
from equipoise.smoothing import (
    Certificates,
    SimplexMap,
    SmoothedClassifier,
    Stream,
    certify_counts,
    certify_scores,
)
from equipoise.smoothing.simplex import apply_map
from equipoise_lab.experiments.experiment import Context, Row
from equipoise_lab.experiments.figures import Axes, line
from equipoise_lab.experiments.intervals import Mean, mean_of
from equipoise_lab.experiments.shared.training import Plain, merged, train

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NUMBERS = 40_000_000  # logits held at a time

FASHION: Plain = {
    "model": {
        "factory": "equipoise.nn.models:cnn",
        "arguments": {"channels": [8, 16], "hidden": 64},
    },
    "data": {"path": "fashion_mnist.npz", "limit": 6000, "test_limit": 200, "validation": 0.02},
    "optimizer": {"lr": 0.05, "weight_decay": 5e-4, "nesterov": True},
    "schedule": {"kind": "cosine", "warmup": 0.1},
    "epochs": 5,
    "batch_size": 64,
    "metrics": {"bound": False},
}
"""A small CNN on a part of Fashion-MNIST: what every experiment smooths at laptop scale."""

DESK: Plain = merged(
    FASHION,
    {
        "data": {"limit": 30_000, "test_limit": 300, "validation": 0.004},
        "epochs": 8,
        "batch_size": 128,
    },
)
DESK["model"] = {"factory": "equipoise.nn.models:mlp", "arguments": {"widths": [256, 256]}}
"""A perceptron on half of Fashion-MNIST: its votes are cheap, so that inputs get the thesis' 10⁴ draws at desk scale."""

CIFAR: Plain = {
    "model": {
        "factory": "equipoise_lab.models:cifar_resnet110",
        "arguments": {"mean": [0.4914, 0.4822, 0.4465], "std": [0.247, 0.2435, 0.2616]},
    },
    "data": {
        "path": "cifar10-full.npz",
        "test_limit": 500,
        "validation": 0.01,
        "augment": ["flip", {"kind": "pad-crop", "padding": 4}],
    },
    "optimizer": {"lr": 0.1, "weight_decay": 1e-4},
    "schedule": {"kind": "step", "milestones": [1 / 3, 2 / 3]},
    "epochs": 90,
    "batch_size": 256,
    "metrics": {"bound": False},
}
"""Cohen's ResNet-110 on CIFAR-10, 500 test inputs: the thesis' setting."""


@dataclass(frozen=True)
class Sampling:
    """Selection draws n0, estimation draws n, risk α per input."""

    n: int
    n0: int = 100
    alpha: float = 1e-3


def temperatures(most: float, count: int) -> tuple[float, ...]:
    """Log-spaced temperatures of a map, from 0.01."""
    return tuple(float(t) for t in np.geomspace(0.01, most, count).round(4))


@dataclass(frozen=True)
class Prepared:
    """A trained network with its inputs: those it is certified on, and others to calibrate maps on."""

    model: nn.Module
    x: Tensor
    y: NDArray[np.int64]
    calibration: Tensor

    def classifier(self, sigma: float, classes: int = 10) -> SmoothedClassifier:
        """The smoothed classifier at noise σ."""
        return SmoothedClassifier(self.model, sigma, classes, seed=0)


def under_noise(recipe: Mapping[str, Any], sigma: float) -> Plain:
    """The recipe with Gaussian noise σ added to every training input."""
    return merged(recipe, {"noise": {"kind": "gaussian", "sigma": sigma}})


def prepared(recipe: Mapping[str, Any], context: Context, seed: int = 0) -> Prepared:
    """Train, write the effective weights down, and fetch the test inputs and the held-out calibration inputs."""
    from equipoise.nn.convert import plain
    from equipoise.train.build import build_data

    small = {"batch_size": 16} if context.dry else {}
    result = train(merged(recipe, small), context, seed)
    accuracy = (result.final.get("test") or result.final).get("accuracy")
    context.tell(f"trained: accuracy {accuracy:.3f} without noise")
    parts = build_data(result.recipe.data)
    assert parts.test is not None
    assert parts.validation is not None
    x, y = parts.test.batch(torch.arange(context.steps_of(len(parts.test))))
    others, _ = parts.validation.batch(torch.arange(context.steps_of(len(parts.validation))))
    device = next(result.model.parameters()).device
    network = plain(result.model)[0].eval()
    return Prepared(network.to(device), x.to(device), y.numpy(), others.to(device))


def logits(
    classifier: SmoothedClassifier, x: Tensor, sampling: Sampling, context: Context
) -> Iterator[tuple[slice, Floats, Floats]]:
    """Blocks of inputs with their selection logits (B, n0, c) and estimation logits (B, n, c)."""
    n0, n = context.steps_of(sampling.n0), context.steps_of(sampling.n)
    size = max(1, _NUMBERS // (n * classifier.num_classes))
    for start in range(0, len(x), size):
        part = slice(start, min(start + size, len(x)))
        ids = list(range(start, part.stop))
        first = classifier.selection(x[part], n0, ids, Stream.SELECTION)
        yield part, first, classifier.selection(x[part], n, ids, Stream.ESTIMATION)


def counts(
    classifier: SmoothedClassifier, x: Tensor, sampling: Sampling, context: Context
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Votes (N, c) of the selection and of the estimation draws, without keeping the logits."""

    def sample(n: int, stream: Stream) -> NDArray[np.int64]:
        inputs = classifier.inputs(x, None)
        return np.stack(
            [
                classifier.counts(xi, context.steps_of(n), input_id=i, stream=stream)
                for xi, i in inputs
            ]
        )

    return sample(sampling.n0, Stream.SELECTION), sample(sampling.n, Stream.ESTIMATION)


def votes(logits: Floats) -> Floats:
    """Counts (N, c) of the largest logits (N, n, c)."""
    return np.asarray(apply_map(SimplexMap("hardmax"), logits).sum(axis=1))


def certify_logits(
    simplex: SimplexMap,
    first: Floats,
    second: Floats,
    sigma: float,
    alpha: float,
    lipschitz: float | None = None,
    procedure: str | None = None,
) -> Certificates:
    """Certificates of one map on stored logits; the hardmax's votes are Bernoulli and get their exact interval.

    `lipschitz` bounds the network's constant; the map's own is multiplied in. `procedure` takes votes and scores;
    without one it is LVM-RS as in the thesis, and CPM for votes.
    """
    if simplex.votes:
        return certify_counts(votes(first), votes(second), sigma, alpha, procedure or "cpm")
    component = pair = None
    if lipschitz is not None:
        component, pair = (
            simplex.component_lipschitz(lipschitz, second.shape[-1]),
            simplex.pair_lipschitz(lipschitz),
        )
    scores = apply_map(simplex, first), apply_map(simplex, second)
    return certify_scores(
        *scores, sigma, alpha, procedure or "lvm", lipschitz=component, pair_lipschitz=pair
    )


@dataclass(frozen=True)
class Rated:
    """Radii of one method and where its prediction is right."""

    radius: Floats
    correct: Bools

    def hits(self, epsilon: float) -> Floats:
        """1 where the input is certified at ε, else 0."""
        return np.asarray(certified_at(self.radius, self.correct, epsilon).astype(np.float64))


def rated(certificates: Certificates, labels: NDArray[np.int64]) -> Rated:
    """The radii of certificates; an abstention is never right."""
    return Rated(certificates.radius, (certificates.prediction == labels) & ~certificates.abstain)


def joined(parts: Iterable[Mapping[str, Rated]]) -> dict[str, Rated]:
    """The methods' radii over all blocks of inputs."""
    blocks = list(parts)
    return {
        name: Rated(
            np.concatenate([b[name].radius for b in blocks]),
            np.concatenate([b[name].correct for b in blocks]),
        )
        for name in blocks[0]
    }


def difference(a: Rated, b: Rated, epsilon: float, level: float = 0.95) -> Mean:
    """Mean over inputs of the difference of certified accuracy at ε in points, with its interval."""
    return mean_of((100 * (a.hits(epsilon) - b.hits(epsilon))).tolist(), level)


def curves(
    methods: Mapping[str, Rated],
    rivals: Sequence[str],
    epsilons: Sequence[float],
    level: float = 0.95,
) -> Iterator[Row]:
    """One row per method and ε: certified accuracy in %, and the paired gain over each rival with its half width."""
    for name, rated in methods.items():
        for epsilon in epsilons:
            row: Row = {
                "method": name,
                "epsilon": epsilon,
                "accuracy": 100 * float(rated.hits(epsilon).mean()),
            }
            for rival in rivals:
                if rival != name:
                    gain = difference(rated, methods[rival], epsilon, level)
                    row |= {f"over {rival}": gain.value, f"over {rival} ±": _finite(gain.half)}
            yield {**row, "inputs": len(rated.radius), "average radius": _average(rated)}


def _average(rated: Rated) -> float:
    """The average certified radius; an infinite one counts as 100."""
    return float(np.where(rated.correct, np.minimum(rated.radius, 100.0), 0.0).mean())


def _finite(half: float) -> float:
    return half if np.isfinite(half) else 100.0


def gain_of(row: Row, rival: str) -> Mean:
    """The paired gain of a row of `curves` over a rival."""
    return Mean(row[f"over {rival}"], row[f"over {rival} ±"], row["inputs"])


def by_method(
    axes: Axes, rows: Sequence[Row], methods: Sequence[str], every: int = 1, **options: Any
) -> None:
    """Accuracy over ε, a line for each method; the marks are shifted so that curves on top of each other are both seen."""
    for k, method in enumerate(methods):
        matching = [r for r in rows if r["method"] == method]
        x, y = [r["epsilon"] for r in matching], [r["accuracy"] for r in matching]
        line(axes, x, y, method, k, markevery=(k % every, every), **options)
    axes.set(xlabel="ℓ2 radius ε", ylim=(0, None))


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]
