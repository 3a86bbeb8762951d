"""The gradient of Φ⁻¹ of a smoothed probit model against its bounds."""

from equipoise.lab.experiments.experiment import of_module
from equipoise.lab.experiments.shared.probit_gradient import Settings, draw, judge, quantile_rows

PUBLISHED = "the bound with both σ and L hugs the gradient (σ = 0.1, L = 1)"
NAMES = {"gradient": "gradient of Φ⁻¹∘F̃", "local": "σ, L and the value F̃(x)", "range": "σ alone: 1/σ"}

EXPERIMENT = of_module(
    __name__,
    place="Figure 4.12",
    title="Gradient of the quantile of a smoothed model",
    claim="With the Lipschitz constant the quantile's gradient has a bound far below 1/σ, near the gradient itself.",
    published=PUBLISHED,
    laptop=Settings(sigma=0.1, reach=1.2),
    paper=Settings(sigma=0.1, reach=1.2, points=1001),
    run=quantile_rows,
    judge=lambda rows: judge(rows, "local", ("range",), PUBLISHED),
    draw=lambda rows: draw(rows, NAMES, "|(Φ⁻¹∘F̃)'(x)| and bounds"),
)
