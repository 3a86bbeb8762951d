"""A plain GPT whose constant is proved twice: in ℓ2 over all tokens, and in the largest ℓ2 norm of a token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from equipoise.lipschitz import lipschitz_bound
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.experiments.networks.lipschitz_gpt import FILE, recipe
from equipoise_lab.experiments.shared.training import merged, train
from equipoise_lab.gpt import LipschitzGPT

#: how much smaller the constant in the norm of tokens is to be
GOAL = 5.0


@dataclass(frozen=True)
class Settings:
    """Lengths of the sequences, and the recipe of each: a model of `width` and `depth` on `characters` characters."""

    lengths: tuple[int, ...] = (16, 64, 128)
    width: int = 64
    depth: int = 2
    characters: int = 200_000
    lr: float = 3e-3


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per length of the sequences."""
    for tokens in context.steps(settings.lengths):
        yield from context.cell(f"{tokens} tokens", measured, tokens, settings, context)


def measured(tokens: int, settings: Settings, context: Context) -> Iterator[Row]:
    """Train the same network on sequences of this length, and bound it in both norms."""
    batch = max(1, 1024 // tokens)
    steps = settings.characters // (tokens * batch)
    width, depth = settings.width, settings.depth
    plain = recipe(tokens, width, depth, max(1, width // 16), steps, batch, settings.lr)
    change = {"model": {"arguments": {"attention": "softmax"}}}
    result = train(merged(plain, change), context, context.seed)
    model = result.model
    assert isinstance(model, LipschitzGPT)
    example = torch.zeros(1, tokens, width)
    whole = lipschitz_bound(model.body, example).upper
    by_token = lipschitz_bound(model.body, example, norm="token").upper
    accuracy = result.final["accuracy"]
    context.tell(f"{tokens} tokens: {whole / by_token:.1f} times smaller, accuracy {accuracy:.3f}")
    yield {
        "tokens": tokens,
        "whole": whole,
        "token": by_token,
        "ratio": whole / by_token,
        "accuracy": accuracy,
    }


def judge(rows: Sequence[Row]) -> Verdict:
    """At the longest sequences the constant is five times smaller, and the more the longer they are."""
    last = rows[-1]
    grows = all(a["ratio"] < b["ratio"] for a, b in pairwise(rows))
    shown = ", ".join(
        f"{r['ratio']:.1f} at {r['tokens']} tokens ({100 * r['accuracy']:.1f} % right)"
        for r in rows
    )
    label = graded(last["ratio"] >= GOAL and grows, last["ratio"] >= GOAL)
    return Verdict(label, f"ℓ2 over token constant: {shown}", EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Both constants by length."""
    figure, (axes,) = canvas(1)
    for k, (key, name) in enumerate((("whole", "ℓ2 over all tokens"), ("token", "largest token"))):
        line(axes, [r["tokens"] for r in rows], [r[key] for r in rows], name, k)
    axes.set(xlabel="tokens", ylabel="proved constant", xscale="log", yscale="log")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="The constant of a plain GPT in the norm of tokens",
    claim="In the largest norm of a token the proved constant of a network does not pay for the number of tokens.",
    published="our own claim: at least 5 times smaller for the same weights, the more the longer the sequences",
    laptop=Settings(lengths=(16, 64), characters=100_000),
    desk=Settings(),
    paper=Settings(lengths=(16, 64, 256), width=256, depth=4, characters=20_000_000),
    notes=("both constants are those of the same trained weights, so the accuracy is the same",),
    needs=(FILE,),
)
