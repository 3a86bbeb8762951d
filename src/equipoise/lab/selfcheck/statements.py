"""The vocabulary of random programs: one row per way to write an operation, and how to choose its settings.

A row is tried on a live tensor; what PyTorch refuses is not written down. `expression` rows bind a new name; `in place` rows
change a tensor, or write through a view of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.lab.selfcheck import vocabulary
from equipoise.lab.selfcheck.programs import Program, Statement, namespace

#: no tensor of a program has more entries
MOST = 160
EXTREMES = (1e-30, 1e30, 1e-10, 1e10, 1e-3, 1e3)


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

    def choose(self, *options: Any) -> Any:
        """One of the options."""
        return self.rng.choice(options)

    def scale(self) -> float:
        """1, or now and then a factor far from it."""
        if self.rng.random() < 0.92:
            return float(self.choose(1.0, 1.0, 0.5, 2.0))
        value = float(self.choose(*EXTREMES))
        self.scales |= {value, 1 / value}
        return value

    def seed(self) -> int:
        """A seed for parameters."""
        return self.rng.randrange(10**6)

    def kind(self) -> str:
        """How parameters are drawn."""
        return str(self.choose("gaussian", "gaussian", "positive", "signs", "sparse"))

    def module(self, text: str) -> str:
        """A module with parameters of its own; the name by which `forward` calls it."""
        return self._keep("m", f"fill({text}, {self.seed()}, {self.kind()!r}, {self.scale()!r})")

    def constant(self, shape: Iterable[int], kind: str | None = None, scale: float | None = None) -> str:
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
        return round(self.rng.uniform(-2.5, 2.5), 2) * (1.0 if self.rng.random() < 0.95 else self.scale())

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
        if not isinstance(changed, Tensor) or not changed.is_floating_point() or not 0 < changed.numel() <= MOST:
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


def _lines(text: str, weight: float, in_place: bool = False, bounded: bool = False) -> list[Row]:
    """A row per line of the vocabulary; together they weigh `weight`."""
    formats = text.split("\n")[1:-1]

    def row(line: str) -> Row:
        def make(b: Bench, v: str, t: Tensor) -> str | None:
            w = b.other(t) if "{w}" in line else v
            if "{w}" in line and (w is None or (in_place and w == v)):
                return None
            return line.format(v=v, w=w, c=b.number(), p=round(b.rng.uniform(0.1, 2.0), 2))

        return Row(make, weight=weight / len(formats), in_place=in_place, bounded=bounded)

    return [row(line) for line in formats]


def _masked(b: Bench, v: str, t: Tensor) -> str:
    mask = f"torch.tensor({[b.rng.random() < 0.5 for _ in range(t.shape[-1])]})"
    w = b.other(t) or v
    return str(
        b.choose(
            f"torch.where({mask}, {v}, {w})", f"torch.where({mask}, {v}, {b.number()})", f"{v}.masked_fill({mask}, {b.number()})",
            f"torch.where({mask}, {b.number()}, {v})", f"{v}.masked_fill({mask}, torch.tensor(0.25))"
        )
    )  # fmt: skip


def _shift(b: Bench, v: str, t: Tensor) -> str:
    """Arithmetic with parameters as they are stored: what is computed from them rounds in the program's type."""
    shape = b.choose(t.shape[-1:], t.shape, (1,), t.shape[:1] + (1,) * (t.dim() - 1), (2, *t.shape[1:]))
    c, above = b.constant(shape), b.constant(shape, "positive")
    return str(
        b.choose(
            f"{v} + {c}", f"{c} - {v}", f"{v} * {c}", f"{v} / {above}", f"{b.number()} - {v}", f"{v} * {b.number()}",
            f"torch.clamp({v}, {c}, {c} + 1)", f"torch.maximum({v}, {c})", f"torch.rsub({v}, {c}, alpha={b.number()})",
            f"torch.add({c}, {v}, alpha={b.number()})",
        )
    )  # fmt: skip


def expressions() -> tuple[Row, ...]:
    """Every row of the vocabulary."""
    from equipoise.lab.selfcheck.layers import LAYERS

    return (
        *_lines(vocabulary.ACTIVATIONS, 9),
        *_lines(vocabulary.SHAPES, 5),
        *_lines(vocabulary.REDUCTIONS, 3),
        *_lines(vocabulary.JOINS, 4),
        *_lines(vocabulary.PRODUCTS, 1.2, bounded=True),
        *_lines(vocabulary.REFUSED, 0.3),
        *_lines(vocabulary.IN_PLACE, 2.5, in_place=True),
        *_lines(vocabulary.THROUGH_VIEWS, 0.8, in_place=True),
        *_lines(vocabulary.JOINS_IN_PLACE, 2.5, in_place=True),
        Row(_masked, weight=0.6),
        Row(_shift, weight=2.5),
        *LAYERS,
    )


#: shapes of the inputs, with a batch dimension of one or with none
INPUTS = (
    ((1, 6),),
    ((1, 6),),
    ((1, 4),),
    ((6,),),
    ((5,),),
    ((1, 4, 6),),
    ((1, 3, 4),),
    ((1, 2, 4, 4),),
    ((1, 2, 4, 4),),
    ((1, 4, 3, 5),),
    ((1, 2, 6, 6),),
    ((1, 2, 2, 3, 3),),
    ((1, 4), (1, 4)),
    ((1, 3), (1, 2, 3)),
    ((1, 2, 4, 4), (1, 2, 4, 4)),
    ((1, 1, 5, 5),),
    ((4,), (4,)),
)


def random_program(rng: random.Random, rows: tuple[Row, ...] | None = None, longest: int = 9) -> Program:
    """A program of a few statements, joined so that most of what it computes reaches its outputs."""
    rows = expressions() if rows is None else rows
    dtype = rng.choice(("float32", "float64"))
    bench = Bench(rng, rng.choice(INPUTS), dtype)
    domain = rng.random() < 0.3
    allowed = [r for r in rows if domain or not r.bounded]
    wanted, tries = rng.randint(2, longest), 0
    while len(bench.body) < wanted and tries < 60:
        tries += 1
        names = list(bench.live)
        name = names[-1] if rng.random() < 0.85 else rng.choice(names)
        fitting = [r for r in allowed if bench.live[name].dim() in r.ranks]
        if not fitting:
            name = rng.choice([n for n, t in bench.live.items() if 1 <= t.dim() <= 5])
            fitting = [r for r in allowed if bench.live[name].dim() in r.ranks]
        (row,) = rng.choices(fitting, [r.weight for r in fitting])
        if row.in_place and name.startswith("x") and rng.random() < 0.9:
            continue
        bench.write(row, name)
    ball = float(rng.choice((0.5, 2.0, 10.0))) if domain else None
    return Program(
        tuple(bench.setup), tuple(bench.body), _returned(bench), bench.inputs, dtype, tuple(sorted(bench.scales)), ball
    )


def _returned(bench: Bench) -> tuple[str, ...]:
    """The last name, and sometimes one that nothing read."""
    names = [n for n in bench.live if n.startswith("v")] or ["x0"]
    last = names[-1]
    text = "\n".join(s.text for s in bench.body)
    unread = [n for n in names[:-1] if text.count(n) < 2]
    extra = bench.rng.choice(unread) if unread and bench.rng.random() < 0.4 else None
    if extra is None or math.prod(bench.live[extra].shape) > MOST:
        return (last,)
    return (last, extra)
