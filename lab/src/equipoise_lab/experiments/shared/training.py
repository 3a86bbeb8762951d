"""Shared by all comparisons of training methods: variants of one recipe over several seeds, paired by seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from equipoise.core.errors import InputError
from equipoise.core.files import resolve
from equipoise_lab.experiments.experiment import (
    Context,
    Experiment,
    Power,
    Precondition,
    Row,
    Verdict,
    of_module,
)
from equipoise_lab.experiments.figures import (
    COLOURS,
    MARKERS,
    Axes,
    Figure,
    canvas,
    intervals,
    legend,
    published,
)
from equipoise_lab.experiments.intervals import gain_label, mean_of, power_of
from equipoise_lab.models import factory

if TYPE_CHECKING:
    from equipoise.train import Result


Plain = dict[str, Any]

#: flips and crops with a margin of four pixels: the thesis' augmentation
STANDARD = ("flip", {"kind": "pad-crop", "padding": 4})


def recipe(
    model: str,
    arguments: Mapping[str, Any],
    data: str,
    epochs: int,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    augment: Sequence[Any] = (),
    optimizer: Mapping[str, Any],
    batch_size: int = 128,
    warmup: float = 0.0,
    **rest: Any,
) -> Plain:
    """A network by name (or `module:factory`) on images with a cosine schedule, measured after the last epoch."""
    return {
        "model": {
            "factory": model if ":" in model else factory(model),
            "arguments": dict(arguments),
        },
        "data": {"path": data, "limit": limit, "test_limit": test_limit, "augment": list(augment)},
        "optimizer": dict(optimizer),
        "schedule": {"kind": "cosine", "warmup": warmup},
        "epochs": epochs,
        "batch_size": batch_size,
        "metrics": {"bound": False, "every": epochs},
        **rest,
    }


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> Plain:
    """`base` with the keys of `change`, part by part.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return result


#: losses of the text experiments
TEXT_LOSSES = {
    "intent-slots": "equipoise_lab.text:intent_slots",
    "next-token": "equipoise_lab.text:next_token",
}


def train(
    recipe: Mapping[str, Any],
    context: Context,
    seed: int = 0,
    each_epoch: Callable[[nn.Module, int], None] | None = None,
) -> Result:
    """`run_recipe` with `data.path` looked up in the data folder; a dry run trains for two small steps and proves no bound.

    `each_epoch(network, epoch)` looks at the network after every epoch.
    """
    from equipoise.train import run_recipe

    path = str(recipe["data"]["path"])
    if "." in path and ":" not in path:
        path = str(_file(path, context))
    data: Plain = {"path": path}
    if ":" in path and "/" in path:  # reader:/name, as the text experiments have it
        reader, _, name = path.rpartition(":")
        kind, _, prefix = reader.partition(":")
        file = context.file(name.lstrip("/"))
        data = {
            "reader": f"equipoise_lab.text:load_{kind}",
            "path": f"{prefix}:{file}" if prefix else str(file),
        }
    seeded = merged(recipe, {"seed": context.seed * 1000 + seed, "data": data})
    loss = seeded.get("loss")
    if isinstance(loss, str):
        seeded["loss"] = TEXT_LOSSES.get(loss, loss)
    if context.dry:
        batch = min(16, int(seeded.get("batch_size", 128)))
        few: Plain = {"limit": 2 * batch, "test_limit": 64}
        if seeded["data"].get("validation"):
            few["validation"] = (
                0.25  # the share of a whole data set may be less than one of these few
            )
        seeded = merged(
            seeded, {"epochs": 1, "batch_size": batch, "data": few, "metrics": {"bound": False}}
        )
    cpu = context.device == "cpu"
    if each_epoch is None:
        return run_recipe(seeded, cpu=cpu)
    look = each_epoch
    with torch.random.fork_rng():
        torch.manual_seed(seeded["seed"])
        network = resolve(seeded["model"]["factory"])(**seeded["model"]["arguments"])

    def report(event: Any) -> None:
        if event.row is not None:
            look(network, event.epoch)

    return run_recipe(seeded, model=network, cpu=cpu, progress=report)


def _file(name: str, context: Context) -> Any:
    """The data file; a rehearsal of the paper's scale makes do with the subset where the full set is not at hand."""
    try:
        return context.file(name)
    except InputError:
        if not context.dry or "-full" not in name:
            raise
        return context.file(name.replace("-full", ""))


#: what each variant of a recipe changes
Variants = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """One recipe, named variants of it (what they change), and the number of seeds; the first variant is the baseline."""

    recipe: dict[str, Any]
    variants: Variants
    seeds: int
    keep: tuple[str, ...] = field(default=("accuracy",))


@dataclass(frozen=True)
class Claim:
    """A gain of one variant over another, in points, as published (`effect` None where no number is).

    `least` is what the first variant's figure, the baseline's, must reach, in percent, before the claim is judged: the
    published figure less a tenth of it unless an experiment states another.
    """

    part: str
    wanted: str
    effect: float | None
    published: str
    least: float
    rival: str = "baseline"
    key: str = "accuracy"
    own: bool = False


def run(settings: Settings, context: Context, label: str = "", sibling: str = "") -> Iterator[Row]:
    """One row per seed and variant with the figures of the last epoch; the seed fixes the start and the order of the data.

    A rehearsal trains the first two variants. `label` tells the kept parts of several comparisons apart. Trainings that the
    stored result of the experiment `sibling` has, with the same recipe, variant and seed, are taken from it.
    """
    trained_before = stored_rows(settings, context, sibling)
    for seed in range(1 if context.dry else settings.seeds):
        for name, change in context.steps(settings.variants.items()):

            def trained(
                seed: int = seed, name: str = name, change: Mapping[str, Any] = change
            ) -> Iterator[Row]:
                if (name, seed) in trained_before:
                    yield trained_before[name, seed]
                    return
                result = train(merged(settings.recipe, change), context, seed)
                context.tell(f"seed {seed}, {name}: {result.final['accuracy']:.4f}")
                figures = {key: result.final.get(key) for key in settings.keep}
                epochs = [row["seconds"] for row in result.history]
                yield {
                    "variant": name,
                    "seed": seed,
                    **figures,
                    "seconds per epoch": sum(epochs) / len(epochs),
                }

            yield from context.cell(f"{label}seed {seed}, {name}", trained)


def stored_rows(settings: Settings, context: Context, sibling: str) -> dict[tuple[str, int], Row]:
    """The rows by variant and seed that another experiment's result has of the same trainings."""
    path = context.cells.path
    if not sibling or path is None:
        return {}
    result = path.parent.parent / sibling / "result.json"
    if not result.exists():
        return {}
    stored = json.loads(result.read_text(encoding="utf-8"))
    theirs, ours = stored["settings"], json.loads(json.dumps(asdict(settings)))
    if (stored["seed"], theirs["recipe"]) != (context.seed, ours["recipe"]):
        return {}
    same = {
        name for name, change in ours["variants"].items() if theirs["variants"].get(name) == change
    }
    return {(row["variant"], row["seed"]): row for row in stored["rows"] if row["variant"] in same}


def by_variant(rows: Sequence[Row], key: str = "accuracy") -> dict[str, list[float]]:
    """The figures of every variant in the order of the seeds."""
    groups: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault(row["variant"], []).append(row[key])
    return groups


def paired(
    rows: Sequence[Row], wanted: str, baseline: str = "baseline", key: str = "accuracy"
) -> list[float]:
    """Differences of two variants in points, seed by seed."""
    groups = by_variant(rows, key)
    return [100 * (a - b) for a, b in zip(groups[wanted], groups[baseline], strict=True)]


def gain_verdicts(rows: Sequence[Row], claims: Sequence[Claim]) -> tuple[Verdict, ...]:
    """One verdict per claimed gain, by the interval of the paired differences."""
    variants = set(by_variant(rows))
    return tuple(
        _gain_verdict(rows, claim) for claim in claims if {claim.wanted, claim.rival} <= variants
    )


def _gain_verdict(rows: Sequence[Row], claim: Claim) -> Verdict:
    figures = by_variant(rows, claim.key)
    gain = mean_of(paired(rows, claim.wanted, claim.rival, claim.key))
    rival = mean_of([100 * value for value in figures[claim.rival]])
    text = f"{gain.show()} points over {claim.rival} at {rival.show()}"
    first = next(iter(figures))
    if claim.rival != first:  # a gain over a rival may be the rival's harm
        text += (
            f", itself {mean_of(paired(rows, claim.rival, first, claim.key)).signed} over {first}"
        )
    verdict = Verdict(gain_label(gain, claim.effect), text, claim.published, claim.part, claim.own)
    baseline = mean_of([100 * value for value in figures[first]]).value
    return Precondition(first, baseline, claim.least).apply(verdict)


def claim_power(rows: Sequence[Row], claim: Claim) -> Power:
    """What the seeds of a stored result could have detected of a claimed gain."""
    unit = "points" if claim.effect else "points (no number is printed: one point is taken)"
    return power_of(paired(rows, claim.wanted, claim.rival, claim.key), claim.effect or 1.0, unit)


def draw(rows: Sequence[Row], claims: Sequence[Claim] = (), key: str = "accuracy") -> Figure:
    """Accuracy of every seed with the means' intervals; beside it the claimed gains, measured and published."""
    groups = by_variant(rows, key)
    comparable = [c for c in claims if {c.wanted, c.rival} <= set(groups)]
    figure, panels = canvas(
        columns=2 if comparable else 1, width=max(4.6, 0.6 * len(groups)), height=3.6
    )
    axes = panels[0]
    for k, values in enumerate(groups.values()):
        percent = [100 * v for v in values]
        axes.plot(
            [k - 0.12] * len(percent),
            percent,
            MARKERS[k % 8],
            color=COLOURS[k % 8],
            alpha=0.45,
            markersize=4,
        )
        intervals(
            axes,
            [k + 0.12],
            [mean_of(percent)],
            fmt="D",
            color=COLOURS[k % 8],
            capsize=3,
            markersize=5,
        )
    axes.set_xticks(range(len(groups)), list(groups), rotation=25, ha="right")
    axes.set(ylabel="test accuracy (%)")
    if comparable:
        _draw_gains(panels[1], rows, comparable)
    return figure


def _draw_gains(axes: Axes, rows: Sequence[Row], claims: Sequence[Claim]) -> None:
    """Paired gains with their intervals, and the published ones beside."""
    means = [mean_of(paired(rows, c.wanted, c.rival, c.key)) for c in claims]
    x = range(len(claims))
    intervals(axes, x, means, fmt="D", color=COLOURS[0], capsize=4, label="measured")
    printed = [(k + 0.15, c.effect) for k, c in enumerate(claims) if c.effect is not None]
    if printed:
        published(axes, [k for k, _ in printed], [effect for _, effect in printed])
    axes.axhline(0, color="0.3", linewidth=0.8)
    names = [c.part or f"{c.wanted} − {c.rival}" for c in claims]
    axes.set_xticks(x, names, rotation=15, ha="right")
    axes.set(ylabel="gain (points)", xlim=(-0.5, len(claims) - 0.5))
    legend(axes)


def compared(module: str, claims: Sequence[Claim], main: int = 0, **described: Any) -> Experiment:
    """The experiment of a module that is a comparison: judged by its claims, its power that of the main one."""
    shared = {
        "run": run,
        "judge": lambda rows: gain_verdicts(rows, claims),
        "draw": partial(draw, claims=claims),
        "power": lambda rows: claim_power(rows, claims[main]),
        "needs": ("cifar10.npz",),
    }
    return of_module(module, **{**shared, **described})
