"""A character model on tinyshakespeare: validation accuracy against the constant proved from its graph."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch

from equipoise.lipschitz import lipschitz_bound
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
from equipoise_lab.experiments.intervals import Mean, combined, gain_label, mean_of
from equipoise_lab.experiments.shared.training import merged, train
from equipoise_lab.gpt import LipschitzGPT

FILE = "tinyshakespeare.txt"
#: (constant, accuracy) of Newhouse et al. 2025, with 2M parameters
REFERENCE = (2.0, 60.0)


def recipe(
    tokens: int, width: int, depth: int, heads: int, steps: int, batch: int, lr: float
) -> dict[str, Any]:
    """A character model on stretches of so many characters, each step on new ones."""
    arguments = {"width": width, "depth": depth, "heads": heads, "constant": None}
    return {
        "model": {"factory": "equipoise_lab.models:lipschitz_gpt", "arguments": arguments},
        "data": {"path": f"characters:{tokens}:/{FILE}", "limit": steps * batch},
        "loss": "next-token",
        "optimizer": {"kind": "adamw", "lr": lr, "betas": (0.9, 0.98)},
        "schedule": {"kind": "one-cycle", "warmup": 0.2},
        "epochs": 1,
        "batch_size": batch,
        "metrics": {"bound": False, "epsilons": [], "batch_size": 100},
    }


#: share of the validation characters that are spaces, in percent: what a constant answer reaches
CHANCE = 14.9
#: accuracy in percent from which two networks are compared
LEAST_ACCURACY = 20.0


@dataclass(frozen=True)
class Settings:
    """Constants to hold (None: free), kinds of attention and the recipe; seeds, all but the first at the replicated constants."""

    recipe: dict[str, Any]
    seeds: int = 1
    replicated: tuple[float, ...] = (10.0, 100.0)
    attentions: tuple[str, ...] = ("l2", "convex")
    constants: tuple[float | None, ...] = field(default=(2.0, 10.0, 100.0, 1000.0, None))


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per seed, kind of attention and constant."""
    places = product(range(settings.seeds), settings.attentions, settings.constants)
    for seed, attention, constant in context.steps(places):
        if seed == 0 or constant in settings.replicated:
            key = f"seed {seed}, {attention} {constant}"
            yield from context.cell(key, measured, attention, constant, seed, settings, context)


def measured(
    attention: str, constant: float | None, seed: int, settings: Settings, context: Context
) -> Iterator[Row]:
    """Accuracy and bits per character on the last tenth of the text, and what is proved for the trained weights."""
    guard = [] if constant is None else ["guard"]
    arguments = {"constant": constant, "attention": attention}
    change = {"model": {"arguments": arguments}, "projections": guard}
    result = train(merged(settings.recipe, change), context, seed)
    model = result.model
    assert isinstance(model, LipschitzGPT)
    tokens, width = model.body[0].get_parameter("weight").shape
    proved, blocks = bounds(model, int(tokens), int(width))
    # the same network in the norm in which the published constant is meant
    by_token = lipschitz_bound(model.body, torch.zeros(1, tokens, width), norm="token").upper
    shown = {key: result.final[key] for key in ("accuracy", "bits", "train_loss")}
    context.tell(
        f"{attention}, constant {constant}: proved {proved:.4g}, accuracy {shown['accuracy']:.3f}"
    )
    parameters = sum(p.numel() for p in model.parameters())
    yield {
        "attention": attention,
        "seed": seed,
        "constant": constant,
        "proved": proved,
        "product": blocks,
        "token": by_token,
        **shown,
        "parameters": parameters,
    }


def bounds(model: LipschitzGPT, tokens: int, width: int) -> tuple[float, float]:
    """The constant of the logits in the embeddings from the whole graph, and the product of those of the blocks alone."""
    example = torch.zeros(1, tokens, width)
    blocks = math.prod(lipschitz_bound(block, example).upper for block in model.body)
    return lipschitz_bound(model.body, example).upper, blocks


@dataclass(frozen=True)
class Summary:
    """The seeds of one kind of attention at one constant: the largest proved constant, and means over the seeds."""

    constant: float | None
    proved: float
    accuracy: Mean
    bits: float


def of_kind(rows: Sequence[Row], attention: str) -> list[Summary]:
    """A summary per constant, by falling strictness."""
    some = [r for r in rows if r["attention"] == attention]
    summaries = []
    for constant in dict.fromkeys(r["constant"] for r in some):
        seeds = [r for r in some if r["constant"] == constant]
        accuracy = mean_of([100 * r["accuracy"] for r in seeds])
        bits = mean_of([r["bits"] for r in seeds]).value
        summaries.append(Summary(constant, max(r["proved"] for r in seeds), accuracy, bits))
    return summaries


def attention_gains(rows: Sequence[Row]) -> dict[float, Mean]:
    """Convex over L2 attention in points by held constant, seed by seed; networks near chance are left out."""
    accuracy = {(r["attention"], r["constant"], r["seed"]): 100 * r["accuracy"] for r in rows}
    gains = {}
    for summary, other in zip(of_kind(rows, "l2"), of_kind(rows, "convex"), strict=True):
        constant = summary.constant
        trained = min(summary.accuracy.value, other.accuracy.value) >= LEAST_ACCURACY
        if constant is not None and trained:
            seeds = sorted(s for kind, c, s in accuracy if (kind, c) == ("convex", constant))
            gains[constant] = mean_of(
                [accuracy["convex", constant, s] - accuracy["l2", constant, s] for s in seeds]
            )
    return gains


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Every held constant is proved, by the product of the blocks; accuracy grows with every constant; it is what was
    published for the smallest one; and convex attention against L2 attention at equal constants.
    """
    l2 = of_kind(rows, "l2")
    held = [r for r in rows if r["constant"] is not None]
    kept = all(
        r["proved"] <= r["constant"] and abs(r["proved"] / r["product"] - 1) < 1e-2 for r in held
    )
    grows = [a.accuracy.value < b.accuracy.value for a, b in pairwise(l2)]
    constants = ", ".join(f"{s.proved:.4g}" for k in ("l2", "convex") for s in of_kind(rows, k))
    price = ", ".join(f"{s.accuracy.value:.1f} %, {s.bits:.2f} bits at {s.proved:.4g}" for s in l2)
    best = max(
        (of_kind(rows, kind)[0] for kind in ("l2", "convex")), key=lambda s: s.accuracy.value
    )
    gains = attention_gains(rows)
    compared = ", ".join(f"{gain.show()} points at {c:g}" for c, gain in gains.items())
    return (
        Verdict(
            graded(kept),
            f"largest proved from the graph, equal to the product of the blocks: {constants}",
            "our own claim",
            "constant",
        ),
        Verdict(graded(all(grows), any(grows)), price, "our own claim", "price"),
        Precondition("accuracy", best.accuracy.value, LEAST_ACCURACY).apply(
            Verdict(
                graded(best.accuracy.value >= REFERENCE[1]),
                f"{best.accuracy.value:.1f} % at {best.proved:.4g} (a constant answer: {CHANCE:g} %) "
                f"with {rows[0]['parameters']:,} parameters",
                EXPERIMENT.published,
                "accuracy at the smallest constant",
            )
        ),
        Verdict(
            combined([gain_label(gain) for gain in gains.values()]) if gains else Label.TOO_SMALL,
            f"convex over L2 attention: {compared}; both above {LEAST_ACCURACY:g} %",
            "our own claim: convex attention is more accurate at equal constants",
            "attention",
        ),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy and bits per character by proved constant."""
    figure, (left, right) = canvas(2)
    for k, (kind, name) in enumerate((("l2", "L2 attention"), ("convex", "convex attention"))):
        some = of_kind(rows, kind)
        x = [s.proved for s in some]
        line(left, x, [s.accuracy.value for s in some], name, k)
        line(right, x, [s.bits for s in some], name, k)
    published(left, [REFERENCE[0]], [REFERENCE[1]], "published, 2M parameters, not proved", 2)
    for axes, name in ((left, "validation accuracy (%)"), (right, "bits per character")):
        axes.set(xlabel="proved Lipschitz constant of the logits", ylabel=name, xscale="log")
    legend(left)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="A character model with a proved constant",
    claim="A transformer can be trained at a small Lipschitz constant that is proved from its graph, at a price in accuracy.",
    published="60 % at a constant of 2 with 2M parameters, by power iterations and normalised inputs (Newhouse et al. 2025)",
    laptop=Settings(recipe(24, 64, 2, 4, steps=300, batch=32, lr=1e-2)),
    desk=Settings(recipe(24, 64, 2, 4, steps=1000, batch=32, lr=1e-2), seeds=2),
    paper=Settings(recipe(128, 256, 4, 8, steps=20000, batch=64, lr=3e-3)),
    notes=(
        "the last constant is that of the network trained freely; half a minute of one core each: not converged",
        "at desk scale the constants 10 and 100 have two seeds, the others one",
        "the published accuracy is that of a network twenty times as large, trained to the end on a GPU",
        "the constant is that of the logits in the embeddings, whose rows have norm at most the root of the width",
    ),
    needs=(FILE,),
)
