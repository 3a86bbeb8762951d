"""Local Lipschitz constants against the product bound: a network that is 1-Lipschitz by design and one that is not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from equipoise.conversion import export
from equipoise.data import load_dataset
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.experiments.experiment import (
    Context,
    Label,
    Precondition,
    Row,
    Verdict,
    graded,
    of_module,
)
from equipoise_lab.experiments.figures import Figure, canvas, legend, line, published
from equipoise_lab.experiments.shared.training import train
from equipoise_lab.models import factory

#: (σ, local constant found, product bound) in the thesis
PUBLISHED_TABLE = {
    "LiResNet": ((0.0, 22, 37), (0.12, 11, 13), (0.25, 7.9, 9), (0.5, 4.8, 6)),
    "ResNet-110": (
        (0.0, 235, 2.34e10),
        (0.12, 27, 1.03e12),
        (0.25, 25, 3.19e12),
        (0.5, 19, 9.71e9),
        (1.0, 3.8, 1.32e11),
    ),
}


@dataclass(frozen=True)
class Settings:
    """Data, noise levels of training, both networks with their arguments, epochs, inputs and radius of the local constant."""

    data: str
    sigmas: tuple[float, ...]
    networks: dict[str, tuple[str, dict[str, object]]]
    epochs: int
    limit: int | None
    inputs: int
    radius: float = 0.15


def recipe(settings: Settings, name: str, sigma: float) -> dict[str, object]:
    """The network under Gaussian noise."""
    builder, arguments = settings.networks[name]
    return {
        "model": {"factory": factory(builder), "arguments": arguments},
        "data": {"path": settings.data, "limit": settings.limit},
        "noise": {"kind": "gaussian", "sigma": sigma} if sigma else None,
        "optimizer": {"kind": "adam", "lr": 2e-3},
        "schedule": {"kind": "cosine", "warmup": 0.1},
        "epochs": settings.epochs,
        "batch_size": 128,
        "metrics": {"bound": False, "every": settings.epochs},
    }


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per network and σ: the local maxima that were found (lower bounds), their mean over the inputs (the thesis'
    empirical Lipschitz constant) and the largest, and the logarithm of the product bound.
    """
    steps = 2 if context.dry else 20
    for name in settings.networks:
        for sigma in context.steps(settings.sigmas):
            result = train(recipe(settings, name, sigma), context)
            data = load_dataset(
                str(context.file(settings.data)) if "." in settings.data else settings.data, "test"
            )
            x, _ = data.batch(range(1 if context.dry else settings.inputs))
            model = export(result.model.eval(), x[:1])
            report = lipschitz_bound(model, x[:1])
            bounds = local_lipschitz(model, x, settings.radius, steps=steps).lower
            maxima = torch.as_tensor(bounds).flatten()
            local, largest = float(maxima.mean()), float(maxima.max())
            context.tell(
                f"{name}, σ = {sigma}: local {local:.3g} (largest {largest:.3g}), "
                f"product 10^{report.log_product / math.log(10):.2f}"
            )
            yield {"network": name, "sigma": sigma, "local": local, "largest": largest, "inputs": len(x),
                   "log product": report.log_product, "accuracy": result.final["accuracy"]}  # fmt: skip


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The product is within a factor 10 of the mean local constant by design, far beyond it without; and what noise does to
    both, which a network with a product that its builder fixes cannot show.
    """
    gap = {
        (r["network"], r["sigma"]): math.exp(min(r["log product"] - math.log(r["local"]), 600))
        for r in rows
    }
    by_design = max(v for (n, _), v in gap.items() if n == "LiResNet")
    plain = min(v for (n, _), v in gap.items() if n != "LiResNet")
    text = "; ".join(
        f"{r['network']} σ={r['sigma']}: {r['local']:.3g} (largest {r['largest']:.3g}) / "
        f"{math.exp(min(r['log product'], 600)):.2g}"
        for r in rows
    )
    measured = f"mean over {rows[0]['inputs']} inputs of the local maxima / product: {text}"
    return (
        # one network per σ has no interval: the direction is all that it can show
        Verdict(
            graded(False, by_design < 10 < plain / 10),
            measured,
            EXPERIMENT.published,
            "product and local constant",
        ),
        Verdict(
            Label.NOT_COMPARABLE,
            "the product of LiResNet is fixed by its builder, and there is one network per σ; a free product and several "
            "seeds would be needed",
            "22/37 → 4.8/6 (LiResNet), 235 → 3.8 (ResNet-110) as σ grows",
            "noise lowers both",
        ),
    )


def precondition(rows: Sequence[Row]) -> Precondition:
    """The least accuracy of the networks trained without noise."""
    return Precondition(
        "least accuracy at σ = 0", 100 * min(r["accuracy"] for r in rows if r["sigma"] == 0), 70.0
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Both constants against σ."""
    figure, (axes,) = canvas(width=7.2, height=4.6)
    for k, name in enumerate(dict.fromkeys(r["network"] for r in rows)):
        matching = [r for r in rows if r["network"] == name]
        x = [r["sigma"] for r in matching]
        line(
            axes,
            x,
            [r["local"] for r in matching],
            f"{name}, local (mean of the maxima found)",
            2 * k,
        )
        line(
            axes,
            x,
            [math.exp(min(r["log product"], 600)) for r in matching],
            f"{name}, product bound",
            2 * k + 1,
        )
    for k, (name, table) in enumerate(PUBLISHED_TABLE.items()):
        for j, what in enumerate(("local", "product")):
            published(
                axes,
                [row[0] for row in table],
                [row[1 + j] for row in table],
                f"published: {name}, {what}",
                2 * k + j,
            )
    axes.set(yscale="log", xlabel="noise σ in training", ylabel="Lipschitz constant")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Table 4.2",
    title="Local constants and product bounds",
    claim="The product bound is near the local constant for a network that is Lipschitz by design, and useless otherwise.",
    published="LiResNet 22/37 (σ = 0) → 4.8/6 (σ = 0.5); ResNet-110 235/2e10 → 3.8/1e11",
    laptop=Settings(
        "fashion_mnist.npz",
        (0.0, 0.5),
        {
            "LiResNet": (
                "liresnet",
                {"channels": 12, "depth": 2, "dense_depth": 1, "hidden": 64, "constant": 8.0},
            ),
            "ResNet": ("cifar_resnet", {"depth": 20, "width": 8, "mean": None, "std": None}),
        },
        epochs=2,
        limit=4000,
        inputs=64,
    ),
    precondition=precondition,
    notes=("one network per σ: no interval, and σ = 1 is missing at laptop scale",),
    paper=Settings(
        "cifar10-full.npz",
        (0.0, 0.12, 0.25, 0.5, 1.0),
        {"LiResNet": ("liresnet", {"constant": 40.0}), "ResNet-110": ("cifar_resnet110", {})},
        epochs=200,
        limit=None,
        inputs=1000,
    ),
    needs=("fashion_mnist.npz",),
)
