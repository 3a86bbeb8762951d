"""Bundles of dense networks of the shapes of the certifier verified in Dafny (Tobler et al., CAV 2025), checked in integers.

Their networks have no biases; norms are bounded by Gram iteration in exact rational numbers, and radii follow from the
constants of pairs of logits. The same rule in float64 stands beside the checker's verdicts here.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq
from equipoise_lab.bench import data_file

BATCH = 256


@dataclass(frozen=True)
class Shape:
    """A published network: its hidden layers, the iterations for its norms, and the seconds they took."""

    hidden: tuple[int, ...]
    iterations: int
    published: float


SHAPES = (Shape((128,) * 8, 11, 1005.0), Shape((256, *(128,) * 11), 12, 1186.0))


def images(split: str) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST as vectors in [0, 1], and its labels."""
    with np.load(data_file("fashion_mnist.npz")) as stored:
        x = torch.from_numpy(stored[f"x_{split}"]).float()
        y = torch.from_numpy(stored[f"y_{split}"]).long()
    return x.reshape(len(x), -1) / 255, y


def pair_norms(last: Tensor, labels: Tensor) -> Tensor:
    """`‖w_y − w_j‖` for labels y (rows) and all classes j (columns); 0 for the label itself."""
    squares = (last[None] - last[labels][:, None]).square().sum(-1)
    mine = functional.one_hot(labels, len(last)).bool()
    return squares.clamp_min(1e-12).sqrt().masked_fill(mine, 0.0)


def train(
    sizes: tuple[int, ...], x: Tensor, y: Tensor, *, epsilon: float, epochs: int, seed: int = 0
) -> nn.Sequential:
    """A dense ReLU network without biases, trained with margins of epsilon times its Lipschitz constant.

    Args:
        sizes: features of the input and of every layer.
        x: training images.
        y: their labels.
        epsilon: radius of the margins; it is reached after half of the epochs.
        epochs: passes over the images.
        seed: of the initial weights and of the order of the images.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layer = nn.Linear(n, m, bias=False)
        nn.init.orthogonal_(layer.weight, 1.4 if m != sizes[-1] else 1.0)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    weights = list(model.parameters())
    vectors = [torch.randn(weight.shape[1]) for weight in weights[:-1]]
    optimizer = torch.optim.Adam(weights, 1e-3)
    steps = len(x) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * steps)
    for epoch in range(epochs):
        margin = epsilon * min(1.0, 2 * (epoch + 1) / epochs)
        for some in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            constant = torch.ones(())
            for index, weight in enumerate(weights[:-1]):
                # power iteration, carried from step to step: an estimate, which training needs only
                with torch.no_grad():
                    v = weight.T @ (weight @ vectors[index])
                    vectors[index] = v / v.norm()
                constant = constant * (weight @ vectors[index]).norm()
            raised = margin * constant * pair_norms(weights[-1], y[some])
            loss = functional.cross_entropy(model(x[some]) + raised, y[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def gram_norm(weight: Tensor, iterations: int) -> Tensor:
    """`‖G_n‖_F^(1/2ⁿ)`, the bound of Gram iteration in float64, which its rounding may violate."""
    gram = weight.double()
    logarithm = torch.zeros((), dtype=torch.float64)
    for _ in range(iterations):
        scale = gram.norm()
        logarithm = 2 * (logarithm + scale.log())
        gram = gram.T @ gram / scale.square()
    return ((logarithm + gram.norm().log()) / 2**iterations).exp()


def gram_certified(
    model: nn.Sequential, x: Tensor, y: Tensor, epsilon: float, iterations: int
) -> int:
    """Images that the rule of the verified certifier calls right and robust, evaluated in float64.

    Args:
        model: layers without biases.
        x: images.
        y: their labels.
        epsilon: radius.
        iterations: of the Gram iteration.
    """
    *hidden, last = [parameter.detach().double() for parameter in model.parameters()]
    constant = torch.stack([gram_norm(weight, iterations) for weight in hidden]).prod()
    logits = x.double()
    for weight in hidden:
        logits = (logits @ weight.T).relu()
    logits = logits @ last.T
    margins = logits.gather(1, y[:, None]) - logits - epsilon * constant * pair_norms(last, y)
    others = ~functional.one_hot(y, len(last)).bool()
    return int((margins[others].reshape(len(y), -1) > 0).all(1).sum())


def rows(count: int = 1000, epochs: int = 60, epsilon: float = 0.25) -> list[dict[str, object]]:
    """One row per shape.

    Args:
        count: test images that are certified.
        epochs: of training, 2 to 3 seconds each.
        epsilon: certified l2 radius.
    """
    x, y = images("train")
    test_x, test_y = (part[:count] for part in images("test"))
    table = []
    for shape in SHAPES:
        model = train((784, *shape.hidden, 10), x, y, epsilon=epsilon, epochs=epochs)
        right = model(test_x).argmax(1) == test_y
        broken = eq.attacks.pgd(model, test_x, test_y, epsilon=epsilon, steps=50).success
        seconds = []
        with tempfile.TemporaryDirectory() as folder:
            # one image: the time of the norms
            for number, some in enumerate((test_x[:1], test_x)):
                bundle = Path(folder, str(number))
                claims = eq.certificates.write(
                    model, some, test_y[: len(some)], bundle, epsilons=[epsilon]
                )
                began = time.process_time()
                eq.certificates.check(bundle, exact=True)
                seconds.append(time.process_time() - began)
        (certified,) = claims["radii"]["certified"].values()
        table.append(
            {
                "hidden layers": "-".join(map(str, shape.hidden)),
                "right": int(right.sum()),
                f"checked at {epsilon}": certified,
                "Gram iteration": gram_certified(model, test_x, test_y, epsilon, shape.iterations),
                "not broken": int((right & ~broken).sum()),
                "norms, s": round(seconds[0], 1),
                "all, s": round(seconds[1], 1),
                "published norms, s": shape.published,
            }
        )
    return table
