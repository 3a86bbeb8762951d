"""What a recipe adds to the loss, does after a step, or does to the input: penalties, projections and augmentations."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.core import InputError, did_you_mean
from equipoise.core.files import resolve
from equipoise.data import augment
from equipoise.optim import SpectralGuard
from equipoise.regularizers.decay import ActivationDecay
from equipoise.regularizers.noise import input_gradient_penalty
from equipoise.regularizers.projections import clip_weights_, project_
from equipoise.regularizers.selection import LINEAR_MAPS
from equipoise.train.config import Count, NonNegative, Positive, Share
from equipoise.train.losses import Task

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
class Term:
    """A penalty, called with the batch after the forward pass, or a projection, called with nothing after the step.

    `keeper` is the object whose `state_dict` belongs into a checkpoint and whose hooks are removed at the end, if it has them.
    """

    function: Callable[..., Any]
    keeper: Any = None

    def __call__(self, *batch: Tensor) -> Any:
        """The penalty of this batch, or the projection."""
        return self.function(*batch)

    def remove(self) -> None:
        """Take hooks off the network, if there are any."""
        getattr(self.keeper, "remove", lambda: None)()


def selection(only: Names = None, names: Names = None) -> dict[str, Any]:
    """`only: Conv2d` and `names: fc` (or lists) as the regularizers take them.

    Args:
        only: names of layer types.
        names: names of layers.

    >>> selection("Conv2d")
    {'only': (<class 'torch.nn.modules.conv.Conv2d'>,)}
    """
    options: dict[str, Any] = {}
    layers = {kind.__name__: kind for kind in LINEAR_MAPS}
    if only is not None:
        types = [only] if isinstance(only, str) else only
        unknown = [name for name in types if name not in layers]
        if unknown:
            raise InputError(
                f"only: no layer type {unknown[0]!r}{did_you_mean(unknown[0], layers)}"
            )
        options["only"] = tuple(layers[name] for name in types)
    if names is not None:
        options["names"] = names if isinstance(names, str) else tuple(names)
    return options


def _layer_penalty(spec: str) -> Callable[..., Term]:
    """A row for a penalty on the weights of selected layers; its arguments are those of the class `spec` names."""

    def _row(context: Context, only: Names = None, names: Names = None, **options: Any) -> Term:
        renamed = {"kind" if name == "penalty" else name: value for name, value in options.items()}
        extra = {"example_input": context.example} if "Spectral" in spec else {}
        penalty = resolve(spec)(context.model, **renamed, **extra, **selection(only, names))
        return Term(lambda x, y: penalty(), penalty)

    return _row


def input_gradient(
    context: Context, weight: NonNegative = 1.0, target: NonNegative = 0.0, two_sided: bool = False
) -> Term:
    """`weight·mean max(‖∇ₓ loss‖ − target, 0)²`.

    Args:
        context: the network and the task.
        weight: of the penalty.
        target: norms up to it cost nothing.
        two_sided: whether smaller norms cost too.
    """

    penalty = functools.partial(
        input_gradient_penalty,
        context.model,
        target=target,
        two_sided=two_sided,
        loss=context.task.loss,
        weight=weight,
    )
    return Term(penalty)


def activation_decay(
    context: Context,
    sigma: NonNegative = 0.1,
    layer: str | None = None,
    form: Literal["jensen", "centred", "taylor"] = "jensen",
) -> Term:
    """`ActivationDecay`: `(σ²/2)·mean‖h‖²` on the input of the last linear layer.

    Args:
        context: the network and the task.
        sigma: σ.
        layer: another layer, by its name.
        form: of the penalty.
    """
    decay = ActivationDecay(context.model, sigma, layer, form=form)
    return Term(lambda x, y: decay(mask=context.task.mask(layer, y)), decay)


_HOME = "equipoise.regularizers."
#: penalties added to the loss; a new one is a new row
REGULARIZERS: dict[str, Callable[..., Term]] = {
    "spectral": _layer_penalty(_HOME + "spectral:SpectralPenalty"),
    "frobenius": _layer_penalty(_HOME + "projections:FrobeniusPenalty"),
    "orthogonality": _layer_penalty(_HOME + "projections:OrthogonalityPenalty"),
    "layerwise-decay": _layer_penalty(_HOME + "decay:LayerwiseDecay"),
    "input-gradient": input_gradient,
    "activation-decay": activation_decay,
}


def project_norm(
    context: Context, p: float = 2, radius: Positive = 1.0, only: Names = None, names: Names = None
) -> Term:
    """`W ← W/max(1, ‖W‖_p/radius)` after each step, p ∈ {1, 2, ∞}.

    Args:
        context: the network.
        p: exponent of the norm.
        radius: largest norm.
        only: types of layers.
        names: of layers.
    """
    options = selection(only, names)
    return Term(lambda: project_(context.model, p, radius, **options))


def clip(context: Context, limit: NonNegative, only: Names = None, names: Names = None) -> Term:
    """`W ← clamp(W, −limit, limit)` after each step.

    Args:
        context: the network.
        limit: of the entries.
        only: types of layers.
        names: of layers.
    """
    options = selection(only, names)
    return Term(lambda: clip_weights_(context.model, limit, **options))


def guard(
    context: Context,
    radius: Positive | dict[str, Positive] | None = None,
    tolerance: Positive = 1e-3,
    only: Names = None,
    names: Names = None,
    **options: Any,
) -> Term:
    """`SpectralGuard`: norms held at `radius`, proved after each step; a model with a constant has radii of its own.

    Args:
        context: the network.
        radius: largest norm, one for all layers or by name.
        tolerance: by how much a norm may exceed it.
        only: types of layers.
        names: of layers.
        options: of `SpectralGuard`.
    """
    options = {"headroom": 0.01, **options, **selection(only, names)}
    if radius is None:
        own = getattr(context.model, "radii", None)
        if own is None:
            raise InputError(
                "guard: say the radius; this model has no method radii(tolerance) of its own"
            )
        radius = own(tolerance)
        options["only"] = nn.Linear
    keeper = SpectralGuard(
        context.model, radius, tolerance=tolerance, example_input=context.example, **options
    )
    return Term(keeper.step, keeper)


#: what is done to the weights after each step
PROJECTIONS: dict[str, Callable[..., Term]] = {"norm": project_norm, "clip": clip, "guard": guard}


def flip(p: Share = 0.5) -> Augment:
    """Each image is mirrored with probability p."""
    return functools.partial(augment.random_flip, p=p)


def pad_crop(padding: Count = 4) -> Augment:
    """Each image is padded with zeros and cropped to its size again at a random place."""
    return functools.partial(augment.random_crop, padding=padding)


#: what is done to the training images
AUGMENTATIONS: dict[str, Callable[..., Augment]] = {"flip": flip, "pad-crop": pad_crop}
