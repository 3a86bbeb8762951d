"""Singular values of a dense layer after SN, AOL and SR, and how fast SR approaches norm 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import canvas, legend, line
from equipoise.nn import AOLLinear, SNLinear, SRLinear, Weighted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "resnet18-imagenet-partial.npz"


@dataclass(frozen=True)
class Settings:
    """Steps t of SR in the profile, and those of the convergence of σ₁(WR_t)."""

    profile: tuple[int, ...] = (2, 3, 4)
    steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6)


def layers(settings: Settings, W: Tensor) -> dict[str, Weighted]:
    """SN, AOL and SR of the same weight."""
    plain = nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(W)
    found: dict[str, Weighted] = {"SN": SNLinear.from_plain(plain), "AOL": AOLLinear.from_plain(plain)}
    return found | {f"SR, t = {t}": SRLinear.from_plain(plain, t=t) for t in settings.profile}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """The trained 512 → 1000 layer: σ_i/σ₁ at quantiles of the spectrum, and σ₁ after SR by t."""
    with np.load(context.file(FILE)) as archive:
        W = torch.from_numpy(archive["fc.weight"]).double()
    for name, layer in layers(settings, W).items():
        sigma = torch.linalg.svdvals(layer.weight.detach())
        for i in np.linspace(0, len(sigma) - 1, 33).round().astype(int).tolist():
            yield {"what": "profile", "method": name, "index": i, "value": float(sigma[i] / sigma[0])}
    for t in context.steps(settings.steps):
        layer = layers(Settings(profile=(t,)), W)[f"SR, t = {t}"]
        yield {
            "what": "norm",
            "method": "SR",
            "index": t,
            "value": float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)),
        }


def judge(rows: Sequence[Row]) -> Verdict:
    """Flatter: mean of σ_i/σ₁ larger for every SR than for SN and AOL; σ₁ rises to 1 with t and never passes it."""
    profile = [row for row in rows if row["what"] == "profile"]
    flat = {
        m: float(np.mean([r["value"] for r in profile if r["method"] == m]))
        for m in dict.fromkeys(r["method"] for r in profile)
    }
    norms = [row["value"] for row in rows if row["what"] == "norm"]
    sr = [value for name, value in flat.items() if name.startswith("SR")]
    below = max(norms) <= 1 + 1e-9
    label = Label.NOT
    if below:
        label = (
            Label.REPRODUCED
            if min(sr) > max(flat["SN"], flat["AOL"])
            else Label.DIRECTION
            if max(sr) > flat["SN"]
            else Label.NOT
        )
    shown = ", ".join(f"{name} {value:.3f}" for name, value in flat.items())
    return Verdict(
        label, f"mean σᵢ/σ₁: {shown}; σ₁ after SR from {norms[0]:.3f} (t = 1) to {norms[-1]:.4f}", EXPERIMENT.published
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Left: profiles. Right: σ₁ by t."""
    figure, (left, right) = canvas(2)
    profile = [row for row in rows if row["what"] == "profile"]
    for k, method in enumerate(dict.fromkeys(r["method"] for r in profile)):
        found = [r for r in profile if r["method"] == method]
        line(left, [r["index"] for r in found], [r["value"] for r in found], method, k, marker="")
    found = [row for row in rows if row["what"] == "norm"]
    line(right, [r["index"] for r in found], [r["value"] for r in found], "σ₁(W R_t)", 0)
    right.axhline(1, color="0.3", linewidth=0.8)
    left.set(xlabel="index i", ylabel="σᵢ / σ₁")
    right.set(xlabel="t", ylabel="largest singular value after SR")
    legend(left)
    return figure


EXPERIMENT = Experiment(
    id="sr-conditioning",
    chapter="Lipschitz networks",
    title="Conditioning after rescaling",
    claim="Spectral rescaling leaves a flatter spectrum than spectral normalisation and AOL, and tends to norm 1 from below.",
    published="SR flatter than both (figure, 512 × 1000 layer of a ResNet-18)",
    laptop=Settings(),
    paper=Settings(steps=(1, 2, 3, 4, 5, 6, 7, 8)),
    run=run,
    judge=judge,
    draw=draw,
    needs=(FILE,),
)
