"""What regularisation costs a training step, and what the explicit gradient saves: ratios in one run, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equipoise.core.timing import peak_bytes, take_turns
from equipoise.lab.bench.control import control_step
from equipoise.lab.bench.norms import Goal, Layer, Row, Section, gradient_memory
from equipoise.lab.bench.norms import resnet18 as resnet18_layers
from equipoise.nn.models.resnets import resnet18
from equipoise.norms.functional import gram_norm
from equipoise.norms.gram import gram_norm_plain
from equipoise.regularizers import ActivationDecay, SpectralPenalty


class Step:
    """One training step on a fixed batch: forward, loss and an extra term, backward, SGD with momentum."""

    def __init__(self, width: int, x: Tensor, y: Tensor, term: Callable[[nn.Module], Callable[[], Any]] | None) -> None:
        self.x, self.y = x, y
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = resnet18(width=width)
        self.term = term(self.model) if term is not None else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def __call__(self) -> float:
        """The loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self.model(self.x), self.y)
        if self.term is not None:
            loss = loss + self.term()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def training_step(width: int = 64, batch: int = 64, repeats: int = 5, size: int = 32, gram: bool = True) -> Section:
    """A step with spectral regularisation of all convolutions, or with activation decay, over the plain step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, size, size, generator=generator)
    y = torch.randint(10, (batch,), generator=generator)
    spectral = partial(SpectralPenalty, kind="squares", only=nn.Conv2d, weight=1e-4, input_size=size)
    terms: dict[str, Callable[[nn.Module], Callable[[], Any]] | None] = {
        "plain": None,
        "plain, again": None,
        "activation decay": partial(ActivationDecay, sigma=0.1),
        "spectral, tracked": spectral,
    }
    if gram:
        terms["spectral, gram bound"] = partial(spectral, bound="gram", iterations=4)
        terms["spectral, gram bound every 20"] = partial(spectral, bound="gram", iterations=4, every=20)
    steps = {name: Step(width, x, y, term) for name, term in terms.items()}
    for step in steps.values():
        step()  # allocate and warm up
    contest = take_turns(steps, repeats)
    rows: list[Row] = [
        {"step": name, "seconds": contest.seconds[name], "ratio": contest.ratio(name, "plain")} for name in steps
    ]
    own = 1 + decay_seconds(batch, 8 * width) / contest.seconds["plain"]
    rows.append({"step": "plain + work of activation decay", "seconds": own * contest.seconds["plain"], "ratio": own})
    goals = [
        Goal("step with spectral regularisation / plain step", contest.ratio("spectral, tracked", "plain"), 1.3),
        Goal("step with activation decay / plain step", own, 1.01),
    ]
    note = (
        "median seconds; all 20 convolutions regularised on the sizes they see. tracked: a lower bound that follows the norm, "
        "brackets proved on demand; gram: an upper bound at every step (every 20: its direction is kept in between). "
        "The second plain step shows the noise, which hides activation decay: its own work is timed apart"
    )
    return Section(f"one step of a ResNet-18 of width {width}, {size}×{size}, batch {batch}", rows, goals, note)


def decay_seconds(batch: int, features: int, classes: int = 10, repeats: int = 9) -> float:
    """Seconds that activation decay adds to a step: its value and gradient on the last layer (whose own pass is counted too)."""
    head = nn.Linear(features, classes)
    decay = ActivationDecay(head, sigma=0.1)
    h = torch.randn(batch, features, requires_grad=True)

    def work() -> None:
        head(h)
        decay().backward()

    work()
    return take_turns({"decay": work}, repeats).seconds["decay"]


def explicit_memory(layers: tuple[Layer, ...], shapes: tuple[tuple[int, int], ...], iterations: int = 6) -> Section:
    """Peak memory of value and gradient of the bound: explicit against autodiff through the iterations, t = 6."""
    found = gradient_memory(layers)
    rows: list[Row] = [
        {key: row[key] for key in ("layer", "explicit MB", "autodiff MB", "ratio")} for row in found.rows
    ]
    for m, n in shapes:
        W = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
        ours = peak_bytes(lambda W=W: gram_norm(W, iterations).backward())  # type: ignore[misc]
        W.grad = None
        auto = peak_bytes(lambda W=W: gram_norm_plain(W, iterations).backward())  # type: ignore[misc]
        rows.append(
            {"layer": f"matrix {m}×{n}", "explicit MB": ours / 1e6, "autodiff MB": auto / 1e6, "ratio": ours / auto}
        )
    worst = max(row["ratio"] for row in found.rows)
    goals = [Goal("explicit / autodiff, worst convolution", worst, 0.5)]
    return Section("memory of the gradient, t = 6", rows, goals, found.note)


def sections(quick: bool = False, repeats: int = 5) -> Iterator[Section]:
    """All sections; `quick` is a tiny subset that only shows that everything runs."""
    if quick:  # the goals speak of real sizes
        yield replace(training_step(width=4, batch=4, repeats=1, size=16), goals=[])
        yield replace(explicit_memory((Layer("tiny", 8, 8, 3, 1, 8),), ((40, 30),)), goals=[])
        yield replace(control_step(steps=1, width=32, depth=1, batch=1, channels=1, pictures=2, size=8), goals=[])
        return
    yield training_step(repeats=repeats)
    yield control_step(steps=2 * repeats)
    chosen = ("layer1.0.conv1", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2")
    yield explicit_memory(tuple(x for x in resnet18_layers() if x.name in chosen), ((512, 4608), (1024, 1024)))
