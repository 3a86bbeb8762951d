"""A first look at a model and its data before a certificate is drawn: does it answer at all, and does it under the noise?

Nothing here is a guarantee: shares of a few inputs, on noise of their own that no certificate uses. They say what a run of
hours would end in, and why: a network that was never trained, labels in another order, noise it has not seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from equipoise.core import EquipoiseError, fresh_strides
from equipoise.runs.inputs import in_turn
from equipoise.runs.jobs import Job
from equipoise.runs.models import Batched
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.noise import Stream, noise_key

#: inputs looked at, and how many at a time
LOOKED = 200
BATCH = 50
#: mean and deviation per channel that pictures in [0, 1] are commonly trained with, by number of channels
SCALINGS = {
    3: (
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ),
    1: (((0.1307,), (0.3081,)), ((0.5,), (0.5,))),
}
#: by how much accuracy without noise must rise for such a scaling to be named
GAINED = 0.15
#: share of answers that must stay under the noise for votes to agree
AGREE = 0.8


@dataclass(frozen=True)
class Glance:
    """Shares of `inputs` inputs: right without noise, right and unchanged under one draw of it.

    `classes` maps the label (its name where it is known) to how many inputs of the run have it; `moved` lists labels whose
    inputs are nearly all answered with one other label; `scaling` is a usual mean and deviation (as options of the command)
    with which many more inputs are right, and their share; `favourite` is the commonest answer under the noise and its share;
    `sigma` is the largest noise level tried at which answers stay the same, None where that was not needed or none is.
    """

    inputs: int
    clean: float | None
    noisy: float | None
    unchanged: float
    classes: dict[str, int]
    moved: tuple[tuple[str, str], ...] = ()
    reordered: float | None = None
    favourite: tuple[str, float] = ("", 0.0)
    chance: float = 0.0
    level: float = 0.0
    sigma: float | None = None
    limited: str = ""
    scaling: tuple[str, float] | None = None

    def lines(self) -> list[str]:
        """What a user should know before waiting."""
        parts = []
        if self.clean is not None and self.noisy is not None:
            parts.append(
                f"of {self.inputs} inputs {self.clean:.1%} are answered right without noise, {self.noisy:.1%} under one draw "
                f"of sigma {self.level:g}, {self.unchanged:.1%} with the same answer (estimates)"
            )
        else:
            parts.append(
                f"the data has no labels: answers and radii, no accuracy; of {self.inputs} inputs {self.unchanged:.1%} keep "
                f"their answer under one draw of sigma {self.level:g} (estimate)"
            )
        if self.limited:
            parts.append(self.limited)
        if self.classes:
            shown = [f"{name} {count}" for name, count in list(self.classes.items())[:20]]
            more = f", … {len(self.classes) - 20} more" if len(self.classes) > 20 else ""
            parts.append(f"classes: {', '.join(shown)}{more}")
        return parts + self.warnings()

    def warnings(self) -> list[str]:
        """What is likely wrong, each with what to do about it."""
        found = []
        if self.scaling is not None and self.clean is not None:
            found.append(
                f"warning: the network seems to have been trained on scaled pictures: with {self.scaling[0]} "
                f"{self.scaling[1]:.1%} would be right without noise instead of {self.clean:.1%}"
            )
        elif self.reordered is not None and self.clean is not None:
            pairs = ", ".join(f"{a!r} as {b!r}" for a, b in self.moved[:6])
            found.append(
                f"warning: the labels seem to be in another order than the model's: with classes exchanged ({pairs}) "
                f"{self.reordered:.1%} would be right instead of {self.clean:.1%}; folders are numbered by sorted name: give "
                "--classes, a file with the class names in the order of the model's logits"
            )
        elif self.clean is not None and self.untrained:
            found.append(
                f"warning: {self.clean:.1%} right without noise is about chance ({self.chance:.1%}): are these trained weights, "
                "and is the input scaled and normalised as in training (--mean and --std, or inside the model)?"
            )
        elif self.disturbed:
            name, share = self.favourite
            best = f"; answers stay the same up to about sigma {self.sigma:g}" if self.sigma is not None else ""
            under = f"; under it {share:.0%} of the answers are {name!r}" if share > 0.5 else ""
            found.append(
                f"warning: the network does not withstand noise of sigma {self.level:g}{under}{best}; train it under the noise "
                f"(eq.regularizers.add_noise(x, {self.level:g}), or noise: of a recipe), put a --denoiser before it, or certify "
                "at a smaller --sigma"
            )
        return found

    @property
    def disturbed(self) -> bool:
        """Whether a network that answers without noise does not under it."""
        other = self.untrained or self.reordered is not None or self.scaling is not None
        return self.unchanged < AGREE and not other

    @property
    def untrained(self) -> bool:
        """Whether the accuracy without noise cannot be told from guessing (three standard deviations)."""
        spread = math.sqrt(self.chance * (1 - self.chance) / max(self.inputs, 1))
        return (
            self.clean is not None and self.inputs >= 10 and self.clean <= self.chance + 3 * spread and self.clean < 0.7
        )


def glance(job: Job) -> Glance:
    """Look at up to 200 inputs of a job, some of every class; unreadable ones are left out.

    Raises what the model raises; certificates do not depend on any of it.
    """
    chosen, generator = _spread(job), _generator(job)
    model = _module(job)
    labels, clean, noisy = list[int](), list[Tensor](), list[Tensor]()
    kept: list[Tensor] = []
    for x, y in _batches(job, chosen):
        labels += y
        kept.append(x)
        clean.append(_answers(model, x))
        noisy.append(_answers(model, _disturbed(x, job.parameters.sigma, generator)))
    if not labels:
        return Glance(0, None, None, 1.0, {}, level=job.parameters.sigma)
    before, after = torch.cat(clean).numpy(), torch.cat(noisy).numpy()
    found = _shares(job, np.array(labels), before, after)
    found = replace(found, scaling=_scaling(model, kept, np.array(labels), found.clean))
    if found.disturbed:
        found = replace(found, sigma=_largest(job, model, kept, before, generator))
    return found


def _shares(job: Job, y: Ints, before: Ints, after: Ints) -> Glance:
    labelled = job.inputs.labelled
    answers = np.bincount(after[after >= 0], minlength=1)
    top = int(answers.argmax())
    counts = np.bincount(y[y >= 0], minlength=1)
    limit = job.manifest.selection[0]
    return Glance(
        len(y), float((before == y).mean()) if labelled else None, float((after == y).mean()) if labelled else None,
        float((before == after).mean()), _counts(job) if labelled else {}, *_reordered(job, y, before),
        favourite=(_name(job, top), float(answers[top] / len(y))),
        chance=float(counts.max() / len(y)) if labelled else 0.0, level=job.parameters.sigma,
        limited=f"--limit {limit.limit} takes the first of every class in turn (--first: as they lie)" if limit.balanced else "",
    )  # fmt: skip


def _reordered(job: Job, y: Ints, before: Ints) -> tuple[tuple[tuple[str, str], ...], float | None]:
    """Classes that are answered as another one, at least two of them, and the accuracy with them exchanged."""
    if not job.inputs.labelled:
        return (), None
    size = job.parameters.num_classes
    table = np.zeros((size, size), dtype=np.int64)
    fine = (y >= 0) & (before >= 0)
    np.add.at(table, (y[fine], before[fine]), 1)
    rows, columns = linear_sum_assignment(-table)
    sizes = table.sum(axis=1)
    moved = [
        (int(a), int(b))
        for a, b in zip(rows, columns, strict=True)
        if a != b and sizes[a] >= 3 and table[a, b] >= 0.6 * sizes[a] and table[a, b] >= 3
    ]
    if len(moved) < 2:
        return (), None
    gained = sum(table[a, b] - table[a, a] for a, b in moved)
    share = float((np.trace(table) + gained) / len(y))
    if share < 0.5 or gained < max(3, 0.1 * len(y)):
        return (), None
    return tuple((_name(job, a), _name(job, b)) for a, b in moved), share


def _scaling(model: torch.nn.Module, kept: list[Tensor], y: Ints, clean: float | None) -> tuple[str, float] | None:
    """Of the usual scalings of pictures the one with which most inputs are right, if that is many more than as they are."""
    first = kept[0]
    pictures = first.dim() == 4 and first.is_floating_point() and float(first.min()) >= 0 and float(first.max()) <= 1
    if clean is None or clean > 1 - GAINED or not pictures:
        return None
    found: list[tuple[float, str]] = []
    for mean, std in SCALINGS.get(first.shape[1], ()):
        centre, spread = (first.new_tensor(v).reshape(-1, 1, 1) for v in (mean, std))
        answers = torch.cat([_answers(model, fresh_strides((x - centre) / spread)) for x in kept]).numpy()
        options = " ".join(f"--{k} {','.join(f'{v:g}' for v in vs)}" for k, vs in (("mean", mean), ("std", std)))
        found.append((float((answers == y).mean()), options))
    share, options = max(found, key=lambda pair: pair[0], default=(0.0, ""))
    return (options, share) if share >= clean + GAINED and (share - clean) * len(y) >= 3 and share > 0.5 else None


def _largest(
    job: Job, model: torch.nn.Module, kept: list[Tensor], before: Ints, generator: torch.Generator
) -> float | None:
    """The largest of σ/2, σ/4 … σ/64 at which the answers mostly stay the same."""
    for halved in range(1, 7):
        level = job.parameters.sigma / 2**halved
        after = torch.cat([_answers(model, _disturbed(x, level, generator)) for x in kept]).numpy()
        if float((before == after).mean()) >= AGREE:
            return level
    return None


def _spread(job: Job) -> Ints:
    """Positions to look at: of every class in turn where labels are known, else evenly spread."""
    positions = job.positions
    if len(positions) <= LOOKED:
        return positions
    if job.inputs.labelled and job.inputs.labels is not None:
        return np.sort(positions[in_turn(np.asarray(job.inputs.labels)[positions])[:LOOKED]])
    return positions[np.unique(np.linspace(0, len(positions) - 1, LOOKED).astype(int))]


def _batches(job: Job, positions: Ints) -> Iterator[tuple[Tensor, list[int]]]:
    held: list[tuple[Tensor, int]] = []
    for position in positions:
        try:
            item = job.inputs.item(int(position))
        except (EquipoiseError, OSError):
            continue  # it will be a failed row of the run
        if held and item.x.shape != held[0][0].shape:
            continue
        held.append((item.x, item.label))
        if len(held) == BATCH:
            yield _together(held, job.device)
            held = []
    if held:
        yield _together(held, job.device)


def _together(held: list[tuple[Tensor, int]], device: str) -> tuple[Tensor, list[int]]:
    return fresh_strides(torch.stack([x for x, _ in held])).to(device), [y for _, y in held]


def _module(job: Job) -> torch.nn.Module:
    module = job.model.build(job.device)
    size = min(job.batch_size or BATCH, BATCH) if job.model.batch is None else job.model.batch
    return Batched(module, size, exact=job.model.batch is not None)


def _answers(model: torch.nn.Module, x: Tensor) -> Tensor:
    """The largest logit, −1 where one is no number."""
    with torch.inference_mode():
        out = model(x).detach().double().cpu()
    return torch.where(torch.isfinite(out).all(dim=1), out.argmax(dim=1), -1)


def _disturbed(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
    return fresh_strides(x + (sigma * noise).to(x.dtype).to(x.device))


def _generator(job: Job) -> torch.Generator:
    """Noise of its own, fixed by the seed of the run: calibration's stream under a name that no input has."""
    key = noise_key(job.parameters.seed, "a first look at the data", Stream.CALIBRATION, 0)
    return torch.Generator().manual_seed(key % 2**63)


def _counts(job: Job) -> dict[str, int]:
    """Inputs of the run by class, where labels are known without reading them."""
    if job.inputs.labels is None:
        return {}
    found = np.bincount(np.asarray(job.inputs.labels)[job.positions], minlength=job.parameters.num_classes)
    return {_name(job, k): int(count) for k, count in enumerate(found) if count}


def _name(job: Job, label: int) -> str:
    names = job.inputs.classes
    return names[label] if names is not None and label < len(names) else f"class {label}"
