"""Which norm is read off the last Gram iterate: only the Frobenius norm gives local order 2.

The Frobenius read-out depends on the singular values alone, so its error is evaluated in exact exponents (mpmath), far below the
smallest float; the others stall at errors that float64 holds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.norms.gram import Readout, gram_norm_plain
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.peers import power_iterates

#: errors of float64 below this are rounding and say nothing on the order
FLOOR = 1e-13
EXACT = "Frobenius"
READOUTS: dict[str, Readout] = {"1-norm": "one", "∞-norm": "inf"}


@dataclass(frozen=True)
class Settings:
    """Gaps σ₂/σ₁ (further singular values decrease geometrically), size and iterations."""

    gaps: tuple[float, ...] = (0.6, 0.8)
    size: int = 60
    iterations: int = 12


def matrix(size: int, gap: float, seed: int) -> Tensor:
    """`U diag(1, ρ, ρ², …) Vᵀ` with Haar-distributed U and V."""
    generator = torch.Generator().manual_seed(seed)
    U, V = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    return U @ torch.diag(gap ** torch.arange(size, dtype=torch.float64)) @ V.T


def frobenius_error(gap: float, size: int, t: int) -> Any:
    """`(Σ_i ρ^(2i·2^t))^(1/(2·2^t)) − 1` of the read-out after t iterations, as an mpmath number."""
    import mpmath

    exponent = 2 * 2**t
    total = mpmath.fsum(mpmath.mpf(gap) ** (i * exponent) for i in range(1, size))
    return mpmath.expm1(mpmath.log1p(total) / exponent)


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per gap, read-out and iteration: log₁₀ of the relative error and the local order `log e_{t+1} / log e_t`."""
    import mpmath

    steps = context.steps_of(settings.iterations)
    for gap in settings.gaps:
        W = matrix(settings.size, gap, context.seed).to(context.device)
        exact = [frobenius_error(gap, settings.size, t) for t in range(1, steps + 1)]
        logarithms = {EXACT: [float(mpmath.log10(e)) for e in exact]}
        rounded = {
            n: [abs(float(gram_norm_plain(W, t, r)) - 1) for t in range(1, steps + 1)]
            for n, r in READOUTS.items()
        }
        rounded["power"] = [abs(value - 1) for value in power_iterates(W, steps)]
        logarithms |= {
            n: [math.log10(max(e, FLOOR)) for e in values] for n, values in rounded.items()
        }
        for name, logs in logarithms.items():
            for t, error in enumerate(logs, start=1):
                after = logs[t] if t < len(logs) else None
                published = (
                    after is not None
                    and after < error < 0
                    and (name == EXACT or after > math.log10(FLOOR))
                )
                order = after / error if published and after is not None else None
                yield {
                    "gap": gap,
                    "readout": name,
                    "iteration": t,
                    "log10 error": error,
                    "order": order,
                }


def judge(rows: Sequence[Row]) -> Verdict:
    """The order must rise to 2 (above 1.97 at the last step) for Frobenius, and stay near 1 for the others.

    `e_t = Θ(q^(2^t)/2^t)` predicts orders that rise to 2 from below.
    """
    orders: dict[tuple[float, str], list[float]] = {}
    for row in rows:
        if row["order"] is not None:
            orders.setdefault((row["gap"], row["readout"]), []).append(row["order"])
    frobenius = [values for (_, name), values in orders.items() if name == EXACT]
    others = [values[-1] for (_, name), values in orders.items() if name in READOUTS]
    ends = [values[-1] for values in frobenius]
    last = " and ".join(f"{end:.3f}" for end in ends)
    text = f"order ends at {last} for Frobenius (exact exponents), at most at {max(others):.2f} for 1 and ∞"
    label = graded(min(ends) > 1.97 and max(others) < 1.2, min(ends) > 1.5 and max(others) < 1.2)
    return Verdict(label, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Error against iteration, one panel per gap."""
    gaps = sorted({row["gap"] for row in rows})
    figure, panels = canvas(len(gaps))
    for axes, gap in zip(panels, gaps, strict=True):
        for k, name in enumerate((EXACT, *READOUTS, "power")):
            matching = [r for r in rows if r["gap"] == gap and r["readout"] == name]
            label = "power iteration" if name == "power" else f"Gram, {name}"
            line(
                axes,
                [r["iteration"] for r in matching],
                [10 ** max(r["log10 error"], -300) for r in matching],
                label,
                k,
            )
        axes.set(
            yscale="log",
            xlabel="iteration",
            ylabel="relative error of σ₁",
            ylim=(1e-40, 2),
            title=f"σ₂/σ₁ = {gap}",
        )
    legend(panels[-1], shared=True)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 3.6",
    title="Read-outs of Gram iteration",
    claim="The local order of convergence tends to 2 for the Frobenius read-out only.",
    published="order → 2 only for Frobenius",
    laptop=Settings(),
    paper=Settings(),
)
