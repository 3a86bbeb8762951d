"""A hard threshold turns a small variance into the largest one a bounded variable can have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line


@dataclass(frozen=True)
class Settings:
    """Half widths ε of the uniform score around ½, and draws per ε."""

    widths: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
    draws: int = 200_000


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """X ~ U(½ − ε, ½ + ε): sample variances of X and of 1{X > ½} beside ε²/3 and 1/4."""
    generator = np.random.default_rng(context.seed)
    for width in context.steps(settings.widths):
        x = generator.uniform(0.5 - width, 0.5 + width, settings.draws)
        yield {
            "width": width,
            "draws": settings.draws,
            "soft": float(x.var(ddof=1)),
            "hard": float((x > 0.5).var(ddof=1)),
        }


def judge(rows: Sequence[Row]) -> Verdict:
    """Both variances within four standard errors of the exact values."""
    soft = max(abs(r["soft"] / (r["width"] ** 2 / 3) - 1) for r in rows)
    hard = max(abs(r["hard"] / 0.25 - 1) for r in rows)
    limit = 4 * (0.8 / rows[0]["draws"]) ** 0.5  # kurtosis of the uniform law: Var(s²) ≈ 0.8 σ⁴/n
    good = soft < limit and hard < 4 / rows[0]["draws"] * 4
    text = f"relative deviation at most {soft:.1e} from ε²/3 and {hard:.1e} from 1/4 ({rows[0]['draws']:,} draws each)"
    return Verdict(graded(good), text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Measured variances (marks) on the exact curves."""
    figure, (axes,) = canvas()
    x = [r["width"] for r in rows]
    line(axes, x, [r["hard"] for r in rows], "after the threshold", 1, linestyle="")
    line(axes, x, [0.25] * len(x), "1/4", 1, marker="")
    line(axes, x, [r["soft"] for r in rows], "before", 0, linestyle="")
    line(axes, x, [w * w / 3 for w in x], "ε²/3", 0, marker="")
    axes.set(xscale="log", yscale="log", xlabel="half width ε", ylabel="variance")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="an example in the text of chapter 6",
    title="Variance before and after a hard threshold",
    claim="The variance ε²/3 of a score becomes 1/4 after a hard decision, however small ε.",
    published="ε²/3 vs 1/4",
    laptop=Settings(),
    paper=Settings(draws=10_000_000),
)
