"""The gradient of a smoothed probit model against its bounds."""

from equipoise.lab.experiments.experiment import of_module
from equipoise.lab.experiments.shared.probit_gradient import Settings, draw, judge, plain_rows

PUBLISHED = "the bound with both σ and L hugs the gradient (σ = 0.2, L = 1)"
NAMES = {
    "gradient": "gradient of F̃",
    "both": "σ and L together",
    "local": "σ, L and the value F̃(x)",
    "range": "σ alone",
    "lipschitz": "L alone",
}

EXPERIMENT = of_module(
    __name__,
    place="Figure 4.11",
    title="Gradient of a smoothed model",
    claim="Knowing both the noise and the Lipschitz constant bounds the smoothed gradient more tightly than either.",
    published=PUBLISHED,
    laptop=Settings(sigma=0.2),
    paper=Settings(sigma=0.2, points=1001),
    run=plain_rows,
    judge=lambda rows: judge(rows, "both", ("range", "lipschitz"), PUBLISHED),
    draw=lambda rows: draw(rows, NAMES, "|F̃'(x)| and bounds"),
)
