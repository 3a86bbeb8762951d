"""The factor that turns a norm on a coarse frequency grid into a bound: the published one fails, the cosine one holds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from equipoise.norms.spectral import spectral_norm
from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.peers import complex_gram


@dataclass(frozen=True)
class Settings:
    """Gram iterations and grids n₀ of the curves; random kernels per grid to test both factors on."""

    iterations: tuple[int, ...] = (1, 3, 5, 6)
    grids: tuple[int, ...] = (3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 224)
    kernels: int = 200
    tested: tuple[int, ...] = (3, 4, 5, 6, 8, 12)


def published(t: int, n0: int, k: int = 3) -> float:
    """`(1/(1 − α))^(2^-t)`, α = 2^t⌊k/2⌋/n₀; infinite where α ≥ 1."""
    alpha = 2**t * (k // 2) / n0
    return (1 / (1 - alpha)) ** (2.0**-t) if alpha < 1 else math.inf


def cosine(n0: int, k: int = 3) -> float:
    """`(1/cos(π(k−1)/(2n₀)))²` for two axes, independent of t; infinite where n₀ < k."""
    angle = math.pi * (k - 1) / (2 * n0)
    return math.cos(angle) ** -2 if angle < math.pi / 2 else math.inf


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Curves of both factors, and for random 1- and 2-channel 3×3 kernels the worst `true norm / bound` of each."""
    for n0 in settings.grids:
        for t in settings.iterations:
            yield {
                "what": "factor",
                "n0": n0,
                "t": t,
                "published": published(t, n0),
                "cosine": cosine(n0),
            }
    generator = torch.Generator().manual_seed(context.seed)
    for n0 in context.steps(settings.tested):
        for t in settings.iterations:
            if math.isinf(published(t, n0)) and math.isinf(cosine(n0)):
                continue
            worst = {"published": 0.0, "cosine": 0.0}
            for number in range(context.steps_of(settings.kernels)):
                K = torch.randn(1 + number % 2, 1, 3, 3, generator=generator, dtype=torch.float64)
                grid = float(complex_gram(K, n0, t))
                truth = float(spectral_norm(_module(K), input_size=None, rtol=1e-2).lower)
                for name, factor in (("published", published(t, n0)), ("cosine", cosine(n0))):
                    worst[name] = (
                        max(worst[name], truth / (factor * grid))
                        if math.isfinite(factor)
                        else worst[name]
                    )
            yield {"what": "worst", "n0": n0, "t": t, **worst}
        context.tell(f"n₀ = {n0}")


def _module(K: torch.Tensor) -> torch.nn.Conv2d:
    conv = torch.nn.Conv2d(K.shape[1], K.shape[0], 3, padding=1, bias=False, dtype=K.dtype)
    conv.weight.data = K
    return conv


def judge(rows: Sequence[Row]) -> Verdict:
    """Corrected (errata 1): the published factor must be seen to fail and the cosine factor never to."""
    worst = [row for row in rows if row["what"] == "worst"]
    old, new = max(r["published"] for r in worst), max(r["cosine"] for r in worst)
    text = f"true norm up to {old:.2f}× the published bound; at most {new:.4f}× the bound with the cosine factor"
    return Verdict(
        Label.CORRECTED if old > 1 and new <= 1 else Label.REFUTED, text, EXPERIMENT.published
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Left: both factors against n₀. Right: how far the true norm exceeds either bound."""
    figure, (left, right) = canvas(2)
    curves = [row for row in rows if row["what"] == "factor"]
    steps = sorted({row["t"] for row in curves})
    for k, t in enumerate(steps):
        matching = [row for row in curves if row["t"] == t and math.isfinite(row["published"])]
        line(
            left,
            [r["n0"] for r in matching],
            [r["published"] for r in matching],
            f"published, t = {t}",
            k,
        )
    matching = [row for row in curves if row["t"] == steps[0] and math.isfinite(row["cosine"])]
    line(
        left,
        [r["n0"] for r in matching],
        [r["cosine"] for r in matching],
        "cosine, every t",
        len(steps),
        linewidth=2.2,
    )
    left.set(xscale="log", xlabel="grid n₀", ylabel="factor", ylim=(0.98, 3))
    worst = [row for row in rows if row["what"] == "worst"]
    for k, name in enumerate(("published", "cosine")):
        at = sorted({r["n0"] for r in worst if r[name] > 0})
        line(right, at, [max(r[name] for r in worst if r["n0"] == n) for n in at], name, k)
    right.axhline(1, color="0.4", linewidth=0.8)
    right.set(xlabel="grid n₀", ylabel="largest true norm / bound")
    legend(left)
    legend(right)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 3.2",
    title="The factor for a coarser grid",
    claim="A factor (1/(1 − α))^(2^-t) turns the norm on an n₀×n₀ grid into an upper bound for every input size.",
    published="the factor falls towards 1 as n₀ grows; claimed to be a bound",
    laptop=Settings(),
    paper=Settings(kernels=5000),
)
