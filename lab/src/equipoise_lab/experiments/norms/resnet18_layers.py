"""Every convolution of a trained ResNet-18: certified bracket against five published methods."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, legend
from equipoise_lab.experiments.norms.conv_sweep import NAMES, contestants
from equipoise_lab.timing import take_turns

FILE = "resnet18-imagenet-partial.npz"


@dataclass(frozen=True)
class Settings:
    """Largest input size the SVD of every frequency is run at: larger images only repeat the symbol more finely."""

    largest: int


def layers(folder_file: str) -> Iterator[tuple[str, Tensor, int]]:
    """(name, kernel, input size) in the order of the network, for images of 224×224."""
    sizes = {"conv1": 224, "layer1": 56, "layer2": 28, "layer3": 14, "layer4": 7}
    with np.load(folder_file) as archive:
        for name in archive.files:
            if name.endswith(".weight") and archive[name].ndim == 4:
                yield (
                    name.removesuffix(".weight"),
                    torch.from_numpy(archive[name]),
                    sizes[name.split(".")[0]],
                )


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per layer and method; stride 1, as all compared methods see the layer. Ours: both ends of the bracket."""
    for name, K, size in context.steps(layers(str(context.file(FILE)))):
        n = min(size, settings.largest)
        contest = take_turns(contestants(K.to(context.device), n), 1)
        for method, norm in contest.results.items():
            value = float(norm.upper if method == "ours" else norm)
            row: Row = {
                "layer": name,
                "shape": "×".join(map(str, K.shape)),
                "size": n,
                "method": method,
                "value": value,
            }
            yield {
                **row,
                "lower": float(norm.lower) if method == "ours" else None,
                "seconds": contest.seconds[method],
            }
        context.tell(name)


def judge(rows: Sequence[Row]) -> Verdict:
    """Ours above Ryu's power iteration on every layer and within 5 % of the exact circular value; how often peers break order."""
    value = {(r["layer"], r["method"]): r["value"] for r in rows}
    names = list(dict.fromkeys(r["layer"] for r in rows))
    sound = all(value[n, "ours"] >= value[n, "ryu"] * (1 - 1e-6) for n in names)
    excess = max(value[n, "ours"] / value[n, "ryu"] - 1 for n in names)
    worst = {m: max(value[n, m] / value[n, "ryu"] for n in names) for m in ("singla", "araujo")}
    seconds = {m: sum(r["seconds"] for r in rows if r["method"] == m) for m in NAMES}
    good = sound and excess < 0.1
    text = (
        f"{len(names)} layers (BatchNorm folded in, four kernels of layer 4 not at hand): ours at most {excess:.1%} above Ryu's "
        f"and never below, Singla up to {worst['singla']:.2f}×, Araujo up to {worst['araujo']:.2f}×; time ours / Sedghi "
        f"{seconds['ours'] / seconds['sedghi']:.2f}"
    )
    return Verdict(Label.DIRECTION if good else Label.REFUTED, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Value relative to Ryu's, per layer."""
    figure, (axes,) = canvas(width=8.0, height=3.8)
    names = list(dict.fromkeys(r["layer"] for r in rows))
    value = {(r["layer"], r["method"]): r["value"] for r in rows}
    for k, (method, label) in enumerate(NAMES.items()):
        ratio = [value[n, method] / value[n, "ryu"] for n in names]
        axes.plot(
            range(len(names)),
            ratio,
            MARKERS[k],
            color=COLOURS[k],
            label=label,
            markersize=5,
            fillstyle="none",
        )
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes.set(yscale="log", ylabel="bound / Ryu's value")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 3.10, Table A.3",
    title="All convolutions of a trained ResNet-18",
    claim="Gram iteration gives the exact circular value and stays above power iteration, on real kernels.",
    published="15.91, 6.00, 5.34, 7.00, 3.82, … (torchvision's kernels); Singla up to 1.8×, once below Ryu; Araujo up to 7.7×",
    laptop=Settings(largest=28),
    paper=Settings(largest=224),
    needs=(FILE,),
)
