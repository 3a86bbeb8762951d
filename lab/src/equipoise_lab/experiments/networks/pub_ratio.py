"""The product bound of whole networks relative to the same product with power iteration's norms."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from equipoise.checkpoints import load_weights
from equipoise.lipschitz import lipschitz_bound
from equipoise_lab.bench.lipschitz import peer_product, ryu_product
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import COLOURS, Figure, canvas, legend, published
from equipoise_lab.models import build
from equipoise_lab.timing import take_turns

#: methods of the thesis' table beside Ryu's; all take a convolution as circular with stride 1
RIVALS = ("gram", "sedghi", "singla", "araujo")
#: product relative to Ryu's in the thesis
PUBLISHED_TABLE = {"vgg16": 1.14, "resnet18": 1.47, "resnet50": 1.68, "resnet152": 1.92}


@dataclass(frozen=True)
class Settings:
    """Networks as (builder, arguments, weights file or ""); without a file the weights are random. Steps of power iteration."""

    networks: tuple[tuple[str, dict[str, int], str], ...]
    iterations: int = 100


def network(name: str, arguments: dict[str, int], weights: str, context: Context) -> nn.Module:
    """The network in evaluation mode; trained ones have their normalisation outside, as their files do."""
    torch.manual_seed(context.seed)
    if not weights:
        return build(name, **arguments).eval().requires_grad_(False)
    model = build(name, mean=None, std=None, **arguments)
    return load_weights(model, context.file(weights)).requires_grad_(False)


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per network: logarithms of the product, the fused bound and the products with the norms of other methods."""
    for name, arguments, weights in context.steps(settings.networks):
        with torch.random.fork_rng(devices=[]):
            net = network(name, arguments, weights, context).to(context.device)
        # a rehearsal: the network itself, on small images
        size = 32 if context.dry else arguments.get("input_size", 32)
        x = torch.zeros(1, 3, size, size, device=context.device)
        work: dict[str, Callable[[], Any]] = {
            "ours": partial(lipschitz_bound, net, x, rtol=0.5 if context.dry else 0.05),
            "ryu": partial(ryu_product, net, x, context.steps_of(settings.iterations)),
        }
        contest = take_turns(work, 1)
        report = contest.results["ours"] if context.dry else lipschitz_bound(net, x)
        ryu, took = float(contest.results["ryu"]), contest.seconds
        context.tell(f"{name}: {math.exp(report.log_product - ryu):.3f}")
        yield {
            "network": name, "trained": bool(weights), "log product": report.log_product, "log fused": report.log_upper,
            "log ryu": ryu, "seconds": took["ours"], "ryu seconds": took["ryu"],
            **{f"log {peer}": peer_product(net, x, peer) for peer in RIVALS},
        }  # fmt: skip


def ratios(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Bound relative to Ryu's, by network."""
    return {row["network"]: math.exp(row[f"log {key}"] - row["log ryu"]) for row in rows}


def judge(rows: Sequence[Row]) -> Verdict:
    """Above 1 (it is an upper bound) and no more than twice Ryu's value, as published; the fused one below the product."""
    product, fused = ratios(rows, "product"), ratios(rows, "fused")
    sound = all(value >= 1 - 1e-6 for value in product.values())
    near = max(product.values()) <= 2
    others = {name: ratios(rows, name) for name in RIVALS}
    weights = {row["network"]: "trained" if row["trained"] else "random weights" for row in rows}
    text = "; ".join(
        f"{name} ({weights[name]}) {value:.3g}, fused {fused[name]:.2g}, "
        + ", ".join(f"{rival} {others[rival][name]:.3g}" for rival in RIVALS)
        for name, value in product.items()
    )
    return Verdict(graded(sound and near, sound), text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Bars of both ratios on a logarithmic axis."""
    figure, (axes,) = canvas(width=5.4)
    names = [row["network"] for row in rows]
    for k, key in enumerate(("product", "fused")):
        measured = ratios(rows, key)
        x = [i + 0.4 * k for i in range(len(names))]
        bars = axes.bar(
            x, [measured[n] for n in names], 0.38, color=COLOURS[k], label=key, hatch=("", "//")[k]
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=8)
    printed = {name: value for name, value in PUBLISHED_TABLE.items() if name in names}
    published(
        axes,
        [names.index(n) for n in printed],
        list(printed.values()),
        "published (product, ImageNet weights)",
    )
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_xticks([i + 0.2 for i in range(len(names))], names, rotation=15)
    axes.set(ylabel="bound / product with Ryu's norms", yscale="log")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Table 4.1",
    title="Product bounds of whole networks",
    claim="The product of certified norms stays close to the product of power iteration's norms.",
    published="VGG16 1.14, ResNet18 1.47, ResNet50 1.68, ResNet152 1.92 (ImageNet weights)",
    laptop=Settings(
        (
            ("cifar_resnet20", {}, "cifar10-resnet20.safetensors"),
            ("cifar_resnet56", {}, "cifar10-resnet56.safetensors"),
            ("vgg16", {"width": 8}, ""),
            ("resnet18", {"width": 16}, ""),
        )
    ),
    paper=Settings(
        tuple(
            (name, {"input_size": 224, "num_classes": 1000}, "")
            for name in (
                "vgg16",
                "vgg19",
                "resnet18",
                "resnet34",
                "resnet50",
                "resnet101",
                "resnet152",
            )
        )
    ),
    needs=("cifar10-resnet20.safetensors", "cifar10-resnet56.safetensors"),
)
