"""Convolutions by kernel, input and channels: five methods against power iteration on the zero-padded operator."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from equipoise.norms.spectral import spectral_norm
from equipoise_lab.experiments.experiment import (
    NEEDS_GPU,
    Context,
    Experiment,
    Label,
    Row,
    Verdict,
    graded,
    of_module,
)
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.peers import PEERS
from equipoise_lab.timing import take_turns

PUBLISHED = "Gram iteration = Sedghi's value, fastest"
NAMES = {
    "ours": "equipoise, certified upper end",
    "gram": "Gram iteration, t = 5",
    "sedghi": "Sedghi (SVD)",
    "singla": "Singla",
    "araujo": "Araujo",
    "ryu": "Ryu (power iteration)",
}
ITERATIONS = {"gram": 5, "ryu": 100, "singla": 50, "araujo": 50, "sedghi": 1}


@dataclass(frozen=True)
class Settings:
    """What varies (`kernel`, `channels` or `size`) over which values, the rest fixed; kernels drawn per point."""

    vary: str
    values: tuple[int, ...]
    channels: int = 16
    kernel: int = 3
    size: int = 32
    draws: int = 2

    def point(self, value: int) -> tuple[int, int, int]:
        """(channels, kernel, size) at one value of what varies."""
        settings = {
            "channels": self.channels,
            "kernel": self.kernel,
            "size": self.size,
            self.vary: value,
        }
        return settings["channels"], settings["kernel"], settings["size"]


def contestants(K: Tensor, size: int) -> dict[str, Callable[[], Any]]:
    """Every method on one kernel; ours is the certified bracket of the zero-padded operator."""
    methods: dict[str, Callable[[], Any]] = {
        name: partial(PEERS[name].run, K, size, "circular" if name != "ryu" else "zeros", t)
        for name, t in ITERATIONS.items()
    }
    methods["ours"] = lambda: spectral_norm(_module(K), input_size=(size, size), rtol=1e-2)
    return methods


def _module(K: Tensor) -> torch.nn.Conv2d:
    conv = torch.nn.Conv2d(
        K.shape[1], K.shape[0], K.shape[2], padding=K.shape[2] // 2, bias=False, device=K.device
    )
    conv.weight.data = K
    return conv


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per point, draw (Gaussian and uniform alternate) and method: value − Ryu's value, and seconds."""
    generator = torch.Generator().manual_seed(context.seed)
    for value in context.steps(settings.values):
        c, k, n = settings.point(value)
        for number in context.steps(range(settings.draws)):
            draw = torch.randn if number % 2 == 0 else torch.rand
            K = draw(c, c, k, k, generator=generator).to(context.device)
            contest = take_turns(contestants(K, n), 1)
            reference = float(contest.results["ryu"])
            for name, norm in contest.results.items():
                result = float(norm.upper if name == "ours" else norm)
                yield {
                    settings.vary: value, "draw": number, "method": name, "value": result,
                    "difference": result - reference, "seconds": contest.seconds[name],
                }  # fmt: skip
        context.tell(f"{settings.vary} = {value}")


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The value: Gram at most 5 % above Sedghi's, ours not below Ryu's. The speed is not judged on a CPU."""
    by = {name: [r for r in rows if r["method"] == name] for name in NAMES}
    gap = max(g["value"] / s["value"] - 1 for g, s in zip(by["gram"], by["sedghi"], strict=True))
    below = min(o["value"] / r["value"] for o, r in zip(by["ours"], by["ryu"], strict=True))
    seconds = {name: sum(r["seconds"] for r in matching) for name, matching in by.items()}
    value = f"Gram at most {gap:.1%} above Sedghi; ours/Ryu ≥ {below:.4f}"
    times = ", ".join(f"{name} {seconds[name]:.2g} s" for name in NAMES)
    return (
        Verdict(graded(gap < 0.05 and below >= 1 - 1e-9), value, PUBLISHED, "value"),
        Verdict(Label.NOT_COMPARABLE, f"{times} in all {NEEDS_GPU}", "fastest (GPU)", "speed"),
    )


def draw(rows: Sequence[Row], vary: str, label: str) -> Figure:
    """Difference to Ryu's value and seconds, against what varies."""
    figure, (left, right) = canvas(2)
    values = sorted({row[vary] for row in rows})
    for k, (method, name) in enumerate(NAMES.items()):
        at = [[r for r in rows if r["method"] == method and r[vary] == v] for v in values]
        if method != "ryu":
            line(
                left, values, [mean(r["difference"] for r in matching) for matching in at], name, k
            )
        line(right, values, [median(r["seconds"] for r in matching) for matching in at], name, k)
    left.set(xlabel=label, ylabel="value − Ryu's value (mean)", yscale="symlog")
    right.set(xlabel=label, ylabel="seconds (median)", yscale="log")
    legend(right, shared=True)
    return figure


def sweep(
    identifier: str, place: str, title: str, label: str, laptop: Settings, paper: Settings
) -> Experiment:
    """The experiment of one sweep."""
    claim = "Gram iteration gives Sedghi's exact circular value at a fraction of the time of the other methods."
    shared: dict[str, Any] = {
        "claim": claim,
        "published": PUBLISHED,
        "laptop": laptop,
        "paper": paper,
    }
    draws = partial(draw, vary=laptop.vary, label=label)
    return of_module(__name__, id=identifier, place=place, title=title, draw=draws, **shared)


EXPERIMENTS = (
    sweep(
        "conv-channels", "Figure 3.8", "Convolutions: channels", "input and output channels",
        laptop=Settings("channels", (4, 8, 16, 32, 64)),
        paper=Settings("channels", (4, 8, 16, 32, 64, 128, 256, 512), draws=50),
    ),
    sweep(
        "conv-input", "Figure 3.9", "Convolutions: input size", "input size n",
        laptop=Settings("size", (16, 32, 64, 96)),
        paper=Settings("size", (16, 32, 64, 128, 256, 512), draws=50),
    ),
    sweep(
        "conv-kernel", "Figure 3.7", "Convolutions: kernel size", "kernel size k",
        laptop=Settings("kernel", (3, 5, 7, 9, 11), size=64),
        paper=Settings("kernel", (3, 5, 7, 9, 11, 13), size=252, draws=50),
    ),
)  # fmt: skip
