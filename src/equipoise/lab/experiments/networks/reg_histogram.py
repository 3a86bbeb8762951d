"""Norms of every convolution after training towards γ = 1 with different regularizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import COLOURS, Figure, canvas
from equipoise.lab.experiments.shared.training import train
from equipoise.norms.spectral import spectral_norm
from equipoise.regularizers.operators import input_shapes

#: with lr 0.02 a weight of 1 makes `2·weight·lr·taps` = 0.36: the penalty's own steps settle without swinging
METHODS: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "ours (towards 1)": {"regularizers": [{"kind": "spectral", "penalty": "target", "weight": 1.0, "only": "Conv2d"}]},
    "ours (hinge at 1)": {"regularizers": [{"kind": "spectral", "penalty": "hinge", "weight": 0.1, "only": "Conv2d"}]},
    "weight decay": {"regularizers": [{"kind": "frobenius", "weight": 5e-3, "only": "Conv2d"}]},
}


@dataclass(frozen=True)
class Settings:
    """Data, width of the ResNet-18, epochs, examples, step size and what is tried."""

    data: str
    width: int
    epochs: int
    limit: int | None
    lr: float
    methods: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: METHODS)


def recipe(settings: Settings) -> dict[str, object]:
    """ResNet-18 for small images with momentum SGD."""
    return {
        "model": {"factory": "equipoise.nn.models:resnet18", "arguments": {"width": settings.width}},
        "data": {"path": settings.data, "augment": ["flip"], "limit": settings.limit},
        "optimizer": {"lr": settings.lr},
        "schedule": {"kind": "cosine", "warmup": 0.1},
        "epochs": settings.epochs,
        "batch_size": 128,
        "metrics": {"bound": False, "every": settings.epochs},
    }


def norms(model: nn.Module, size: int = 32) -> dict[str, float]:
    """Certified upper end of every convolution's norm on the image it sees."""
    convolutions = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    seen = input_shapes(model, {**convolutions}, torch.zeros(1, 3, size, size))
    found = {name: spectral_norm(m, input_size=seen[name][1:], rtol=1e-3) for name, m in convolutions.items()}
    return {name: float(bracket.upper) for name, bracket in found.items()}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per method and convolution."""
    for name, change in context.steps(settings.methods.items()):
        result = train({**recipe(settings), **change}, context)
        for layer, norm in norms(result.model).items():
            yield {"method": name, "layer": layer, "norm": norm, "accuracy": result.final["accuracy"]}
        context.tell(f"{name}: accuracy {result.final['accuracy']:.3f}")


def judge(rows: Sequence[Row]) -> Verdict:
    """A spike at 1: every norm of ours in [0.98, 1.02]; other methods scattered."""
    ends = {m: [r["norm"] for r in rows if r["method"] == m] for m in dict.fromkeys(r["method"] for r in rows)}
    ours = ends["ours (towards 1)"]
    inside = sum(0.98 <= v <= 1.02 for v in ours) / len(ours)
    spread = {m: max(v) - min(v) for m, v in ends.items()}
    tightest = min(spread, key=lambda m: spread[m]).startswith("ours")
    label = Label.REPRODUCED if inside == 1 else Label.DIRECTION if tightest else Label.NOT
    shown = ", ".join(f"{m} {min(v):.3g}–{max(v):.3g}" for m, v in ends.items())
    return Verdict(label, f"{inside:.0%} of our norms in [0.98, 1.02]; ranges: {shown}", EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Every layer's norm as a mark, one column per method."""
    figure, (axes,) = canvas(width=5.8)
    methods = list(dict.fromkeys(r["method"] for r in rows))
    for k, method in enumerate(methods):
        found = [r["norm"] for r in rows if r["method"] == method]
        spread = [k + 0.5 * (i / max(len(found) - 1, 1) - 0.5) for i in range(len(found))]
        axes.plot(spread, found, "o", color=COLOURS[k], markersize=4, alpha=0.8)
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(methods)), methods, rotation=20, ha="right")
    axes.set(ylabel="spectral norm of each convolution", yscale="log")
    return figure


EXPERIMENT = Experiment(
    id="reg-histogram",
    chapter="Lipschitz networks",
    place="Figures 4.2 to 4.5",
    title="Layer norms after regularised training",
    claim="Regularising the spectral norms leaves every convolution at the target norm; other methods scatter.",
    published="ours: a spike at 1; Singla up to 1.1; weight decay scattered",
    laptop=Settings("cifar10.npz", width=8, epochs=4, limit=5000, lr=0.02),
    paper=Settings("cifar10-full.npz", width=64, epochs=200, limit=None, lr=0.02),
    run=run,
    judge=judge,
    draw=draw,
    needs=("cifar10.npz",),
)
