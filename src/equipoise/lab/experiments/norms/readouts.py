"""Which norm is read off the last Gram iterate: only the Frobenius norm gives local order 2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import canvas, legend, line
from equipoise.norms.gram import Readout, gram_norm_plain
from equipoise.norms.peers import power_iterates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: errors below this are rounding and say nothing on the order
FLOOR = 1e-13
READOUTS: dict[str, Readout] = {"Frobenius": "fro", "1-norm": "one", "∞-norm": "inf"}


@dataclass(frozen=True)
class Settings:
    """Gaps σ₂/σ₁ (further singular values decrease geometrically), size and iterations."""

    gaps: tuple[float, ...] = (0.6, 0.8)
    size: int = 60
    iterations: int = 12


def matrix(size: int, gap: float, seed: int) -> Tensor:
    """`U diag(1, ρ, ρ², …) Vᵀ` with Haar-distributed U and V."""
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    return U @ torch.diag(gap ** torch.arange(size, dtype=torch.float64)) @ V.T


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per gap, read-out and iteration: relative error and the local order `log e_{t+1} / log e_t`."""
    for gap in settings.gaps:
        W = matrix(settings.size, gap, context.seed).to(context.device)
        steps = context.steps_of(settings.iterations)
        errors = {
            n: [abs(float(gram_norm_plain(W, t, r)) - 1) for t in range(1, steps + 1)] for n, r in READOUTS.items()
        }
        errors["power"] = [abs(value - 1) for value in power_iterates(W, steps)]
        for name, found in errors.items():
            for t, error in enumerate(found, start=1):
                after = found[t] if t < len(found) else 0.0
                known = FLOOR < after < error < 1
                order = math.log(after) / math.log(error) if known else None
                yield {"gap": gap, "readout": name, "iteration": t, "error": error, "order": order}


def judge(rows: Sequence[Row]) -> Verdict:
    """The limit 2 is out of reach of float64: the order must rise at the end for Frobenius, and stay near 1 for the others.

    `e_t = Θ(q^(2^t)/2^t)` predicts orders that rise to 2 from below.
    """
    orders: dict[tuple[float, str], list[float]] = {}
    for row in rows:
        if row["order"] is not None:
            orders.setdefault((row["gap"], row["readout"]), []).append(row["order"])
    frobenius = [found for (_, name), found in orders.items() if name == "Frobenius"]
    others = [found[-1] for (_, name), found in orders.items() if name in ("1-norm", "∞-norm")]
    rising = all(found[-2] < found[-1] and found[-1] > 1.5 for found in frobenius)
    last = " and ".join(f"{found[-1]:.2f}" for found in frobenius)
    text = f"order rises to {last} (last before rounding) for Frobenius, ends at most at {max(others):.2f} for 1 and ∞"
    return Verdict(Label.DIRECTION if rising and max(others) < 1.2 else Label.NOT, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Error against iteration, one panel per gap."""
    gaps = sorted({row["gap"] for row in rows})
    figure, panels = canvas(len(gaps))
    for axes, gap in zip(panels, gaps, strict=True):
        for k, name in enumerate((*READOUTS, "power")):
            found = [r for r in rows if r["gap"] == gap and r["readout"] == name]
            label = "power iteration" if name == "power" else f"Gram, {name}"
            line(axes, [r["iteration"] for r in found], [max(r["error"], 1e-16) for r in found], label, k)
        axes.set(yscale="log", xlabel="iteration", ylabel="relative error of σ₁", title=f"σ₂/σ₁ = {gap}")
    legend(panels[-1], shared=True)
    return figure


EXPERIMENT = Experiment(
    id="readouts",
    chapter="Spectral norms",
    title="Read-outs of Gram iteration",
    claim="The local order of convergence tends to 2 for the Frobenius read-out only.",
    published="order → 2 only for Frobenius",
    laptop=Settings(),
    paper=Settings(),
    run=run,
    judge=judge,
    draw=draw,
)
