"""Singular values of a dense layer after SN, AOL and SR, and how fast SR approaches norm 1."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.nn import AOLLinear, SNLinear, SRLinear
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line

FILE = "resnet18-imagenet-partial.npz"


@dataclass(frozen=True)
class Settings:
    """Steps t of SR in the profile, and those of the convergence of σ₁(WR_t)."""

    profile: tuple[int, ...] = (2, 3, 4)
    steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6)


def layers(settings: Settings, W: Tensor) -> dict[str, Any]:
    """SN, AOL and SR of the same weight."""
    plain = nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(W)
    methods: dict[str, Any] = {"SN": SNLinear.from_plain(plain), "AOL": AOLLinear.from_plain(plain)}
    return methods | {f"SR, t = {t}": SRLinear.from_plain(plain, t=t) for t in settings.profile}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """The trained layer as stored (1000 × 512) and turned (512 × 1000, as printed): σ_i/σ₁, and σ₁ after SR by t."""
    with np.load(context.file(FILE)) as archive:
        stored = torch.from_numpy(archive["fc.weight"]).double()
    for W in (stored, stored.T.contiguous()):
        shape = f"{W.shape[0]} × {W.shape[1]}"
        for name, layer in layers(settings, W).items():
            sigma = torch.linalg.svdvals(layer.weight.detach())
            for i in np.linspace(0, len(sigma) - 1, 33).round().astype(int).tolist():
                value = float(sigma[i] / sigma[0])
                yield {
                    "shape": shape,
                    "what": "profile",
                    "method": name,
                    "index": i,
                    "value": value,
                }
        for t in context.steps(settings.steps):
            layer = layers(Settings(profile=(t,)), W)[f"SR, t = {t}"]
            top = float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2))
            yield {"shape": shape, "what": "norm", "method": "SR", "index": t, "value": top}


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Flatter: mean of σ_i/σ₁ larger for every SR than for SN and AOL; a verdict per orientation, and one on σ₁."""
    verdicts = []
    for shape in dict.fromkeys(r["shape"] for r in rows):
        profile = [r for r in rows if r["what"] == "profile" and r["shape"] == shape]
        flat: dict[str, float] = {}
        for method in dict.fromkeys(r["method"] for r in profile):
            flat[method] = float(np.mean([r["value"] for r in profile if r["method"] == method]))
        sr = [value for name, value in flat.items() if name.startswith("SR")]
        label = graded(min(sr) > max(flat["SN"], flat["AOL"]), max(sr) > flat["SN"])
        shown = ", ".join(f"{name} {value:.3f}" for name, value in flat.items())
        verdicts.append(Verdict(label, f"mean σᵢ/σ₁: {shown}", EXPERIMENT.published, shape))
    norms = [row["value"] for row in rows if row["what"] == "norm"]
    rising = f"σ₁ after SR from {min(norms):.3f} (t = 1) to {max(norms):.4f}"
    return (
        *verdicts,
        Verdict(graded(max(norms) <= 1 + 1e-9), rising, "tends to 1 from below", "σ₁ by t"),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """A panel of profiles per orientation, and σ₁ by t."""
    figure, panels = canvas(3, width=4.0)
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    for axes, shape in zip(panels, shapes, strict=False):
        profile = [r for r in rows if r["what"] == "profile" and r["shape"] == shape]
        for k, method in enumerate(dict.fromkeys(r["method"] for r in profile)):
            matching = [r for r in profile if r["method"] == method]
            line(
                axes,
                [r["index"] for r in matching],
                [r["value"] for r in matching],
                method,
                k,
                markevery=4,
            )
        axes.set(xlabel="index i", ylabel="σᵢ / σ₁", title=shape)
    for k, shape in enumerate(shapes):
        matching = [r for r in rows if r["what"] == "norm" and r["shape"] == shape]
        line(panels[2], [r["index"] for r in matching], [r["value"] for r in matching], shape, k)
    panels[2].axhline(1, color="0.3", linewidth=0.8)
    panels[2].set(xlabel="t", ylabel="largest singular value after SR")
    legend(panels[0], shared=True)
    legend(panels[2])
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 4.10",
    title="Conditioning after rescaling",
    claim="Spectral rescaling leaves a flatter spectrum than spectral normalisation and AOL, and tends to norm 1 from below.",
    published="SR flatter than both (figure, 512 × 1000 layer of a ResNet-18)",
    laptop=Settings(),
    paper=Settings(steps=(1, 2, 3, 4, 5, 6, 7, 8)),
    needs=(FILE,),
)
