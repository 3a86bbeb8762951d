"""Tasks (what the output is compared with, what is counted) and objectives (how a batch's training loss is computed).

`LOSSES` and `OBJECTIVES` are the tables that recipes choose from; the arguments of a row are the keys of the recipe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.checkpoints import load_checkpoint
from equipoise.core.errors import InputError, did_you_mean
from equipoise.nn import losses
from equipoise.nn.constants import known_constant
from equipoise.nn.wrappers import ending
from equipoise.regularizers import noise
from equipoise.smoothing.simplex import SimplexMap
from equipoise.train.config import Few, Fraction, NonNegative, Positive, Share
from equipoise.train.randomness import generator, in_blocks

#: margin asked of the right class by default, in units of L
_OFFSET = 1.5 * math.sqrt(2)
#: for each metric the sum of its hits and how many were tried
Counts = dict[str, tuple[Tensor, Tensor | int]]


class Task:
    """A loss that is a mean over the batch, and sums over examples for the metrics."""

    metrics: tuple[str, ...] = ("accuracy",)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch.

        Args:
            output: of the network.
            y: labels.
        """
        raise NotImplementedError

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """For each metric the sum of its hits and how many were tried.

        Args:
            output: of the network.
            y: labels.
            quick: leave costly metrics out.
        """
        raise NotImplementedError

    def fit(self, model: nn.Module, source: Any) -> Task:
        """The task for this network and these data.

        Args:
            model: the network that is trained or measured.
            source: the dataset.
        """
        return self

    def at(self, fraction: float) -> Task:
        """The task at a fraction of the run."""
        return self

    def mask(self, layer: str | None, y: Tensor) -> Tensor | None:
        """Which positions of a layer's input count in a penalty; None for all.

        Args:
            layer: its name.
            y: labels.
        """
        return None


@dataclass(frozen=True)
class Classification(Task):
    """One label per input; `function(logits, labels)` is the mean loss."""

    function: Callable[..., Tensor]

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return self.function(output, y)

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Right answers; an input whose logits hold NaN counts as wrong."""
        right = (output.argmax(1) == y) & ~output.isnan().any(1)
        return {"accuracy": (right.sum(), len(y))}


@dataclass(frozen=True)
class AtRadius(Classification):
    """A loss that asks for a radius ε, with the constants of the network it is fitted to.

    `function(z, y, ε, L, W)`: W is the weight of the linear layer that the network ends in and L the constant of what comes
    before, or W is None and L the constant of the whole network. ε rises from `start` to `epsilon` over the first `ramp` of
    the run.
    """

    epsilon: float = 1.0
    start: float = 1.0
    ramp: float = 0.0
    lipschitz: float | None = None
    weight: Callable[[], Tensor] | None = field(default=None, repr=False)

    def fit(self, model: nn.Module, source: Any) -> AtRadius:
        """The loss with this network's constants: by pairs where it ends in a linear layer, else `√2·L`.

        L is the recipe's `lipschitz`, or what the construction of the network guarantees.
        """
        head = ending(model)
        constructed = head.trunk if head is not None else known_constant(model)
        constant = self.lipschitz if self.lipschitz is not None else constructed
        if constant is None:
            raise InputError(
                "loss: the constant of this network does not follow from its construction; state the one it is held at, "
                "lipschitz: 1.0, or take a network of 1-Lipschitz layers"
            )
        return replace(self, lipschitz=constant, weight=None if head is None else head.weight)

    def at(self, fraction: float) -> AtRadius:
        """The loss at a fraction of the run, its ε constant from here on."""
        done = min(1.0, fraction / self.ramp) if self.ramp > 0 else 1.0
        return replace(self, epsilon=self.start + (self.epsilon - self.start) * done, ramp=0.0)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        weight = None if self.weight is None else self.weight().detach()
        lipschitz = 1.0 if self.lipschitz is None else self.lipschitz
        return self.function(output, y, self.epsilon, lipschitz, weight)


def cross_entropy(label_smoothing: Fraction = 0.0) -> Classification:
    """`−log softmax(z)_y`."""
    return Classification(functools.partial(F.cross_entropy, label_smoothing=label_smoothing))


def lipschitz_cross_entropy(
    temperature: Positive = 0.25, offset: NonNegative = _OFFSET, lipschitz: Positive = 1.0
) -> Classification:
    """`t·CE((z − offset·L·e_y)/t, y)`: asks a margin of the right class, at the scale of a Lipschitz network.

    Reference: Prach & Lampert (2022), *Almost-orthogonal layers*, section 5.

    Args:
        temperature: t.
        offset: margin asked of the right class, in units of L.
        lipschitz: L, the constant the network is built for.

    >>> round(lipschitz_cross_entropy(1.0, 0.0).loss(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.6931
    """
    return Classification(lambda z, y: losses.offset_cross_entropy(z, y, temperature, offset, lipschitz))


def _at_radius(name: str, default_epsilon: float = 1.0, **defaults: float) -> Callable[..., Task]:
    """A row for a loss of `equipoise.nn.losses` that asks for a radius; `defaults` are its own numbers."""

    def row(
        epsilon: NonNegative = default_epsilon,
        start: NonNegative | None = None,
        ramp: Share = 0.5,
        lipschitz: Positive | None = None,
        **own: float,
    ) -> Task:
        for key in own:
            if key not in defaults:
                raise InputError(f"loss: unknown key {key!r}{did_you_mean(key, [*defaults, 'epsilon'])}")
        function = functools.partial(getattr(losses, name), **{**defaults, **own})
        first = epsilon if start is None else start
        return AtRadius(function, epsilon, first, ramp, lipschitz)

    return row


def hinge(epsilon: NonNegative = 1.0, lipschitz: Positive = 1.0) -> Classification:
    """`mean max(0, √2·L·ε − margin)`.

    Args:
        epsilon: ε, the radius asked for.
        lipschitz: L, the constant the network is built for.
    """
    return Classification(lambda z, y: losses.margin_hinge(z, y, epsilon, lipschitz))


def hinge_transport(alpha: Share = 0.9, margin: Positive = 1.0) -> Classification:
    """`α·hinge − (1 − α)·KR`, `equipoise.nn.losses.hkr`.

    Args:
        alpha: weight of the hinge.
        margin: of the hinge.
    """
    return Classification(lambda z, y: losses.hkr(z, y, alpha, margin))


def soft_hinge_transport(alpha: Share = 0.9, margin: Positive = 1.0, temperature: Positive = 1.0) -> Classification:
    """`hkr` with rivals weighted by how close they are, `equipoise.nn.losses.soft_hkr`.

    Args:
        alpha: weight of the hinge.
        margin: of the hinge.
        temperature: of the weights.
    """
    return Classification(lambda z, y: losses.soft_hkr(z, y, alpha, margin, temperature))


#: every loss a recipe can name; a new one is a new row, or `package.module:function` in the recipe
LOSSES: dict[str, Callable[..., Task]] = {
    "ce": cross_entropy,
    "lipschitz-ce": lipschitz_cross_entropy,
    "margin": hinge,
    "lmt": _at_radius("lipschitz_margin", temperature=1.0),
    "gloro": _at_radius("gloro"),
    "gloro-trades": _at_radius("gloro_trades", beta=1.2),
    "emma": _at_radius("emma", temperature=1.0),
    "la": _at_radius("logit_annealing", 0.0, temperature=0.75, offset=2.0, gamma=5.0),
    "hkr": hinge_transport,
    "soft-hkr": soft_hinge_transport,
}


@dataclass(frozen=True)
class Batch:
    """This process's share of a global batch: the network, inputs and labels, and where in the run it stands.

    `first` is the place of its first example in the global batch, `fraction` that of the step in the run.
    """

    network: nn.Module
    x: Tensor
    y: Tensor
    seed: int
    step: int
    first: int
    fraction: float = 1.0

    def generator(self) -> torch.Generator:
        """Keyed by step and first place: processes draw different noise, a restart the same."""
        return generator(self.seed, "noise", self.step, self.first, device=self.x.device)


#: the mean loss of a batch, and the network's output (for the training accuracy)
Outcome = tuple[Tensor, Any]
Objective = Callable[[Batch], Outcome]
SoftMap = Literal["softmax", "sparsemax"]  # those with gradients


def plain(task: Task) -> Objective:
    """`loss(f(x), y)`."""

    def objective(batch: Batch) -> Outcome:
        output = batch.network(batch.x)
        return task.at(batch.fraction).loss(output, batch.y), output

    return objective


def gaussian(task: Task, sigma: Positive) -> Objective:
    """`E_g loss(f(x + σ·g), y)`, one draw per step (Cohen et al. 2019).

    Args:
        task: gives the loss.
        sigma: σ.
    """
    inner = plain(task)

    def add_noise(rows: Tensor, source: torch.Generator) -> Tensor:
        return rows + sigma * torch.randn(rows.shape, generator=source, device=rows.device, dtype=rows.dtype)

    def objective(batch: Batch) -> Outcome:
        noisy = in_blocks(add_noise, batch.x, batch.first, batch.seed, "noise", batch.step, 0)
        return inner(replace(batch, x=noisy))

    return objective


def consistency(
    task: Task, sigma: Positive, copies: Few = 2, weight: NonNegative = 10.0, entropy: NonNegative = 0.5
) -> Objective:
    """Cross-entropy of noisy copies and a pull to their mean prediction, `consistency_loss` (Jeong and Shin 2020).

    Args:
        task: not used: the loss is cross-entropy.
        sigma: noise.
        copies: noisy copies of every input.
        weight: of the pull.
        entropy: weight of the mean prediction's entropy.
    """

    def objective(batch: Batch) -> Outcome:
        outputs: list[Tensor] = []

        def remembering(z: Tensor) -> Tensor:
            outputs.append(batch.network(z))
            return outputs[-1]

        loss = noise.consistency_loss(
            remembering,
            batch.x,
            batch.y,
            sigma,
            copies=copies,
            weight=weight,
            entropy=entropy,
            generator=batch.generator(),
        )
        return loss, outputs[0][: len(batch.y)]

    return objective


def smooth_adversarial(task: Task, sigma: Positive, epsilon: NonNegative, steps: Few = 2, copies: Few = 2) -> Objective:
    """The task's loss on noisy adversaries of the smoothed classifier (SmoothAdv, Salman et al. 2019).

    Args:
        task: gives the loss.
        sigma: noise.
        epsilon: radius of the attack.
        steps: of the attack.
        copies: noisy copies of every input.
    """

    def objective(batch: Batch) -> Outcome:
        inner = getattr(
            batch.network, "module", batch.network
        )  # the ascent needs no gradient of the weights: not by DDP
        noisy, labels = noise.smooth_adversarial(
            inner, batch.x, batch.y, sigma, epsilon, steps=steps, copies=copies, generator=batch.generator()
        )
        output = batch.network(noisy)
        return task.at(batch.fraction).loss(output, labels), output[: len(batch.y)]

    return objective


def soft_vote(
    task: Task, sigma: Positive, map: SoftMap = "softmax", temperature: Positive = 1.0, copies: Few = 4
) -> Objective:
    """`−log mean_i τ_T(f(x + σ·g_i))_y`: trains the scores that are averaged when soft votes are certified.

    Args:
        task: not used.
        sigma: noise.
        map: τ.
        temperature: T.
        copies: noisy copies of every input.
    """
    simplex = SimplexMap(map, temperature)

    def objective(batch: Batch) -> Outcome:
        scores, output = noise.smoothed_scores(batch.network, batch.x, sigma, simplex, copies, batch.generator())
        return noise.soft_vote_loss(scores, batch.y), output

    return objective


def lipschitz_radius(
    task: Task,
    sigma: Positive,
    target: Positive,
    map: SoftMap = "softmax",
    temperature: Positive = 1.0,
    lipschitz: Positive = 1.0,
    copies: Few = 4,
) -> Objective:
    """`mean max(0, 1 − R/target)`, R the Lipschitz-aware radius R_multiLip of the averaged soft scores.

    Args:
        task: not used.
        sigma: noise.
        target: radius above which nothing is gained.
        map: to the simplex.
        temperature: of the map.
        lipschitz: the constant the network is built for; certificates prove their own.
        copies: noisy copies of every input.
    """
    simplex = SimplexMap(map, temperature)

    def objective(batch: Batch) -> Outcome:
        scores, output = noise.smoothed_scores(batch.network, batch.x, sigma, simplex, copies, batch.generator())
        radius = noise.expected_radius(scores, batch.y, sigma, simplex.component_lipschitz(lipschitz, scores.shape[1]))
        return (1 - radius / target).clamp_min(0).mean(), output

    return objective


def distillation(task: Task, teacher: str, weight: Fraction = 0.5, temperature: Positive = 1.0) -> Objective:
    """`(1 − w)·loss(f(x), y) + w·T²·KL(softmax(t(x)/T) ‖ softmax(f(x)/T))`.

    Reference: Hinton, Vinyals, Dean (2015), Distilling the knowledge in a neural network.

    Args:
        task: gives the loss.
        teacher: folder of the checkpoint whose network is t.
        weight: w.
        temperature: T.
    """
    guide = load_checkpoint(teacher)[0].requires_grad_(False).eval()

    def objective(batch: Batch) -> Outcome:
        output = batch.network(batch.x)
        with torch.no_grad():
            target = (guide.to(batch.x.device)(batch.x) / temperature).log_softmax(1)
        own = (output / temperature).log_softmax(1)
        distance = F.kl_div(own, target, reduction="batchmean", log_target=True)
        loss = task.at(batch.fraction).loss(output, batch.y)
        return (1 - weight) * loss + weight * temperature**2 * distance, output

    return objective


#: how the loss of a batch is computed under noise; a new way is a new row
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "gaussian": gaussian,
    "consistency": consistency,
    "smoothadv": smooth_adversarial,
    "distillation": distillation,
    "soft-vote": soft_vote,
    "lipschitz-radius": lipschitz_radius,
}
