"""Tasks (what the output is compared with, what is counted) and objectives (how a batch's training loss is computed).

`LOSSES` and `OBJECTIVES` are the tables that recipes choose from; the arguments of a row are the keys of the recipe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.core import InputError
from equipoise.nn import losses
from equipoise.nn.wrappers import ending, known_constant
from equipoise.regularizers import noise
from equipoise.smoothing.simplex import SimplexMap
from equipoise.train.config import Few, NonNegative, Positive, Share
from equipoise.train.processes import generator

#: for each metric the sum of its hits and how many were tried
Counts = dict[str, tuple[Tensor, Tensor | int]]


class Task:
    """A loss that is a mean over the batch, and sums over examples for the metrics.

    `loss(output, y)` is the mean loss of a batch; `counts(output, y, quick)` gives for each metric the sum of its hits and
    how many were tried, `quick` without costly metrics.
    """

    metrics: tuple[str, ...] = ("accuracy",)
    loss: Callable[..., Tensor]
    counts: Callable[..., Counts]

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
        """The mean loss of a batch.

        Args:
            output: logits.
            y: labels.
        """
        return self.function(output, y)

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Right answers; an input whose logits hold NaN counts as wrong.

        Args:
            output: logits.
            y: labels.
            quick: not used.
        """
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
    weight: Callable[[], Tensor] | None = None

    def fit(self, model: nn.Module, source: Any) -> AtRadius:
        """The loss with this network's constants: by pairs where it ends in a linear layer, else `√2·L`.

        L is the recipe's `lipschitz`, or what the construction of the network guarantees.

        Args:
            model: the network.
            source: not used.
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
        """The mean loss of a batch.

        Args:
            output: logits.
            y: labels.
        """
        weight = None if self.weight is None else self.weight().detach()
        lipschitz = 1.0 if self.lipschitz is None else self.lipschitz
        return self.function(output, y, self.epsilon, lipschitz, weight)


def _plain_loss(
    function: Callable[..., Tensor], **defaults: float
) -> Callable[..., Classification]:
    """A row for `function(logits, labels, **numbers)`; `defaults` are its numbers."""

    def row(**numbers: NonNegative) -> Classification:
        if not numbers.keys() <= defaults.keys():
            raise TypeError(f"it takes {list(defaults)}, got {list(numbers)}")
        return Classification(functools.partial(function, **(defaults | numbers)))

    return row


def _radius_loss(
    function: Callable[..., Tensor], default_epsilon: float = 1.0, **defaults: float
) -> Callable[..., AtRadius]:
    """A row for a loss that asks for a radius; `defaults` are its own numbers."""
    options = _plain_loss(function, **defaults)

    def _row(
        epsilon: NonNegative = default_epsilon,
        start: NonNegative | None = None,
        ramp: Share = 0.5,
        lipschitz: Positive | None = None,
        **numbers: NonNegative,
    ) -> AtRadius:
        return AtRadius(
            options(**numbers).function,
            epsilon,
            epsilon if start is None else start,
            ramp,
            lipschitz,
        )

    return _row


#: every loss a recipe can name; a new one is a new row, or `package.module:function` in the recipe
LOSSES: dict[str, Callable[..., Task]] = {
    "ce": _plain_loss(F.cross_entropy, label_smoothing=0.0),
    "lipschitz-ce": _plain_loss(
        losses.offset_cross_entropy, temperature=0.25, offset=losses.OFFSET, lipschitz=1.0
    ),
    "margin": _plain_loss(losses.margin_hinge, epsilon=1.0, lipschitz=1.0),
    "lmt": _radius_loss(losses.lipschitz_margin, temperature=1.0),
    "gloro": _radius_loss(losses.gloro),
    "emma": _radius_loss(losses.emma, temperature=1.0),
    "la": _radius_loss(losses.logit_annealing, 0.0, temperature=0.75, offset=2.0, gamma=5.0),
    "hkr": _plain_loss(losses.hkr, alpha=0.9, margin=1.0),
}


@dataclass(frozen=True)
class Batch:
    """This process's share of a global batch: the network, inputs and labels, and its position in the run.

    `first` is the place of its first example in the global batch, `fraction` that of the step in the run.
    """

    network: nn.Module
    x: Tensor
    y: Tensor
    seed: int
    step: int
    first: int
    fraction: float = 1.0

    def generator(self, purpose: str = "noise") -> torch.Generator:
        """Keyed by step and first place: processes draw different noise, a restart the same."""
        return generator(self.seed, purpose, self.step, self.first, device=self.x.device)


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

    def objective(batch: Batch) -> Outcome:
        noisy = noise.add_noise(batch.x, sigma, batch.generator())
        return plain(task)(replace(batch, x=noisy))

    return objective


def consistency(
    task: Task,
    sigma: Positive,
    copies: Few = 2,
    weight: NonNegative = 10.0,
    entropy: NonNegative = 0.5,
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


def soft_vote(
    task: Task,
    sigma: Positive,
    map: SoftMap = "softmax",
    temperature: Positive = 1.0,
    copies: Few = 4,
    target: Positive | None = None,
    lipschitz: Positive = 1.0,
) -> Objective:
    """`−log mean_i τ_T(f(x + σ·g_i))_y`: trains the scores that are averaged when soft votes are certified.

    With a `target` the loss is `mean max(0, 1 − R/target)`, R the Lipschitz-aware radius R_multiLip of these scores.

    Args:
        task: not used.
        sigma: noise.
        map: τ.
        temperature: T.
        copies: noisy copies of every input.
        target: radius above which nothing is gained.
        lipschitz: the constant the network is built for; certificates prove their own.
    """
    simplex = SimplexMap(map, temperature)

    def objective(batch: Batch) -> Outcome:
        scores, output = noise.smoothed_scores(
            batch.network, batch.x, sigma, simplex, copies, batch.generator()
        )
        if target is None:
            return noise.soft_vote_loss(scores, batch.y), output
        radius = noise.expected_radius(
            scores, batch.y, sigma, simplex.component_lipschitz(lipschitz, scores.shape[1])
        )
        return (1 - radius / target).clamp_min(0).mean(), output

    return objective


#: how the loss of a batch is computed under noise; a new way is a new row
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "gaussian": gaussian,
    "consistency": consistency,
    "soft-vote": soft_vote,
}
