"""How far Hölder's bound lies above the norm of random matrices: about n^(1/2) times, so its layers contract a lot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from equipoise_lab.experiments import Context, Experiment, Label, Verdict
from equipoise_lab.experiments.figures import canvas, line


@dataclass(frozen=True)
class Settings:
    """Sizes of the matrices."""

    sizes: tuple[int, ...] = (4, 16, 64)


def run(settings: Settings, context: Context) -> Iterator[dict[str, Any]]:
    """Bound over norm for each size."""
    generator = torch.Generator().manual_seed(context.seed)
    for n in context.steps(settings.sizes):
        W = torch.randn(n, n, generator=generator, dtype=torch.float64)
        holder = float((W.abs().sum(0).amax() * W.abs().sum(1).amax()).sqrt())
        yield {"n": n, "ratio": holder / float(torch.linalg.matrix_norm(W, 2))}


def judge(rows: list[dict[str, Any]]) -> Verdict:
    """A bound that holds is never below 1."""
    least = min(row["ratio"] for row in rows)
    label = Label.REPRODUCED if least >= 1 else Label.NOT
    return Verdict(
        label,
        f"{least:.2f} to {max(row['ratio'] for row in rows):.2f} times the norm",
        "at least 1",
    )


def draw(rows: list[dict[str, Any]]) -> Any:
    """The ratio against the size."""
    figure, (axes,) = canvas()
    line(axes, [r["n"] for r in rows], [r["ratio"] for r in rows], "Hölder", 0)
    axes.set(xscale="log", xlabel="size", ylabel="bound/σ₁")
    return figure


EXPERIMENT = Experiment(
    id="holder-gap", chapter="Plug-in", title="Hölder's bound of random matrices",
    claim="Hölder's inequality bounds the spectral norm.", published="a bound", laptop=Settings(),
    paper=Settings(sizes=(4, 16, 64, 256, 1024)), run=run, judge=judge, draw=draw,
)  # fmt: skip
