"""`equipoise bench states OTHER`: this checkout against another one, case by case in turns, in one run.

Each state has a process of its own that imports the library from its own `src`; this file is also what those processes
run, so it uses only public names that both states have.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _cases() -> dict[str, Callable[[], Callable[[], Any]]]:
    """What is timed: by name, a function that prepares a case and returns the work of one round."""
    import torch
    from torch import nn

    import equipoise as eq

    def matrix(m: int, n: int) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            W = torch.randn(m, n)
            return lambda: eq.spectral_norm(W, rtol=1e-4)

        return make

    def convolution(channels: int, size: int, **options: Any) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            conv = nn.Conv2d(channels, channels, 3, padding=1, **options)
            return lambda: eq.spectral_norm(conv, input_size=(size, size), rtol=1e-3)

        return make

    def layer(build: Callable[[], nn.Module], *shape: int) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            module, x = build(), torch.randn(*shape)

            def step() -> None:
                module.zero_grad()
                module(x).square().mean().backward()

            return step

        return make

    def guard(
        build: Callable[[], nn.Module], size: tuple[int, ...] | None, move: float
    ) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            net = build()
            held = eq.optim.SpectralGuard(net, radius=1.0, how="cap", input_size=size)
            held.step()
            moves = [p for p in net.parameters() if p.ndim > 1]

            def step() -> None:
                with torch.no_grad():
                    for p in moves:
                        p.add_(torch.randn_like(p), alpha=move * float(p.norm()) / p.numel() ** 0.5)
                held.step()

            return step

        return make

    def audit(build: Callable[[], nn.Module], *shape: int) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = torch.rand(1, *shape)
            # new weights: no round profits from the last
            return lambda: eq.lipschitz_bound(build().eval(), x, rtol=0.05)

        return make

    class Residual(nn.Module):
        def __init__(self, branch: nn.Module, skip: nn.Module) -> None:
            super().__init__()
            self.branch, self.skip = branch, skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.branch(x) + self.skip(x))

    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def cnn() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 10),
        )  # fmt: skip

    def resnet() -> nn.Module:
        def block(inside: int, outside: int, stride: int) -> nn.Module:
            return Residual(
                nn.Sequential(
                    nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                    nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
                ),
                nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity(),
            )  # fmt: skip

        widths = [32, 32, 64, 64, 128, 128, 256, 256]
        blocks = [
            block(inside, outside, outside // inside)
            for inside, outside in zip([32, *widths], widths, strict=False)
        ]
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), *blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
        )  # fmt: skip

    def wide() -> nn.Module:
        return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1))

    def radius() -> Callable[[], Any]:
        net = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        x = torch.rand(16, 64)
        return lambda: eq.certified_radius(net.eval(), x)

    def certify() -> Callable[[], Any]:
        classifier = eq.smoothing.SmoothedClassifier(mlp().eval(), num_classes=10, sigma=0.25)
        x = torch.rand(4, 784)
        return lambda: classifier.certify(x, n0=100, n=10_000)

    return {
        "spectral_norm, 64×64": matrix(64, 64),
        "spectral_norm, 256×256": matrix(256, 256),
        "spectral_norm, 512×512": matrix(512, 512),
        "spectral_norm, 1000×1000": matrix(1000, 1000),
        "spectral_norm, 4096×256": matrix(4096, 256),
        "spectral_norm, conv 16 channels, 32²": convolution(16, 32),
        "spectral_norm, conv 64 channels, 32²": convolution(64, 32),
        "spectral_norm, conv 256 channels, 16²": convolution(256, 16),
        "spectral_norm, conv 64 channels, 32², stride 2": convolution(64, 32, stride=2),
        "spectral_norm, conv 64 channels, 32², circular": convolution(64, 32, padding_mode="circular"),
        "SRLinear(512, 512), step": layer(lambda: eq.nn.SRLinear(512, 512), 256, 512),
        "AOLConv2d(64, 64), step": layer(lambda: eq.nn.AOLConv2d(64, 64, 3, padding=1), 32, 64, 16, 16),
        "CayleyLinear(256, 256), step": layer(lambda: eq.nn.CayleyLinear(256, 256), 256, 256),
        "BCOPConv2d(64, 64), step": layer(lambda: eq.nn.BCOPConv2d(64, 64, 3), 32, 64, 16, 16),
        "SLLConv2d(32), step": layer(lambda: eq.nn.SLLConv2d(32, 32, 3), 32, 32, 16, 16),
        "SpectralGuard, mlp, steps of 1 %": guard(mlp, None, 1e-2),
        "SpectralGuard, mlp, steps of 0.1 %": guard(mlp, None, 1e-3),
        "SpectralGuard, conv 64 channels, 32², steps of 1 %": guard(wide, (32, 32), 1e-2),
        "SpectralGuard, conv 64 channels, 32², steps of 0.1 %": guard(wide, (32, 32), 1e-3),
        "lipschitz_bound, mlp": audit(mlp, 784),
        "lipschitz_bound, cnn": audit(cnn, 3, 32, 32),
        "lipschitz_bound, ResNet-18, 32²": audit(resnet, 3, 32, 32),
        "certified_radius, 64-64-64-10, 16 inputs": radius,
        "certify, mlp, 4 × 10,000 draws": certify,
    }  # fmt: skip


def _serve() -> None:
    """Answer `name rounds` on standard input with the processor seconds and the wall seconds of each round."""
    import torch

    cases = _cases()
    sys.stdout.write(json.dumps(list(cases)) + "\n")
    sys.stdout.flush()
    works: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        name = json.loads(line)
        try:
            if name not in works:
                torch.manual_seed(0)
                works = {name: cases[name]()}
                works[name]()
            begin, wall = time.process_time(), time.perf_counter()
            works[name]()
            answer: Any = [time.process_time() - begin, time.perf_counter() - wall]
        except Exception as error:  # noqa: BLE001 (a state without this case says so)
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def compare(other: Path, here: Path, rounds: int, only: str) -> list[dict[str, Any]]:
    """Processor seconds of every case in both states, and the median of the ratios new / old.

    Args:
        other: a checkout of the other state (the folder that holds `src`).
        here: the checkout of this state.
        rounds: rounds in which the two states take turns.
        only: part of a case's name.
    """
    states = {}
    for name, folder in (("old", other), ("new", here)):
        path = os.pathsep.join([str(folder / "src"), *sys.path])
        states[name] = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(name: str, case: str | None) -> Any:
        process = states[name]
        assert process.stdin is not None
        assert process.stdout is not None
        if case is not None:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline())

    rows = []
    try:
        answer("old", None)
        for case in answer("new", None):
            if only not in case:
                continue
            pairs = []
            for number in range(rounds):
                order = ("old", "new") if number % 2 == 0 else ("new", "old")
                taken = {name: answer(name, case) for name in order}
                pairs.append((taken["old"], taken["new"]))
            refused = [a for pair in pairs for a in pair if isinstance(a, str)]
            if refused:
                rows.append({"case": case, "old (ms)": "", "new (ms)": "", "ratio": refused[0]})
                continue
            old, new = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
            ratio = statistics.median(b[0] / a[0] for a, b in pairs)
            rows.append(
                {
                    "case": case,
                    "old (ms)": round(1e3 * old, 2),
                    "new (ms)": round(1e3 * new, 2),
                    "ratio": round(ratio, 2),
                }
            )
    finally:
        for process in states.values():
            process.kill()
    return rows


if __name__ == "__main__":
    _serve()
