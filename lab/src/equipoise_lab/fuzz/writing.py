"""A program being written: live values tell which statements PyTorch takes; a row is one way to write an operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise_lab.fuzz.programs import Statement, namespace

T = TypeVar("T")

#: no tensor of a program has more entries
MOST = 160
EXTREMES = (1e-30, 1e30, 1e-10, 1e10, 1e-3, 1e3)


def in_float32(value: float) -> float:
    """A number that float32 holds: a float64 copy of a program then computes with the same one.

    >>> in_float32(0.1) == 0.1, in_float32(0.25)
    (False, 0.25)
    """
    return (
        float(torch.tensor(round(value, 2), dtype=torch.float32))
        if abs(value) >= 0.01
        else float(torch.tensor(value, dtype=torch.float32))
    )


class Bench:
    """A program being written: its names with live float64 values, and the parameters it has so far."""

    def __init__(self, rng: random.Random, inputs: tuple[tuple[int, ...], ...], dtype: str) -> None:
        self.rng, self.inputs, self.dtype = rng, inputs, dtype
        self.space = namespace()
        self.setup: list[str] = []
        self.body: list[Statement] = []
        self.scales: set[float] = {1.0}
        g = torch.Generator().manual_seed(rng.randrange(2**30))
        self.live: dict[str, Tensor] = {
            f"x{i}": torch.randn(s, generator=g, dtype=torch.float64) for i, s in enumerate(inputs)
        }
        self.space["self"] = torch.nn.Module()

    def choose(self, *options: T) -> T:
        """One of the options."""
        return self.rng.choice(options)

    def scale(self) -> float:
        """1, or now and then a factor far from it."""
        if self.rng.random() < 0.92:
            return self.choose(1.0, 1.0, 0.5, 2.0)
        value = self.choose(*EXTREMES)
        self.scales |= {value, 1 / value}
        return value

    def seed(self) -> int:
        """A seed for parameters."""
        return self.rng.randrange(10**6)

    def kind(self) -> str:
        """How parameters are drawn."""
        return self.choose("gaussian", "gaussian", "positive", "signs", "sparse")

    def module(self, text: str) -> str:
        """A module with parameters of its own; the name by which `forward` calls it."""
        return self._keep("m", f"fill({text}, {self.seed()}, {self.kind()!r}, {self.scale()!r})")

    def constant(
        self, shape: Iterable[int], kind: str | None = None, scale: float | None = None
    ) -> str:
        """A parameter of the shape."""
        size = self.scale() if scale is None else scale
        values = f"noise({tuple(shape)}, {self.seed()}, {kind or self.kind()!r}, {size!r})"
        return self._keep("p", f"nn.Parameter({values})")

    def _keep(self, letter: str, text: str) -> str:
        name = f"{letter}{len(self.setup)}"
        exec(f"self.{name} = {text}", self.space)
        self.setup.append(f"{name} = {text}")
        return f"self.{name}"

    def number(self) -> float:
        """A factor."""
        return in_float32(
            self.rng.uniform(-2.5, 2.5) * (1.0 if self.rng.random() < 0.95 else self.scale())
        )

    def other(self, t: Tensor) -> str | None:
        """The name of another tensor of the same shape."""
        names = [n for n, o in self.live.items() if o.shape == t.shape]
        return self.rng.choice(names) if names else None

    def write(self, row: Row, name: str) -> bool:
        """Try a row on a name; true if it became a statement."""
        kept = len(self.setup)
        before = {n: t.clone() for n, t in self.live.items()}
        try:
            text = row.make(self, name, self.live[name])
            if text is None:
                return False
            target = None if row.in_place else f"v{len(self.body)}"
            line = text if target is None else f"{target} = {text}"
            local = dict(self.live)
            with torch.no_grad():
                exec(line, self.space, local)  # one scope for names and one for parameters
            self._accept(line, target, name, local)
            return True
        except Exception:  # noqa: BLE001 – what PyTorch refuses is not written down
            del self.setup[kept:]
            for n, t in before.items():
                self.live[n] = t
            return False

    def _accept(self, line: str, target: str | None, name: str, local: dict[str, Any]) -> None:
        changed = local[target] if target is not None else local[name]
        if (
            not isinstance(changed, Tensor)
            or not changed.is_floating_point()
            or not 0 < changed.numel() <= MOST
        ):
            raise ValueError("not a tensor of the size wanted")
        if not all(bool(torch.isfinite(t).all()) for t in local.values() if isinstance(t, Tensor)):
            raise ValueError("not finite")
        self.live |= {n: t for n, t in local.items() if isinstance(t, Tensor)}
        self.body.append(Statement(line, target, name if target is not None else None))


@dataclass(frozen=True)
class Row:
    """One way to write an operation: for which numbers of dimensions, how often, and the text for a name and its tensor."""

    make: Callable[[Bench, str, Tensor], str | None]
    ranks: tuple[int, ...] = (1, 2, 3, 4, 5)
    weight: float = 1.0
    in_place: bool = False
    bounded: bool = field(default=False)  # needs an input ball
