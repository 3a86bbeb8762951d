"""Measured top eigenvalue and layer-wise bound as the noise level of activation decay grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from scipy import stats
from torch import nn

from equipoise.curvature import hessian_bound_report
from equipoise.data import load_dataset
from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import COLOURS, MARKERS, canvas, legend
from equipoise.lab.experiments.shared.training import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """Noise levels of activation decay, seeds, width and epochs of the MLP, inputs of the Hessian."""

    sigmas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4, 0.8)
    seeds: int = 3
    width: int = 32
    epochs: int = 15
    inputs: int = 300


def recipe(settings: Settings, sigma: float) -> dict[str, object]:
    """A small ReLU MLP on the bundled digits."""
    return {
        "model": {"factory": "equipoise.nn.models:mlp", "arguments": {"widths": [settings.width] * 2}},
        "data": {"path": "digits"},
        "regularizers": [{"kind": "activation-decay", "sigma": sigma}] if sigma else [],
        "optimizer": {"kind": "adam", "lr": 3e-3},
        "epochs": settings.epochs,
        "batch_size": 64,
        "metrics": {"bound": False, "every": settings.epochs},
    }


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per σ and seed: |λ|_max of the Hessian (found, so a lower bound) and the bound of the Gauss–Newton matrix."""
    x, y = load_dataset("digits", "train").batch(range(settings.inputs))
    for sigma in context.steps(settings.sigmas):
        for seed in context.steps(range(settings.seeds)):
            result = train(recipe(settings, sigma), context, seed)
            assert isinstance(result.model, nn.Sequential)
            report = hessian_bound_report(result.model, "ce", (x, y))
            yield {"sigma": sigma, "seed": seed, "measured": report.measured, "bound": report.gauss_newton,
                   "accuracy": result.final["accuracy"]}  # fmt: skip
        context.tell(f"σ = {sigma}")


def judge(rows: Sequence[Row]) -> Verdict:
    """Same trend: rank correlation of bound and measured value over all runs; both fall from the smallest to the largest σ."""
    rank = float(stats.spearmanr([r["measured"] for r in rows], [r["bound"] for r in rows]).statistic)
    falls = {key: _mean(rows, key, max) / _mean(rows, key, min) for key in ("measured", "bound")}
    label = (Label.REPRODUCED if rank > 0.7 else Label.DIRECTION) if max(falls.values()) < 1 else Label.NOT
    loose = sum(r["bound"] for r in rows) / sum(r["measured"] for r in rows)
    text = (
        f"rank correlation {rank:.2f} over {len(rows)} networks; largest σ / none: measured × {falls['measured']:.2f}, "
        f"bound × {falls['bound']:.2f}; the bound (of the Gauss–Newton matrix) is {loose:.0f} times the measured value"
    )
    return Verdict(label, text, EXPERIMENT.published)


def _mean(rows: Sequence[Row], key: str, end: Callable[[list[float]], float]) -> float:
    sigma = end([r["sigma"] for r in rows])
    return mean(r[key] for r in rows if r["sigma"] == sigma)


def draw(rows: Sequence[Row]) -> Figure:
    """Both against σ, a mark per seed."""
    figure, (axes,) = canvas()
    for k, (key, name) in enumerate((("measured", "|λ|max of the Hessian, measured"), ("bound", "layer-wise bound"))):
        axes.plot(
            [r["sigma"] for r in rows], [r[key] for r in rows], MARKERS[k], color=COLOURS[k], label=name, markersize=5
        )
    axes.set(yscale="log", xlabel="σ of activation decay", ylabel="curvature")
    legend(axes)
    return figure


EXPERIMENT = Experiment(
    id="hessian-bound",
    chapter="Generalisation",
    title="Curvature and its layer-wise bound",
    claim="The bound falls with the noise level of activation decay as the measured top eigenvalue does.",
    published="same trend (figure)",
    laptop=Settings(),
    paper=Settings(seeds=5, width=128, epochs=100, inputs=1400),
    run=run,
    judge=judge,
    draw=draw,
)
