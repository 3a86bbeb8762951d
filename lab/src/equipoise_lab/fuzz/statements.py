"""The vocabulary of random programs: one row per way to write an operation, and how to choose its settings.

A row is tried on a live tensor; what PyTorch refuses is not written down. `expression` rows bind a new name; `in place` rows
change a tensor, or write through a view of it.
"""

import math
import random

from torch import Tensor

from equipoise_lab.fuzz import vocabulary
from equipoise_lab.fuzz.layers import LAYERS
from equipoise_lab.fuzz.programs import Program
from equipoise_lab.fuzz.writing import MOST, Bench, Row, in_float32


def _lines(text: str, weight: float, in_place: bool = False, bounded: bool = False) -> list[Row]:
    """A row per line of the vocabulary; together they weigh `weight`."""
    formats = text.split("\n")[1:-1]

    def row(line: str) -> Row:
        def make(b: Bench, v: str, t: Tensor) -> str | None:
            w = b.other(t) if "{w}" in line else v
            if "{w}" in line and (w is None or (in_place and w == v)):
                return None
            return line.format(v=v, w=w, c=b.number(), p=in_float32(b.rng.uniform(0.1, 2.0)))

        return Row(make, weight=weight / len(formats), in_place=in_place, bounded=bounded)

    return [row(line) for line in formats]


def _masked(b: Bench, v: str, t: Tensor) -> str:
    mask = f"torch.tensor({[b.rng.random() < 0.5 for _ in range(t.shape[-1])]})"
    w = b.other(t) or v
    return b.choose(
        f"torch.where({mask}, {v}, {w})", f"torch.where({mask}, {v}, {b.number()})", f"{v}.masked_fill({mask}, {b.number()})",
        f"torch.where({mask}, {b.number()}, {v})", f"{v}.masked_fill({mask}, torch.tensor(0.25))"
    )  # fmt: skip


def _shift(b: Bench, v: str, t: Tensor) -> str:
    """Arithmetic with parameters as they are stored: what is computed from them rounds in the program's type."""
    shape = b.choose(
        t.shape[-1:], t.shape, (1,), t.shape[:1] + (1,) * (t.dim() - 1), (2, *t.shape[1:])
    )
    c, above = b.constant(shape), b.constant(shape, "positive")
    return b.choose(
        f"{v} + {c}", f"{c} - {v}", f"{v} * {c}", f"{v} / {above}", f"{b.number()} - {v}", f"{v} * {b.number()}",
        f"torch.clamp({v}, {c}, {c} + 1)", f"torch.maximum({v}, {c})", f"torch.rsub({v}, {c}, alpha={b.number()})",
        f"torch.add({c}, {v}, alpha={b.number()})",
    )  # fmt: skip


def expressions() -> tuple[Row, ...]:
    """Every row of the vocabulary."""
    return (
        *_lines(vocabulary.ACTIVATIONS, 9),
        *_lines(vocabulary.SHAPES, 5),
        *_lines(vocabulary.REDUCTIONS, 3),
        *_lines(vocabulary.INDEXED, 5),
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


def random_program(
    rng: random.Random, rows: tuple[Row, ...] | None = None, longest: int = 9
) -> Program:
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
        tuple(bench.setup),
        tuple(bench.body),
        _returned(bench),
        bench.inputs,
        dtype,
        tuple(sorted(bench.scales)),
        ball,
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
