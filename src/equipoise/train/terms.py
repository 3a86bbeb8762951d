"""What recipes can add to the loss, do after a step, or do to the input: tables of penalties, projections and augmentations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.train.reading import nearest
from equipoise.train.task import Task

if TYPE_CHECKING:
    from equipoise.optim import SpectralGuard

Augment = Callable[[Tensor, torch.Generator], Tensor]
#: names of layer types, or of layers, in a recipe
Names = str | list[str] | None


@dataclass(frozen=True)
class Context:
    """What a row may need besides its arguments: the network (unwrapped), the task, and an input of zeros."""

    model: nn.Module
    task: Task
    example: Tensor


@dataclass(frozen=True)
class Penalty:
    """A term of the loss; `keeper` is the object whose `state_dict` belongs into a checkpoint, if it has one."""

    function: Callable[[Tensor, Tensor], Tensor]
    keeper: Any = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The term for this batch, after the forward pass."""
        return self.function(x, y)

    def state(self) -> dict[str, Tensor]:
        """What exact resuming needs."""
        return dict(self.keeper.state_dict()) if hasattr(self.keeper, "state_dict") else {}

    def remove(self) -> None:
        """Take hooks off the network, if there are any."""
        if hasattr(self.keeper, "remove"):
            self.keeper.remove()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        if hasattr(self.keeper, "load_state_dict"):
            self.keeper.load_state_dict(state)


def _alone(term: Callable[[], Tensor]) -> Penalty:
    return Penalty(lambda x, y: term(), term)


def layer_types(only: Names) -> dict[str, Any]:
    """`only: Conv2d` (or a list) as the module types the regularizers take.

    >>> layer_types("Conv2d")
    {'only': (<class 'torch.nn.modules.conv.Conv2d'>,)}
    """
    if only is None:
        return {}
    names = [only] if isinstance(only, str) else list(only)
    from equipoise.regularizers.selection import LINEAR_MAPS

    known = {kind.__name__: kind for kind in LINEAR_MAPS}
    for name in names:
        if name not in known:
            raise InputError(f"only: no layer type {name!r}{nearest(name, known)}")
    return {"only": tuple(known[name] for name in names)}


def _names(names: Names) -> dict[str, Any]:
    return {} if names is None else {"names": names if isinstance(names, str) else tuple(names)}


def _chosen(only: Names, names: Names) -> dict[str, Any]:
    return {**layer_types(only), **_names(names)}


def spectral(
    context: Context, weight: float = 1.0, penalty: str = "sum", target: float = 1.0, scope: str = "layer",
    bound: str = "tracked", only: Names = None, names: Names = None, steps: int = 1, every: int = 1, iterations: int = 5,
) -> Penalty:  # fmt: skip
    """`SpectralPenalty`: `penalty` is its kind (sum, squares, log, hinge, target)."""
    from equipoise.regularizers.spectral import SpectralPenalty

    chosen: Any = {"kind": penalty, "scope": scope, "bound": bound}
    return _alone(
        SpectralPenalty(
            context.model, target=target, weight=weight, example_input=context.example, steps=steps, every=every,
            iterations=iterations, **chosen, **_chosen(only, names),
        )
    )  # fmt: skip


def frobenius(context: Context, weight: float = 1.0, only: Names = None, names: Names = None) -> Penalty:
    """`weight·Σ‖W‖_F²`."""
    from equipoise.regularizers.projections import FrobeniusPenalty

    return _alone(FrobeniusPenalty(context.model, weight=weight, **_chosen(only, names)))


def orthogonality(context: Context, weight: float = 1.0, only: Names = None, names: Names = None) -> Penalty:
    """`weight·Σ‖WWᵀ − I‖_F²`."""
    from equipoise.regularizers.projections import OrthogonalityPenalty

    return _alone(OrthogonalityPenalty(context.model, weight=weight, **_chosen(only, names)))


def input_gradient(context: Context, weight: float = 1.0, target: float = 0.0, two_sided: bool = False) -> Penalty:
    """`weight·mean max(‖∇ₓ loss‖ − target, 0)²`."""
    from equipoise.regularizers.noise import input_gradient_penalty

    def function(x: Tensor, y: Tensor) -> Tensor:
        return input_gradient_penalty(
            context.model, x, y, target=target, two_sided=two_sided, loss=context.task.loss, weight=weight
        )

    return Penalty(function)


def activation_decay(context: Context, sigma: float = 0.1, layer: str | None = None, form: str = "jensen") -> Penalty:
    """`ActivationDecay`: `(σ²/2)·mean‖h‖²` on the input of the last linear layer."""
    from equipoise.regularizers.decay import ActivationDecay

    if form == "montecarlo":
        raise InputError("activation-decay: form is jensen, centred or taylor in a recipe")
    chosen: Any = form
    decay = ActivationDecay(context.model, sigma, layer, form=chosen)
    masks = getattr(context.task, "mask", None)  # sentences: padding does not count
    if masks is None:
        return _alone(decay)
    return Penalty(lambda x, y: decay(mask=masks(layer, y)), decay)


def layerwise_decay(
    context: Context, sigma_activations: float = 1e-3, sigma_weight: float = 1e-2, names: Names = None
) -> Penalty:
    """`LayerwiseDecay`: the variant of Baek et al. on all linear layers."""
    from equipoise.regularizers.decay import LayerwiseDecay

    return _alone(LayerwiseDecay(context.model, sigma_activations, sigma_weight, **_names(names)))


#: penalties added to the loss; a new one is a new row
REGULARIZERS: dict[str, Callable[..., Penalty]] = {
    "spectral": spectral,
    "frobenius": frobenius,
    "orthogonality": orthogonality,
    "input-gradient": input_gradient,
    "activation-decay": activation_decay,
    "layerwise-decay": layerwise_decay,
}


def project_norm(
    context: Context, p: float = 2, radius: float = 1.0, only: Names = None, names: Names = None
) -> Callable[[], Any]:
    """`W ← W/max(1, ‖W‖_p/radius)` after each step, p ∈ {1, 2, ∞}."""
    from equipoise.regularizers.projections import project_

    if p not in (1, 2, float("inf")):
        raise InputError(f"projections: p must be 1, 2 or .inf, got {p}")
    exponent: Any = p if p == float("inf") else int(p)
    options = _chosen(only, names)
    return lambda: project_(context.model, exponent, radius, **options)


def clip(context: Context, limit: float, only: Names = None, names: Names = None) -> Callable[[], Any]:
    """`W ← clamp(W, −limit, limit)` after each step."""
    from equipoise.regularizers.projections import clip_weights_

    options = _chosen(only, names)
    return lambda: clip_weights_(context.model, limit, **options)


@dataclass(frozen=True)
class Guarding:
    """A `SpectralGuard` after each step; its state belongs into a checkpoint."""

    guard: SpectralGuard

    def __call__(self) -> None:
        """Check the weights and bring back those that are too large."""
        self.guard.step()


def guard(
    context: Context, radius: float | dict[str, float] | None = None, how: str = "cap", tolerance: float = 1e-3,
    every: int = 1, headroom: float = 0.01, only: Names = None, names: Names = None,
) -> Guarding:  # fmt: skip
    """`SpectralGuard`: norms held at `radius`, proved after each step; a model with a constant has radii of its own."""
    from equipoise.nn.models import LipschitzGPT
    from equipoise.optim import SpectralGuard

    chosen: Any = {"how": how, "headroom": headroom, **_chosen(only, names)}
    if radius is None:
        if not isinstance(context.model, LipschitzGPT):
            raise InputError("guard: say the radius; only lipschitz_gpt, which is built for a constant, has its own")
        radius, chosen = context.model.radii(tolerance), {**chosen, "only": nn.Linear}
    return Guarding(
        SpectralGuard(context.model, radius, tolerance=tolerance, every=every, example_input=context.example, **chosen)
    )


#: what is done to the weights after each step
PROJECTIONS: dict[str, Callable[..., Callable[[], Any]]] = {"norm": project_norm, "clip": clip, "guard": guard}


def flip(p: float = 0.5) -> Augment:
    """Mirror left to right with probability p."""
    from equipoise.data.augment import random_flip

    return lambda x, source: random_flip(x, source, p)


def pad_crop(padding: int = 4, border: str = "zeros") -> Augment:
    """Pad, then cut the original size out at a random place."""
    from equipoise.data.augment import random_crop

    edge: Any = border
    return lambda x, source: random_crop(x, padding, source, edge)


def cover(size: int = 8, p: float = 1.0, value: float = 0.0) -> Augment:
    """Cover a square at a random place."""
    from equipoise.data.augment import cutout

    return lambda x, source: cutout(x, size, source, p, value)


def random_operations(operations: int = 2, strength: float = 0.3) -> Augment:
    """RandAugment: a few operations from a table per image."""
    from equipoise.data.augment import randaugment

    return lambda x, source: randaugment(x, source, operations, strength)


#: what is done to the training images
AUGMENTATIONS: dict[str, Callable[..., Augment]] = {
    "flip": flip,
    "pad-crop": pad_crop,
    "cutout": cover,
    "randaugment": random_operations,
}
