"""The training loss of a batch: plain, under noise, with consistency, on smoothed adversaries, or of the smoothed scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.checkpoints import load_checkpoint
from equipoise.core.errors import InputError
from equipoise.smoothing.simplex import SimplexMap
from equipoise.train.recipe import generator, in_blocks
from equipoise.train.task import Task, Timed


@dataclass(frozen=True)
class Place:
    """Where a batch stands: the seed, the step, the place of its first example in the global batch, the fraction of the run."""

    seed: int
    step: int
    first: int
    fraction: float = 1.0


class Objective(Protocol):
    """The mean loss of a batch, and the output it was computed from (for the training accuracy)."""

    def __call__(self, network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        """The loss of this process's share of the batch, averaged over it."""


def _now(task: Task, place: Place) -> Task:
    """The task as it is at this moment of the run."""
    return task.at(place.fraction) if isinstance(task, Timed) else task


def plain(task: Task) -> Objective:
    """`loss(f(x), y)`."""

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        output = network(x)
        return _now(task, place).loss(output, y), output

    return objective


def add_noise(x: Tensor, sigma: float, place: Place, copy: int = 0) -> Tensor:
    """`x + σ·g`, with g keyed by the step, the copy and the place of each example in the global batch."""

    def noisy(rows: Tensor, source: torch.Generator) -> Tensor:
        return rows + sigma * torch.randn(rows.shape, generator=source, device=rows.device, dtype=rows.dtype)

    return in_blocks(noisy, x, place.first, place.seed, "noise", place.step, copy)


def gaussian(task: Task, sigma: float) -> Objective:
    """`E_g loss(f(x + σ·g), y)`, one draw per step (Cohen et al. 2019)."""
    _positive("sigma", sigma)

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        output = network(add_noise(x, sigma, place))
        return _now(task, place).loss(output, y), output

    return objective


def consistency(task: Task, sigma: float, copies: int = 2, weight: float = 10.0, entropy: float = 0.5) -> Objective:
    """`consistency_loss` of Jeong and Shin (2020): cross-entropy of noisy copies and a pull to their mean prediction."""
    from equipoise.regularizers.noise import consistency_loss

    _positive("sigma", sigma)

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        seen: list[Tensor] = []

        def remembering(z: Tensor) -> Tensor:
            seen.append(network(z))
            return seen[-1]

        source = _generator(x, place)
        loss = consistency_loss(
            remembering, x, y, sigma, copies=copies, weight=weight, entropy=entropy, generator=source
        )
        return loss, seen[0][: len(y)]

    return objective


def smooth_adversarial(task: Task, sigma: float, epsilon: float, steps: int = 2, copies: int = 2) -> Objective:
    """The task's loss on noisy adversaries of the smoothed classifier (SmoothAdv, Salman et al. 2019)."""
    from equipoise.regularizers.noise import smooth_adversarial as adversaries

    _positive("sigma", sigma)

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        inner = getattr(
            network, "module", network
        )  # the ascent needs no gradient of the weights: not through the wrapper
        noisy, labels = adversaries(
            inner, x, y, sigma, epsilon, steps=steps, copies=copies, generator=_generator(x, place)
        )
        output = network(noisy)
        return _now(task, place).loss(output, labels), output[: len(y)]

    return objective


def soft_vote(task: Task, sigma: float, map: str = "softmax", temperature: float = 1.0, copies: int = 4) -> Objective:
    """`−log mean_i τ_T(f(x + σ·g_i))_y`: trains the scores that are averaged when soft votes are certified."""
    from equipoise.regularizers.noise import smoothed_scores, soft_vote_loss

    _positive("sigma", sigma)
    chosen = _soft_map(map, temperature)

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        scores, output = smoothed_scores(network, x, sigma, chosen, copies, _generator(x, place))
        return soft_vote_loss(scores, y), output

    return objective


def lipschitz_radius(
    task: Task, sigma: float, target: float, map: str = "softmax", temperature: float = 1.0, lipschitz: float = 1.0,
    copies: int = 4,
) -> Objective:  # fmt: skip
    """`mean max(0, 1 − R/target)`, R the Lipschitz-aware radius R_multiLip of the averaged soft scores.

    `lipschitz` is the constant the network is built for; certificates prove their own.
    """
    from equipoise.regularizers.noise import expected_radius, smoothed_scores

    _positive("sigma", sigma)
    _positive("target", target)
    _positive("lipschitz", lipschitz)
    chosen = _soft_map(map, temperature)

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        scores, output = smoothed_scores(network, x, sigma, chosen, copies, _generator(x, place))
        radius = expected_radius(scores, y, sigma, chosen.component_lipschitz(lipschitz, scores.shape[1]))
        return (1 - radius / target).clamp_min(0).mean(), output

    return objective


def _soft_map(name: str, temperature: float) -> SimplexMap:
    if name not in ("softmax", "sparsemax"):
        raise InputError(f"noise.map must be softmax or sparsemax, which have gradients, got {name!r}")
    return SimplexMap(name, temperature)  # type: ignore[arg-type]


def distillation(task: Task, teacher: str, weight: float = 0.5, temperature: float = 1.0) -> Objective:
    """`(1 − w)·loss(f(x), y) + w·T²·KL(softmax(t(x)/T) ‖ softmax(f(x)/T))`, t the network of the checkpoint `teacher`.

    Reference: Hinton, Vinyals, Dean (2015), Distilling the knowledge in a neural network.
    """
    if not (0 < weight < 1 and temperature > 0):
        raise InputError(f"distillation needs weight in (0, 1) and temperature > 0, got {weight} and {temperature}")
    guide = load_checkpoint(teacher)[0].requires_grad_(False).eval()

    def objective(network: nn.Module, x: Tensor, y: Tensor, place: Place) -> tuple[Tensor, Any]:
        output = network(x)
        with torch.no_grad():
            wanted = (guide.to(x.device)(x) / temperature).log_softmax(1)
        told = functional.kl_div((output / temperature).log_softmax(1), wanted, reduction="batchmean", log_target=True)
        return (1 - weight) * _now(task, place).loss(output, y) + weight * temperature**2 * told, output

    return objective


def _generator(x: Tensor, place: Place) -> torch.Generator:
    """Keyed by step and by the first place in the global batch: processes draw different noise, a restart the same."""
    return generator(place.seed, "noise", place.step, place.first, device=x.device)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(f"noise.{name} must be positive, got {value}")


#: how the loss of a batch is computed; a new way is a new row
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "gaussian": gaussian,
    "consistency": consistency,
    "smoothadv": smooth_adversarial,
    "distillation": distillation,
    "soft-vote": soft_vote,
    "lipschitz-radius": lipschitz_radius,
}
