"""What regularisation, the guard and the proved penalty cost a training step, and what the explicit gradient saves."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equipoise.functional import gram_norm
from equipoise.norms.gram import gram_norm_plain
from equipoise.optim import SpectralGuard
from equipoise.regularizers import ActivationDecay, SpectralPenalty
from equipoise_lab.bench.norms import Goal, Layer, Row, Section, gradient_memory
from equipoise_lab.bench.norms import resnet18 as resnet18_layers
from equipoise_lab.models import lipschitz_gpt, resnet18
from equipoise_lab.timing import peak_bytes, take_turns


class Step:
    """One training step on a fixed batch: forward, loss and an extra term, backward, SGD with momentum."""

    def __init__(
        self,
        width: int,
        x: Tensor,
        y: Tensor,
        term: Callable[[nn.Module], Callable[[], Any]] | None,
    ) -> None:
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


def training_step(
    width: int = 64, batch: int = 64, repeats: int = 5, size: int = 32, gram: bool = True
) -> Section:
    """A step with spectral regularisation of all convolutions, or with activation decay, over the plain step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, size, size, generator=generator)
    y = torch.randint(10, (batch,), generator=generator)
    spectral = partial(
        SpectralPenalty, kind="squares", only=nn.Conv2d, weight=1e-4, input_size=size
    )
    terms: dict[str, Callable[[nn.Module], Callable[[], Any]] | None] = {
        "plain": None,
        "plain, again": None,
        "activation decay": partial(ActivationDecay, sigma=0.1),
        "spectral, tracked": spectral,
    }
    if gram:
        terms["spectral, gram bound"] = partial(spectral, bound="gram", iterations=4)
    steps = {name: Step(width, x, y, term) for name, term in terms.items()}
    for step in steps.values():
        step()  # allocate and warm up
    contest = take_turns(steps, repeats)
    rows: list[Row] = [
        {"step": name, "seconds": contest.seconds[name], "ratio": contest.ratio(name, "plain")}
        for name in steps
    ]
    own = 1 + decay_seconds(batch, 8 * width) / contest.seconds["plain"]
    rows.append(
        {
            "step": "plain + work of activation decay",
            "seconds": own * contest.seconds["plain"],
            "ratio": own,
        }
    )
    goals = [
        Goal(
            "step with spectral regularisation / plain step",
            contest.ratio("spectral, tracked", "plain"),
            1.3,
        ),
        Goal("step with activation decay / plain step", own, 1.01),
    ]
    note = (
        "median seconds; all 20 convolutions regularised on the sizes they see. tracked: a lower bound that follows the norm, "
        "brackets proved on demand; gram: an upper bound at every step. "
        "The second plain step shows the noise, which hides activation decay: its own work is timed apart"
    )
    return Section(
        f"one step of a ResNet-18 of width {width}, {size}×{size}, batch {batch}", rows, goals, note
    )


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


def explicit_memory(
    layers: tuple[Layer, ...], shapes: tuple[tuple[int, int], ...], iterations: int = 6
) -> Section:
    """Peak memory of value and gradient of the bound: explicit against autodiff through the iterations, t = 6."""
    memory = gradient_memory(layers)
    rows: list[Row] = [
        {key: row[key] for key in ("layer", "explicit MB", "autodiff MB", "ratio")}
        for row in memory.rows
    ]
    for m, n in shapes:
        W = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
        ours = peak_bytes(lambda W=W: gram_norm(W, iterations).backward())  # type: ignore[misc]
        W.grad = None
        auto = peak_bytes(lambda W=W: gram_norm_plain(W, iterations).backward())  # type: ignore[misc]
        rows.append(
            {
                "layer": f"matrix {m}×{n}",
                "explicit MB": ours / 1e6,
                "autodiff MB": auto / 1e6,
                "ratio": ours / auto,
            }
        )
    worst = max(row["ratio"] for row in memory.rows)
    goals = [Goal("explicit / autodiff, worst convolution", worst, 0.5)]
    return Section("memory of the gradient, t = 6", rows, goals, memory.note)


def sections(quick: bool = False, repeats: int = 5) -> Iterator[Section]:
    """All sections; `quick` is a tiny subset that only shows that everything runs."""
    if quick:  # the goals speak of real sizes
        yield replace(training_step(width=4, batch=4, repeats=1, size=16), goals=[])
        yield replace(explicit_memory((Layer("tiny", 8, 8, 3, 1, 8),), ((40, 30),)), goals=[])
        yield replace(
            control_step(steps=1, width=32, depth=1, batch=1, channels=1, pictures=2, size=8),
            goals=[],
        )
        return
    yield training_step(repeats=repeats)
    yield control_step(steps=2 * repeats)
    layers = ("layer1.0.conv1", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2")
    yield explicit_memory(
        tuple(x for x in resnet18_layers() if x.name in layers), ((512, 4608), (1024, 1024))
    )


@dataclass(frozen=True)
class Case:
    """A model with its batch, its optimizer and the radius of its layers."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    optimizer: torch.optim.Optimizer
    control: Callable[[nn.Module], Any]
    penalty: bool = False

    def run(self, steps: int, warm: int) -> Row:
        """Processor seconds of a plain step and of what the control adds, step by step in turns; the first are left out."""
        control = self.control(self.model)
        plain = added = 0.0
        for i in range(warm + steps):
            self.optimizer.zero_grad(set_to_none=True)
            start = time.process_time()
            logits = self.model(self.x)
            cross_entropy(logits.flatten(0, -2), self.y.flatten()).backward()
            if not self.penalty:
                self.optimizer.step()
            middle = time.process_time()
            if self.penalty:
                control().backward()
            else:
                control.step()
            end = time.process_time()
            if self.penalty:
                self.optimizer.step()
            last = time.process_time()
            if i >= warm:
                plain, added = plain + (middle - start) + (last - end), added + end - middle
        return {
            "step": self.name,
            "plain s": plain / steps,
            "added s": added / steps,
            "ratio": 1 + added / plain,
            "held at": max(b.upper for b in control.bounds().values())
            if not self.penalty
            else None,
        }


def gpt(width: int, depth: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A character model, random text, and what follows."""
    torch.manual_seed(0)
    text = torch.randint(65, (batch, tokens + 1))
    model = lipschitz_gpt(
        context=tokens, width=width, depth=depth, heads=max(1, width // 32), constant=None
    )
    return model, text[:, :-1], text[:, 1:]


def images(width: int, batch: int, size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet-18 and random images."""
    torch.manual_seed(0)
    return resnet18(width=width), torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def control_step(
    steps: int = 10,
    width: int = 256,
    depth: int = 4,
    batch: int = 16,
    channels: int = 64,
    pictures: int = 64,
    size: int = 32,
) -> Section:
    """A step under guard, and with the proved penalty, over the plain step."""
    cases = []
    guard = partial(SpectralGuard, radius=1.0, only=nn.Linear)
    for lr in (3e-4, 3e-3):
        model, x, y = gpt(width, depth, 128, batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        cases.append(
            Case(f"GPT {depth}×{width}, guard, AdamW {lr:g}", model, x, y, optimizer, guard)
        )
    model, x, y = gpt(width, depth, 128, batch)
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    muon = torch.optim.Muon(matrices, lr=0.02)
    cases.append(Case(f"GPT {depth}×{width}, guard, Muon 0.02", model, x, y, muon, guard))
    model, x, y = gpt(width, depth, 128, batch)
    term = partial(SpectralPenalty, kind="hinge", only=nn.Linear, weight=1e-3, bound="proved")
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4)
    cases.append(
        Case(f"GPT {depth}×{width}, proved penalty", model, x, y, adam, term, penalty=True)
    )
    for every in (1, 10):
        net, u, v = images(channels, pictures, size)
        sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        hold = partial(SpectralGuard, radius=1.0, input_size=size, every=every)
        cases.append(Case(f"ResNet-18, guard, every={every}", net, u, v, sgd, hold))
    net, u, v = images(channels, pictures, size)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    spectral = partial(
        SpectralPenalty,
        kind="squares",
        only=nn.Conv2d,
        weight=1e-4,
        input_size=size,
        bound="proved",
        rtol=0.05,
    )
    cases.append(Case("ResNet-18, proved penalty", net, u, v, sgd, spectral, penalty=True))
    rows = [case.run(steps, warm=2) for case in cases]
    ratios = {str(row["step"]): float(row["ratio"]) for row in rows}
    goals = [
        Goal("small GPT under guard / plain step", ratios[cases[0].name], 1.05),
        Goal("small GPT with the proved penalty / plain step", ratios[cases[3].name], 1.3),
        Goal("ResNet-18 under guard / plain step", ratios["ResNet-18, guard, every=10"], 1.05),
        Goal(
            "ResNet-18 with the proved penalty / plain step",
            ratios["ResNet-18, proved penalty"],
            1.3,
        ),
    ]
    note = (
        "processor seconds in one run, the control timed apart in every step; all layers start above the radius and are held at "
        "1.001, proved after every step. every=10: new proofs every tenth step only"
    )
    return Section(
        f"spectral control: batch {batch}×128 and {pictures} pictures of {size}×{size}",
        rows,
        goals,
        note,
    )
