"""What certification costs and what it gains, against the alternatives and over a map of laws, side by side in one run.

Every function returns plain rows `{"name", "ours", "baseline", "ratio", "goal"}`: medians of interleaved repeats, so
that a busy machine slows both sides alike.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from equipoise import smoothing
from equipoise.smoothing.intervals import clopper_pearson
from equipoise_lab.models import build
from equipoise_lab.timing import take_turns

Row = dict[str, Any]
Work = Callable[[], Any]


def rows(repeats: int = 5, n: int = 900) -> list[Row]:
    """All rows, smallest first; about a minute on one core."""
    return [
        quantile_row(repeats),
        *throughput_rows(repeats, n),
        *grid_rows(repeats, n),
        soft_row(repeats),
        adaptive_row(),
        *rivals_rows(),
    ]


def interleaved(ours: Work, baseline: Work, repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios ours/baseline of each round."""
    ours(), baseline()
    contest = take_turns({"ours": ours, "baseline": baseline}, repeats)
    return (
        contest.seconds["ours"],
        contest.seconds["baseline"],
        statistics.median(contest.ratios("ours", "baseline")),
    )


def quantile_row(repeats: int = 5, values: int = 1_000_000) -> Row:
    """`radius_multi_lipschitz` on arrays of p1 and p2 against Φ⁻¹ of the same two arrays."""
    rng = np.random.default_rng(0)
    p1 = rng.uniform(0.5, 1, values)
    p2 = (1 - p1) * rng.uniform(0, 1, values)
    ours, base, ratio = interleaved(
        lambda: smoothing.radius_multi_lipschitz(p1, p2, 0.5, 1.0),
        lambda: (ndtri(p1), ndtri(p2)),
        repeats,
    )
    return row(
        f"radius_multi_lipschitz, {values:,} values / ndtri, seconds", ours, base, ratio, "≤ 8"
    )


#: draws of one forward pass
CHUNK = 100


def against_loop(model: nn.Module, n: int, compiled: Any = None) -> tuple[Work, Work]:
    """`certify` (of the compiled network, if there is one) and the plain loop as published, on a CIFAR network."""
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(
        next(model.parameters()).device
    )
    smooth = smoothing.SmoothedClassifier(
        model if compiled is None else compiled, 0.25, 10, chunk_size=CHUNK, seed=0
    )
    return (
        lambda: smooth.certify(x, n0=CHUNK, n=n, procedure="cohen"),
        lambda: plain_certify(model, x[0], 0.25, 10, CHUNK, n, 1e-3, CHUNK),
    )


def against_votes(model: nn.Module, n: int) -> tuple[Work, Work]:
    """LVM-RS and Cohen on a small network for 28×28 images, where the passes are cheap."""
    x = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(
        next(model.parameters()).device
    )
    smooth = smoothing.SmoothedClassifier(
        model, 0.25, 10, map=smoothing.SimplexMap("softmax", 0.5), seed=0
    )
    return partial(smooth.certify, x, n=n, procedure="lvm"), partial(
        smooth.certify, x, n=n, procedure="cohen"
    )


def throughput_rows(repeats: int = 5, n: int = 900) -> list[Row]:
    """Throughput of `certify` against bare forward passes on the same batches, and against a plain loop."""
    model, draws = resnet(), CHUNK + n
    ours, plain = against_loop(model, n)
    batch = torch.rand(CHUNK, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def bare() -> None:
        with torch.inference_mode():
            for _ in range(draws // CHUNK):
                model(batch)

    a, b, ratio = interleaved(ours, bare, repeats)
    c, d, against = interleaved(ours, plain, repeats)
    return [
        row(
            "certify, draws per second / bare forward passes",
            draws / a,
            draws / b,
            1 / ratio,
            "≥ 0.95",
        ),
        row(
            "certify, draws per second / plain loop as published",
            draws / c,
            draws / d,
            1 / against,
            "≥ 1",
        ),
    ]


def grid_rows(repeats: int = 5, n: int = 900) -> list[Row]:
    """Votes with exact noise on the 8-bit grid against the same passes with float32 normals of torch, drawn in place."""
    measured = []
    cases = (
        ("ResNet-20", resnet(), (3, 32, 32), "≤ 1.05"),
        ("small CNN", small_cnn(), (1, 28, 28), "≤ 1.2"),
    )
    for name, model, shape, goal in cases:
        x = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).float() / 255
        smooth = smoothing.SmoothedClassifier(
            model, 0.25, 10, chunk_size=CHUNK, seed=0, noise="grid"
        )
        buffer, generator = torch.empty(CHUNK, *shape), torch.Generator().manual_seed(0)

        def ours(smooth: smoothing.SmoothedClassifier = smooth, x: Tensor = x) -> Any:
            return smooth.counts(x, n, input_id=0, stream=smoothing.Stream.ESTIMATION)

        def plain(
            model: nn.Module = model, x: Tensor = x, buffer: Tensor = buffer, draw: Any = generator
        ) -> Any:
            votes = torch.zeros(10, dtype=torch.int64)
            with torch.inference_mode():
                for _ in range(n // CHUNK):
                    votes += torch.bincount(
                        model(buffer.normal_(0, 0.25, generator=draw).add_(x)).argmax(1),
                        minlength=10,
                    )
            return votes

        a, b, ratio = interleaved(ours, plain, repeats)
        measured.append(
            row(f"exact noise / float32 normals in place, {name}, seconds", a, b, ratio, goal)
        )
    return measured


def rivals_rows() -> list[Row]:
    """Mean radius of `rivals` against CPM where classes are many, and against the best of the others on a coarse map."""
    many = [
        compare(Law(1000, p, s), 1000, repetitions=100)
        for p, s in ((0.3, 0.1), (0.4, 0.3), (0.5, 0.5))
    ]
    ours, theirs = (sum(p.radii[k] for p in many) for k in ("rivals", "cpm"))
    worst = min(
        rivals_map(
            (3, 10),
            (0.6, 0.9, 0.999),
            (0.1, 0.5, 1.0),
            ((1000, 100), (10_000, 100)),
            repetitions=100,
        ),
        key=lambda p: p.ratio,
    )
    best = max(worst.radii[k] for k in OTHERS)
    return [
        row(
            "mean radius of rivals / CPM, c = 1000, p₁ = 0.3 … 0.5, n = 10³",
            ours,
            theirs,
            ours / theirs,
            "≥ 1.25",
        ),
        row(
            "mean radius of rivals / best other, worst of the map",
            worst.radii["rivals"],
            best,
            worst.ratio,
            "≥ 0.995",
        ),
    ]


def soft_row(repeats: int = 5, n: int = 10_000) -> Row:
    """LVM-RS against Cohen at n = 10⁴ and 10 classes, on a small convolutional network (the worst case: cheap passes)."""
    ours, base, ratio = interleaved(*against_votes(small_cnn(), n), repeats)
    return row("LVM-RS seconds / Cohen seconds, n = 10⁴, 10 classes", ours, base, ratio, "≤ 1.10")


def adaptive_row(inputs: int = 40, n_max: int = 10_000, epsilon: float = 0.25) -> Row:
    """Draws until decided at ε against the fixed n, on half-spaces at distances spread around ε."""

    class Half(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.stack([z[:, 0], -z[:, 0]], dim=1)

    smooth = smoothing.SmoothedClassifier(Half().eval(), 0.25, 2, seed=0)
    x = torch.zeros(inputs, 16)
    x[:, 0] = torch.linspace(0, 3 * epsilon, inputs)
    result = smoothing.certify_adaptive(smooth, x, target_radius=epsilon, n_max=n_max)
    used = float(result.draws.mean())
    return row("adaptive draws per input / fixed n", used, n_max, used / n_max, "≤ 0.25")


def plain_certify(
    model: nn.Module,
    x: Tensor,
    sigma: float,
    classes: int,
    n0: int,
    n: int,
    alpha: float,
    batch: int,
) -> tuple[int, float]:
    """Certification the plain way: repeat the input, add fresh noise, count, one Clopper–Pearson bound."""

    def count(total: int) -> Any:
        counts = np.zeros(classes, dtype=int)
        with torch.no_grad():
            while total > 0:
                size = min(batch, total)
                total -= size
                repeated = x.repeat((size, 1, 1, 1))
                votes = model(repeated + torch.randn_like(repeated) * sigma).argmax(1).numpy()
                for vote in votes:
                    counts[vote] += 1
        return counts

    top = int(count(n0).argmax())
    low = clopper_pearson(int(count(n)[top]), n, alpha, "lower")
    return (top, float(smoothing.radius_mono(low, sigma))) if low > 0.5 else (-1, 0.0)


def resnet() -> nn.Module:
    """A ResNet-20 for CIFAR with fixed random weights: the cost is what matters here."""
    torch.manual_seed(0)
    return build("cifar_resnet20", mean=None, std=None).eval()


def small_cnn() -> nn.Module:
    """A small network for 28×28 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    ).eval()  # fmt: skip


def row(name: str, ours: float, baseline: float, ratio: float, goal: str | float) -> Row:
    """One line of a table."""
    return {"name": name, "ours": ours, "baseline": baseline, "ratio": ratio, "goal": goal}


OTHERS = ("cohen", "bonferroni", "cpm")


@dataclass(frozen=True)
class Law:
    """Votes: a class of probability p1, a runner-up with this part of the rest, the other classes share what is left."""

    classes: int
    p1: float
    share: float

    def probabilities(self) -> np.ndarray:
        """All of them; the class comes first."""
        p = np.full(self.classes, (1 - self.p1) * (1 - self.share) / max(self.classes - 2, 1))
        p[:2] = self.p1, (1 - self.p1) * self.share
        return p / p.sum()


@dataclass(frozen=True)
class Point:
    """Mean radii at one law and sample size, in units of σ; `ratio` is that of rivals over the best of the others."""

    law: Law
    n: int
    n0: int
    radii: dict[str, float]

    @property
    def ratio(self) -> float:
        """1 where nobody certifies anything."""
        best = max(self.radii[name] for name in OTHERS)
        return self.radii["rivals"] / best if best > 0 else 1.0


def compare(
    law: Law, n: int, n0: int = 100, *, alpha: float = 1e-3, repetitions: int = 200, seed: int = 0
) -> Point:
    """Mean radii of all vote procedures on the same votes; a wrong class counts as radius 0.

    >>> compare(Law(1000, 0.3, 0.1), 1000, repetitions=50).ratio > 1.2
    True
    """
    rng, p = np.random.default_rng(seed), law.probabilities()
    first, second = rng.multinomial(n0, p, repetitions), rng.multinomial(n, p, repetitions)
    radii = {}
    for name in (*OTHERS, "rivals"):
        certificates = smoothing.certify_counts(first, second, 1.0, alpha, name)
        radii[name] = float(np.where(certificates.selected == 0, certificates.radius, 0.0).mean())
    return Point(law, n, n0, radii)


def rivals_map(
    classes: Sequence[int] = (4, 30, 1000),
    p1: Sequence[float] = (0.35, 0.45, 0.55, 0.7, 0.85, 0.95, 0.995),
    shares: Sequence[float] = (0.05, 0.2, 0.4, 0.65, 0.9, 1.0),
    sizes: Sequence[tuple[int, int]] = ((1000, 30), (1000, 100), (1000, 1000), (10_000, 100)),
    *,
    repetitions: int = 60,
    seed: int = 1,
) -> list[Point]:
    """The map over (c, p₁, runner-up's part, n, n0), where the class is the most likely one.

    The planner was made on c = 3, 10, 100, 1000, p₁ = 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99, 0.999, shares 0.1, 0.3, 0.5, 0.8,
    0.95, 1 and n0 = 100: but for the edge "one rival holds the rest" and the largest c, the points here are others.
    """
    laws = [Law(c, p, s) for c in classes for p in p1 for s in shares]
    kept = [
        law
        for law in laws
        if law.probabilities().argmax() == 0 and (law.probabilities()[1:] < law.p1).all()
    ]
    return [
        compare(law, n, n0, repetitions=repetitions, seed=seed) for law in kept for n, n0 in sizes
    ]


def draw_map(path: str | Path, points: Sequence[Point]) -> None:
    """The map as a figure: one panel per number of classes and of draws (n, n0), the ratio written in every cell."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    classes = sorted({p.law.classes for p in points})
    sizes = sorted({(p.n, p.n0) for p in points})
    p1, shares = (
        sorted({f(p) for p in points}) for f in (lambda p: p.law.p1, lambda p: p.law.share)
    )
    figure = Figure(figsize=(3.1 * len(classes), 2.9 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(classes), squeeze=False)
    image = None
    for i, (n, n0) in enumerate(sizes):
        for j, c in enumerate(classes):
            cells = np.full((len(shares), len(p1)), np.nan)
            for p in points:
                if (p.n, p.n0, p.law.classes) == (n, n0, c):
                    cells[shares.index(p.law.share), p1.index(p.law.p1)] = p.ratio
            image = axes[i, j].imshow(
                np.clip(cells, 0.9, 1.3),
                vmin=0.9,
                vmax=1.3,
                cmap="RdYlGn",
                origin="lower",
                aspect="auto",
            )
            for (row, column), value in np.ndenumerate(cells):
                if np.isfinite(value):
                    text = f"{value:.2f}" if value < 9.995 else "≥10"
                    axes[i, j].text(column, row, text, ha="center", va="center", fontsize=5.5)
            axes[i, j].set_title(f"c = {c}, n = {n:,}, n0 = {n0:,}", fontsize=8)
            axes[i, j].set_xticks(range(len(p1)), [f"{v:g}" for v in p1], fontsize=6)
            axes[i, j].set_yticks(range(len(shares)), [f"{v:g}" for v in shares], fontsize=6)
            axes[i, j].set_xlabel("p₁", fontsize=7)
            axes[i, j].set_ylabel("runner-up's part of the rest", fontsize=7)
    if image is not None:
        figure.colorbar(
            image, ax=axes, label="mean radius of rivals / best of the others", shrink=0.8
        )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rivals"}):
        figure.savefig(path, metadata={"Date": None})
