"""The largest certified radius beside α-CROWN by its authors' own code, `auto_LiRPA`, where that can be imported.

Both certify the same margins of the same network and image in one thread. `auto_LiRPA` bounds all margins on a given ball;
its largest radius comes from a bisection: plain CROWN brackets it first, which is cheap, then α-CROWN with 20 steps is
bisected to 0.5 %. Its bounds are in float32 and not rounded outward; ours are proved.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import equipoise as eq
from equipoise_lab.bench import data_file

#: relative width at which a bisection stops
WIDTH = 5e-3
#: steps of α-CROWN, and the first of them
STEPS, RATE = 20, 0.1


def is_available() -> bool:
    """Whether `auto_LiRPA` can be imported."""
    return importlib.util.find_spec("auto_LiRPA") is not None


@dataclass(frozen=True)
class Subject:
    """A network in evaluation mode with images and labels."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor


def subjects() -> list[Subject]:
    """The dense and convolutional networks of the shared data."""
    from equipoise_lab.bench.verification import TASKS

    tasks = [task for task in TASKS if not task.complete]
    return [deep_network(), *(Subject(task.name, *task.load()) for task in tasks)]


def deep_network() -> Subject:
    """The network of five hidden layers of 100 of the α,β-CROWN repository."""
    weights = load_file(data_file("mnist-6x100.safetensors"))
    layers: list[nn.Module] = [nn.Flatten()]
    for k in range(6):
        outputs, inputs = weights[f"{k}.weight"].shape
        linear = nn.Linear(inputs, outputs)
        linear.weight.data = weights[f"{k}.weight"]
        linear.bias.data = weights[f"{k}.bias"]
        layers += [linear, nn.ReLU()]
    with np.load(data_file("mnist-50.npz")) as stored:
        x = torch.from_numpy(stored["x_test"])[:, None].float() / 255
        y = torch.from_numpy(stored["y_test"]).long()
    return Subject("mnist-6x100", nn.Sequential(*layers[:-1]).eval(), x, y)


def largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest radius that `holds`, by bisection.

    Args:
        holds: whether a radius is verified.
        low: a radius that is, or a guess to begin with.
        high: a radius that is not; infinite where none is known.
    """
    while not holds(low):
        low, high = low / 2, low
    while high == math.inf:
        if holds(2 * low):
            low *= 2
        else:
            high = 2 * low
    while high > low * (1 + WIDTH):
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


class AlphaCrown:
    """`auto_LiRPA` on one network.

    Args:
        model: the network.
        example: a batch of one input.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        from auto_LiRPA import BoundedModule

        options = {
            # version 0.3 mixes up its two layouts of slopes where more than this share of a layer may switch
            "minimum_sparsity": 1.0,
            "optimize_bound_args": {
                "iteration": STEPS,
                "lr_alpha": RATE,
                # slopes of intermediate layers are optimised too; the option was renamed in 0.4
                "fix_intermediate_layer_bounds": False,
                "fix_interm_bounds": False,
                # stop as soon as every margin is verified
                "stop_criterion_func": lambda bounds: (bounds > 0).all(-1, keepdim=True),
            },
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.bounded = BoundedModule(
                model, torch.zeros_like(example), bound_opts=options, device="cpu"
            )

    def radius(self, x: Tensor, label: int, classes: int, norm: float, guess: float) -> float:
        """The largest radius at which α-CROWN verifies every margin.

        Args:
            x: a batch of one input.
            label: its class.
            classes: number of classes.
            norm: order of the ball, 2 or infinity.
            guess: where the search begins.
        """
        rivals = [k for k in range(classes) if k != label]
        eye = torch.eye(classes)
        rows = (eye[label] - eye[rivals])[None]

        def holds(method: str) -> Callable[[float], bool]:
            return lambda radius: bool((self._bounds(x, rows, norm, radius, method) > 0).all())

        plain = largest(holds("CROWN"), guess, math.inf)
        return largest(holds("CROWN-Optimized"), plain, math.inf)

    def _bounds(self, x: Tensor, rows: Tensor, norm: float, radius: float, method: str) -> Tensor:
        from auto_LiRPA import BoundedTensor
        from auto_LiRPA.perturbations import PerturbationLpNorm

        ball: Any = BoundedTensor(x, PerturbationLpNorm(norm=norm, eps=radius))
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            bounds = self.bounded.compute_bounds(
                x=(ball,), C=rows, method=method, bound_lower=True, bound_upper=False
            )
        lower: Tensor = bounds[0].detach()
        return lower


def rows(images: int = 20) -> list[dict[str, object]]:
    """Two rows per network, or none without `auto_LiRPA`.

    Args:
        images: of each network.
    """
    if not is_available():
        return []
    return [row for subject in subjects() for row in compare(subject, images)]


def compare(subject: Subject, images: int) -> list[dict[str, object]]:
    """One row per norm: ratios of our radius to that of α-CROWN, and processor time an image.

    Args:
        subject: the network with its images.
        images: the first ones that are classified as labelled.
    """
    right = (subject.model(subject.x).argmax(1) == subject.y).nonzero().flatten()[:images]
    x, y = subject.x[right], subject.y[right]
    peer = AlphaCrown(subject.model, x[:1])
    found: list[dict[str, object]] = []
    for norm, order, guess in (("l2", 2.0, 0.1), ("linf", math.inf, 0.01)):
        radii = eq.certified_radius(subject.model, x, y, norm=norm)  # type: ignore[arg-type]
        began = time.process_time()
        classes = subject.model(x[:1]).shape[1]
        theirs = [
            peer.radius(x[n : n + 1], int(y[n]), classes, order, guess) for n in range(len(x))
        ]
        spent = time.process_time() - began
        ratios = [a / b for a, b in zip(radii.radius.tolist(), theirs, strict=True)]
        found.append(
            {
                "network": subject.name,
                "norm": norm,
                "images": len(x),
                "equipoise": round(statistics.geometric_mean(radii.radius.tolist()), 5),
                "α-CROWN": round(statistics.geometric_mean(theirs), 5),
                "ratio": round(statistics.geometric_mean(ratios), 3),
                "smallest ratio": round(min(ratios), 3),
                "seconds an image": round(sum(radii.seconds) / len(x), 2),
                "of α-CROWN": round(spent / len(x), 2),
            }
        )
    return found
