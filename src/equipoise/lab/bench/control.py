"""What spectral control costs a training step: the guard and the proved penalty, in processor time of one and the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equipoise.lab.bench.norms import Goal, Row, Section
from equipoise.nn.models import lipschitz_gpt
from equipoise.nn.models.resnets import resnet18
from equipoise.optim import SpectralGuard
from equipoise.regularizers import SpectralPenalty


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
            "held at": max(b.upper for b in control.bounds().values()) if not self.penalty else None,
        }


def gpt(width: int, depth: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A character model, random text, and what follows."""
    torch.manual_seed(0)
    text = torch.randint(65, (batch, tokens + 1))
    model = lipschitz_gpt(context=tokens, width=width, depth=depth, heads=max(1, width // 32), constant=None)
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
        cases.append(Case(f"GPT {depth}×{width}, guard, AdamW {lr:g}", model, x, y, optimizer, guard))
    model, x, y = gpt(width, depth, 128, batch)
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    muon = torch.optim.Muon(matrices, lr=0.02)
    cases.append(Case(f"GPT {depth}×{width}, guard, Muon 0.02", model, x, y, muon, guard))
    model, x, y = gpt(width, depth, 128, batch)
    term = partial(SpectralPenalty, kind="hinge", only=nn.Linear, weight=1e-3, bound="proved")
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4)
    cases.append(Case(f"GPT {depth}×{width}, proved penalty", model, x, y, adam, term, penalty=True))
    for every in (1, 10):
        net, u, v = images(channels, pictures, size)
        sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        hold = partial(SpectralGuard, radius=1.0, input_size=size, every=every)
        cases.append(Case(f"ResNet-18, guard, every={every}", net, u, v, sgd, hold))
    net, u, v = images(channels, pictures, size)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    spectral = partial(
        SpectralPenalty, kind="squares", only=nn.Conv2d, weight=1e-4, input_size=size, bound="proved", rtol=0.05
    )
    cases.append(Case("ResNet-18, proved penalty", net, u, v, sgd, spectral, penalty=True))
    rows = [case.run(steps, warm=2) for case in cases]
    ratios = {str(row["step"]): float(row["ratio"]) for row in rows}
    goals = [
        Goal("small GPT under guard / plain step", ratios[cases[0].name], 1.05),
        Goal("small GPT with the proved penalty / plain step", ratios[cases[3].name], 1.3),
        Goal("ResNet-18 under guard / plain step", ratios["ResNet-18, guard, every=10"], 1.05),
        Goal("ResNet-18 with the proved penalty / plain step", ratios["ResNet-18, proved penalty"], 1.3),
    ]
    note = (
        "processor seconds in one run, the control timed apart in every step; all layers start above the radius and are held at "
        "1.001, proved after every step. every=10: new proofs every tenth step only"
    )
    return Section(f"spectral control: batch {batch}×128 and {pictures} pictures of {size}×{size}", rows, goals, note)
