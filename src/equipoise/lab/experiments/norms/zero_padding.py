"""Zero-padded convolutions against the true norm of their Toeplitz matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.timing import take_turns
from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import canvas, legend, line
from equipoise.norms.peers import PEERS
from equipoise.norms.spectral import spectral_norm
from equipoise.norms.toeplitz import norm2_toep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "ours": "equipoise, certified upper end",
    "toep": "norm2_toep",
    "circ": "circular Gram, no correction",
    "singla": "Singla",
    "ryu": "Ryu (power iteration)",
}


@dataclass(frozen=True)
class Settings:
    """Channels, input and kernel size, Gram iterations of norm2_toep (its kernel doubles with each)."""

    channels: tuple[int, ...]
    size: int
    kernel: int = 3
    draws: int = 3
    toep: int = 3


def contestants(K: Tensor, settings: Settings) -> dict[str, Callable[[], float]]:
    """Each method as a function of nothing; the truth is the largest singular value of the materialised operator."""
    conv = torch.nn.Conv2d(K.shape[1], K.shape[0], K.shape[2], padding=K.shape[2] // 2, bias=False)
    conv.weight.data = K
    n = settings.size
    return {
        "ours": lambda: float(spectral_norm(conv, input_size=(n, n), rtol=1e-3).upper),
        "toep": lambda: float(norm2_toep(K, settings.toep)),
        "circ": lambda: float(PEERS["gram"].run(K, n, "zeros", 6)),
        "singla": lambda: float(PEERS["singla"].run(K, n, "zeros", 50)),
        "ryu": lambda: float(PEERS["ryu"].run(K, n, "zeros", 100)),
    }


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per draw and method: ratio to the true norm, float64 kernels."""
    generator = torch.Generator().manual_seed(context.seed)
    for c in context.steps(settings.channels):
        for number in context.steps(range(settings.draws)):
            K = torch.randn(c, c, settings.kernel, settings.kernel, generator=generator, dtype=torch.float64)
            truth = float(PEERS["svd"].run(K, settings.size, "zeros"))
            contest = take_turns(contestants(K, settings), 1)
            for name, value in contest.results.items():
                ratio = value / truth
                yield {"channels": c, "draw": number, "method": name, "ratio": ratio, "seconds": contest.seconds[name]}
        context.tell(f"{c} channels")


def judge(rows: Sequence[Row]) -> Verdict:
    """Power iteration never above the truth, norm2_toep never below it and tighter than Singla; ours tighter still."""
    ratio = {name: [r["ratio"] for r in rows if r["method"] == name] for name in NAMES}
    below, above = max(ratio["ryu"]) <= 1 + 1e-9, min(ratio["toep"]) >= 1 - 1e-12
    sound = min(ratio["ours"]) >= 1 - 1e-12
    tight = {name: mean(found) for name, found in ratio.items()}
    good = below and above and sound and tight["toep"] < tight["singla"]
    missed = sum(v < 1 - 1e-12 for v in ratio["circ"])
    text = (
        f"Ryu at most {max(ratio['ryu']):.6f} of the truth; mean ratio norm2_toep {tight['toep']:.3f}, Singla "
        f"{tight['singla']:.3f}, ours {tight['ours']:.4f}; circular value below the truth in {missed} of {len(ratio['circ'])}"
    )
    label = Label.REPRODUCED if good and tight["toep"] <= min(tight["circ"], tight["singla"]) else Label.DIRECTION
    return Verdict(label if good else Label.NOT, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Mean ratio to the truth and seconds against channels."""
    figure, (left, right) = canvas(2)
    channels = sorted({r["channels"] for r in rows})
    for k, (method, name) in enumerate(NAMES.items()):
        at = [[r for r in rows if r["method"] == method and r["channels"] == c] for c in channels]
        line(left, channels, [mean(r["ratio"] for r in found) for found in at], name, k)
        line(right, channels, [mean(r["seconds"] for r in found) for found in at], name, k)
    left.axhline(1, color="0.4", linewidth=0.8)
    left.set(xlabel="channels", ylabel="value / true norm (mean)")
    right.set(xlabel="channels", ylabel="seconds (mean)", yscale="log")
    legend(left, shared=True)
    return figure


EXPERIMENT = Experiment(
    id="zero-padding",
    chapter="Spectral norms",
    title="Zero padding against the truth",
    claim="Power iteration stays below the true norm of the zero-padded operator; norm2_toep is the best upper bound.",
    published="Ryu below the truth, norm2_toep best",
    laptop=Settings(channels=(1, 2, 4, 8), size=16),
    paper=Settings(channels=(1, 2, 4, 8, 16, 32), size=32, draws=10),
    run=run,
    judge=judge,
    draw=draw,
)
