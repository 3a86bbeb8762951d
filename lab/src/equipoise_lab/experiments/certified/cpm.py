"""Three ways to share the risk among classes: the top class alone, every class, and buckets of classes (CPM).

Beside them `rivals`, which needs no partition: the largest upper bound fails only where that of the true runner-up
does, so no risk is shared among the rivals at all (erratum 23).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from equipoise.smoothing import SmoothedClassifier, certify_counts
from equipoise.smoothing.procedures import class_partition
from equipoise_lab.experiments.experiment import (
    Context,
    Label,
    Precondition,
    Row,
    Verdict,
    graded,
    of_module,
)
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.experiments.intervals import Mean
from equipoise_lab.experiments.networks.lipschitz_gpt import recipe as character_model
from equipoise_lab.experiments.shared import smoothed_networks as smoothed
from equipoise_lab.experiments.shared.training import train

ONE, EVERY, CPM, RIVALS = "Clopper–Pearson", "Bonferroni", "CPM", "rivals (no partition)"
METHODS = (ONE, EVERY, CPM, RIVALS)


@dataclass(frozen=True)
class Settings:
    """Networks with 10 classes trained at each σ; a character model whose next character is voted on under noise on its
    embeddings; synthetic votes over 1000 classes; draws.
    """

    recipe: dict[str, Any]
    sigmas: tuple[float, ...]
    sampling: smoothed.Sampling
    many: smoothed.Sampling
    characters: dict[str, Any]
    noises: tuple[float, ...] = (0.5, 1.0)
    stretches: int = 100
    classes: int = 1000
    inputs: int = 500
    concentrations: tuple[float, ...] = (0.95, 0.98, 0.998)
    levels: tuple[float, ...] = tuple(round(0.1 * k, 1) for k in range(27))


def concentration(p: np.ndarray) -> np.ndarray:
    """Total variation of class probabilities (N, c) to the uniform law, the thesis' TVU: 0 where all classes are level."""
    return np.asarray(0.5 * np.abs(p - 1 / p.shape[1]).sum(axis=1))


def synthetic(
    level: float, settings: Settings, context: Context
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Votes of inputs with class probabilities softmax(s·g), g standard normal over all classes, and their true tops.

    The spread s is the one whose probabilities are `level` from uniform on average: 0.95 to 0.998 for the thesis'
    ImageNet networks.
    """
    generator = np.random.default_rng([context.seed, int(1000 * level)])
    many = settings.many
    g = generator.standard_normal((settings.inputs, settings.classes))

    def law(spread: float) -> np.ndarray:
        z = np.exp(spread * (g - g.max(axis=1, keepdims=True)))
        return np.asarray(z / z.sum(axis=1, keepdims=True))

    spread = optimize.brentq(
        lambda s: float(concentration(law(s)).mean()) - level, 0.1, 200.0, xtol=1e-3
    )
    p = law(spread)[: context.steps_of(settings.inputs)]
    first, second = (
        np.stack([generator.multinomial(context.steps_of(n), row) for row in p])
        for n in (many.n0, many.n)
    )
    return first, second, p.argmax(axis=1)


def compare(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, sigma: float, alpha: float
) -> tuple[dict[str, smoothed.Rated], np.ndarray]:
    """All procedures on the same votes, and the number of buckets c* of the thesis' partition."""
    names = dict(zip(METHODS, ("cohen", "bonferroni", "cpm", "rivals"), strict=True))
    methods = {
        m: smoothed.rated(certify_counts(first, second, sigma, alpha, p), labels)
        for m, p in names.items()
    }
    return methods, class_partition(first.astype(np.float64)).buckets


def real(
    sigma: float, settings: Settings, context: Context
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Votes of a network trained at σ, and the labels."""
    network = smoothed.prepared(smoothed.under_noise(settings.recipe, sigma), context)
    return *smoothed.counts(
        network.classifier(sigma), network.x, settings.sampling, context
    ), network.y


class NextCharacter(nn.Module):
    """The logits of the last token of a character model, as a function of the embedded tokens."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, rows: Tensor) -> Tensor:
        """(batch, tokens, width) → (batch, characters)."""
        logits: Tensor = self.body(rows)[:, -1]
        return logits


def characters(settings: Settings, context: Context) -> Iterator[Row]:
    """Rows of a character model at every noise on its embeddings: votes of one network over its whole alphabet."""
    from equipoise.train.build import build_data

    result = train(settings.characters, context)
    context.tell(f"character model: accuracy {result.final['accuracy']:.3f} without noise")
    source = build_data(result.recipe.data).test
    assert source is not None
    count = context.steps_of(settings.stretches)
    tokens, following = source.batch(torch.linspace(0, len(source) - 1, count).long())
    model: Any = result.model.eval()
    with torch.no_grad():
        rows = model.embedding(tokens)
    network = NextCharacter(model.body).eval()
    classes = int(model.embedding.num_embeddings)
    clean = 100 * result.final["accuracy"]
    for sigma in context.steps(settings.noises):
        smooth = SmoothedClassifier(network, sigma, classes, seed=0)
        votes = *smoothed.counts(smooth, rows, settings.sampling, context), following[:, -1].numpy()
        name = f"{classes} characters, σ = {sigma:g}"
        yield from ({**row, "clean": clean} for row in rows_of(name, sigma, votes, settings))


def rows_of(
    name: str, sigma: float, votes: tuple[np.ndarray, np.ndarray, np.ndarray], settings: Settings
) -> Iterator[Row]:
    """One row per method and ε (in units of σ) of one setting."""
    first, second, labels = votes
    methods, buckets = compare(first, second, labels, sigma, settings.sampling.alpha)
    shares = concentration(second / np.maximum(second.sum(axis=1, keepdims=True), 1))
    shared = {
        "setting": name, "sigma": sigma, "classes": first.shape[1], "TVU": float(shares.mean()),
        "c* mean": float(buckets.mean()), "c* median": float(np.median(buckets)),
    }  # fmt: skip
    for row in smoothed.curves(
        methods, (ONE, EVERY, CPM), [level * sigma for level in settings.levels]
    ):
        yield {**row, **shared}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """The trained networks, the character model, then synthetic votes over many classes."""
    for sigma in context.steps(settings.sigmas):
        name = f"10 classes, σ = {sigma:g}"
        rows = context.cell(
            name, lambda n=name, s=sigma: rows_of(n, s, real(s, settings, context), settings)
        )
        context.tell(f"{name}: c* {rows[0]['c* median']:g} (median), TVU {rows[0]['TVU']:.3f}")
        yield from rows
    yield from context.cell("characters", characters, settings, context)
    for level in context.steps(settings.concentrations):
        name = f"{settings.classes} classes, TVU {level:g}"
        rows = list(rows_of(name, 1.0, synthetic(level, settings, context), settings))
        context.tell(f"{name}: c* {rows[0]['c* median']:g} (median)")
        yield from rows


def standing(
    rows: Sequence[Row], method: str, rivals: Sequence[str]
) -> tuple[float, int, int, float]:
    """(share of (setting, ε) without a loss, cells with a sure gain, cells with a sure loss, largest loss in points).

    A gain or loss is sure where its paired interval over the inputs lies on one side of 0; cells where nobody
    certifies anything are left out.
    """
    cached: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        cached.setdefault((row["setting"], row["epsilon"]), []).append(row)
    gains = [
        [Mean(row[f"over {rival}"], row[f"over {rival} ±"], row["inputs"]) for rival in rivals]
        for cell in cached.values()
        if max(row["accuracy"] for row in cell) > 0
        for row in cell
        if row["method"] == method
    ]
    level = sum(all(g.value >= -1e-9 for g in cell) for cell in gains) / len(gains)
    above = sum(any(g.low > 0 for g in cell) for cell in gains)
    below = sum(any(g.high < 0 for g in cell) for cell in gains)
    return level, above, below, -min(g.value for cell in gains for g in cell)


def gain_in_words(rows: Sequence[Row], method: str, rivals: Sequence[str]) -> tuple[Label, str]:
    """«Nearly everywhere»: level or above at 90 % of all cells, a sure gain at one; in direction: no sure loss, and a
    sure gain.
    """
    share, above, below, loss = standing(rows, method, rivals)
    text = f"no loss at {share:.0%} of all cells (largest {max(loss, 0.0):.1f} points), sure gains at {above}"
    text += f", sure losses at {below}"
    return graded(share >= 0.9 and above > 0 and below == 0, above > 0 and below == 0), text


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The thesis' partition against both others, for few and for many classes; its number of buckets; and whether it
    is needed.
    """
    verdicts = []
    for classes in dict.fromkeys(r["classes"] for r in rows):
        part = [r for r in rows if r["classes"] == classes]
        label, text = gain_in_words(part, CPM, (ONE, EVERY))
        verdict = Verdict(label, text, "CPM ≥ both nearly everywhere", f"{classes} classes")
        if part[0]["setting"].startswith(f"{classes} characters"):
            verdict = Precondition("clean accuracy", part[0]["clean"], 30.0).apply(verdict)
        elif classes != 10:
            # drawn votes, not those of a network: they decide nothing about the published ones
            verdict = replace(verdict, label=Label.NOT_COMPARABLE)
        verdicts.append(verdict)
    stars = {r["setting"]: (r["classes"], r["c* median"], r["TVU"]) for r in rows}
    inside = [
        (2 if c == 10 else 3) <= median <= (3 if c == 10 else 5) for c, median, _ in stars.values()
    ]
    texts = ", ".join(
        f"{name} {median:g} (TVU {tvu:.3f})" for name, (_, median, tvu) in stars.items()
    )
    verdicts.append(
        Verdict(
            graded(all(inside), any(inside)),
            f"median c*: {texts}",
            "2–3 (10 classes), 3–5 (1000 classes)",
            "c*",
        )
    )
    share, above, below, loss = standing(rows, RIVALS, (ONE, EVERY, CPM))
    text = (
        f"no risk shared among the rivals: {share:.0%} of all cells without a loss to any of the three "
        f"(largest {max(loss, 0.0):.1f} points), sure gains at {above}, sure losses at {below}"
    )
    corrected = Label.CORRECTED if above > 0 and below == 0 else Label.REFUTED
    return (
        *verdicts,
        Verdict(corrected, text, "classes must be partitioned", "the partition is not needed"),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Certified accuracy over ε, one panel per setting."""
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    figure, axes = canvas(columns=3, rows=-(-len(settings) // 3), width=3.6, height=2.8)
    for panel, name in zip(axes, settings, strict=False):
        for k, method in enumerate(METHODS):
            matching = [r for r in rows if (r["setting"], r["method"]) == (name, method)]
            x, y = [r["epsilon"] for r in matching], [r["accuracy"] for r in matching]
            line(panel, x, y, method, k, markevery=(k, 4), markersize=3.5, linewidth=1.3)
        panel.set(title=name, xlabel="ℓ2 radius ε", ylim=(0, None))
        panel.title.set_fontsize(9)
    for panel in axes[::3]:
        panel.set_ylabel("certified accuracy (%)")
    for panel in axes[len(settings) :]:
        panel.set_visible(False)
    legend(axes[0], shared=True)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figures 6.4, 6.5 and C.1 to C.5",
    title="Sharing the risk among classes",
    claim="Class partitioning certifies at least as much as Clopper–Pearson and Bonferroni, with few effective classes.",
    published="CPM ≥ both nearly everywhere; c* 2–3 (10 classes), 3–5 (1000 classes)",
    laptop=Settings(
        smoothed.FASHION,
        (0.25, 0.5, 1.0),
        smoothed.Sampling(1000),
        smoothed.Sampling(10_000),
        character_model(16, 64, 2, 4, steps=200, batch=32, lr=1e-2),
        stretches=20,
    ),
    desk=Settings(
        smoothed.DESK,
        (0.25, 0.5, 1.0),
        smoothed.Sampling(10_000),
        smoothed.Sampling(10_000),
        character_model(16, 64, 2, 4, steps=1000, batch=32, lr=1e-2),
    ),
    paper=Settings(
        smoothed.CIFAR,
        (0.12, 0.25, 0.5, 1.0),
        smoothed.Sampling(10_000),
        smoothed.Sampling(10_000),
        character_model(128, 256, 4, 8, steps=20_000, batch=64, lr=3e-3),
        stretches=500,
    ),
    notes=(
        "votes over 1000 classes are drawn from laws as concentrated as ImageNet's, not from an ImageNet network; those over "
        "65 characters are of a network",
    ),
    needs=("fashion_mnist.npz", "tinyshakespeare.txt"),
)
