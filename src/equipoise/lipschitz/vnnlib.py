"""Properties in VNN-LIB: read from a file, and proved, broken or left open for a network.

A property describes what must not happen: inputs X in boxes with outputs Y that fulfil linear inequalities,

    (assert (>= X_0 0.6)) (assert (<= X_0 0.68)) … (assert (or (and (<= Y_0 Y_1) (<= Y_0 Y_2)) (and (>= Y_3 1.5))))

It holds for a network where no input of the boxes does that (`unsat`), and is violated by an input that does (`sat`). Asserted
formulas are `<=` and `>=` between sums of numbers, variables and their multiples, with `and` and `or` around them; a bound of
an X has no other variable. Decimal numbers are read as the nearest float64. A file is not trusted: its size and the number of
its cases are bounded, and anything else is refused.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import full_precision, inflate
from equipoise.lipschitz.attack import as_function
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.local.backward import Norm, enclose_ball
from equipoise.lipschitz.local.branch import Branching, Claim
from equipoise.lipschitz.local.measure import LocalBound, evaluate
from equipoise.lipschitz.local.slopes import tighten
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

#: bytes of a file, alternatives of a property, variables, nested parentheses
LARGEST, CASES, VARIABLES, DEPTH = 1 << 24, 10_000, 1 << 20, 40
#: relative gap of every operator norm
RTOL = 1e-3
Verdict = Literal["holds", "violated", "unknown"]
#: `Σ coefficients·variables ≤ 0`; the constant belongs to the variable ""
Atom = dict[str, float]


@dataclass(frozen=True)
class Box:
    """Inputs between `low` and `high`, and the cases that must not happen there: `rows·y ≤ offset`, all rows of one case."""

    low: Tensor
    high: Tensor
    cases: tuple[tuple[Tensor, Tensor], ...]


def read_vnnlib(path: str | Path) -> tuple[Box, ...]:
    """The boxes of a property file; anything but linear inequalities is refused in a sentence."""
    file = Path(path)
    try:
        if file.stat().st_size > LARGEST:
            raise InputError(f"{path} is larger than {LARGEST >> 20} MB")
        text = file.read_text("ascii", "strict")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    sizes = Counter[str]()
    choices: list[list[list[Atom]]] = []
    for command in _expressions(re.sub(";.*", "", text)):
        match command:
            case ["declare-const", str(name), "Real"] if re.fullmatch(r"[XY]_\d{1,7}", name):
                sizes[name[0]] = max(sizes[name[0]], int(name[2:]) + 1)
            case ["assert", formula]:
                choices.append(_cases(formula))
            case _:
                raise InputError(f"{path}: expected declare-const or assert, got {command!r:.60}")
    if not sizes["X"] or not sizes["Y"] or max(sizes.values()) > VARIABLES:
        raise InputError(f"{path} declares {sizes['X']} inputs X_i and {sizes['Y']} outputs Y_i")
    if math.prod(map(len, choices)) > CASES:
        raise InputError(f"{path} has more than {CASES:,} alternatives")
    boxes: dict[tuple[float, ...], Box] = {}
    for case in itertools.product(*choices):
        box = _box([atom for part in case for atom in part], sizes)
        key = (*box.low.tolist(), *box.high.tolist())
        boxes[key] = replace(box, cases=(*boxes[key].cases, *box.cases)) if key in boxes else box
    return tuple(boxes.values())


def _expressions(text: str) -> Iterator[Any]:
    """Nested lists of words."""
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", text):
        if word == "(":
            stack.append([])
            if len(stack) > DEPTH:
                raise InputError(f"the property has more than {DEPTH} nested parentheses")
        elif word == ")" and len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    if len(stack) > 1:
        raise InputError("a parenthesis of the property is not closed")
    yield from stack[0]


def _cases(formula: Any) -> list[list[Atom]]:
    """A formula as alternatives, each a list of inequalities."""
    match formula:
        case ["or", *parts]:
            return [case for part in parts for case in _cases(part)]
        case ["and", *parts]:
            choices = [_cases(part) for part in parts]
            if math.prod(map(len, choices)) > CASES:
                raise InputError(f"the property has more than {CASES:,} alternatives")
            return [[a for part in case for a in part] for case in itertools.product(*choices)]
        case ["<=", left, right]:
            atom: Atom = {}
            _add(left, 1.0, atom)
            _add(right, -1.0, atom)
            return [[atom]]
        case [">=", left, right]:
            return _cases(["<=", right, left])
    raise InputError(f"expected <=, >=, and, or, got {formula!r:.60}")


def _add(term: Any, factor: float, atom: Atom) -> None:
    """Add a multiple of a term to an inequality."""
    match term:
        case ["+", *parts]:
            for part in parts:
                _add(part, factor, atom)
        case ["-", first, *rest]:
            _add(first, factor if rest else -factor, atom)
            for part in rest:
                _add(part, -factor, atom)
        case ["*", str(number), other]:
            _add(other, factor * _number(number), atom)
        case str(name) if name[:2] in ("X_", "Y_"):
            atom[name] = atom.get(name, 0.0) + factor
        case str(number):
            atom[""] = atom.get("", 0.0) + factor * _number(number)
        case _:
            raise InputError(f"expected a linear term, got {term!r:.60}")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"expected a number or a declared variable, got {text!r:.60}")
    return value


def _box(atoms: list[Atom], sizes: Counter[str]) -> Box:
    """Bounds of the inputs and rows of the outputs of one case."""
    low = torch.full((sizes["X"],), -math.inf, dtype=torch.float64)
    high, rows, offset = -low, [], []
    for atom in atoms:
        constant = atom.pop("", 0.0)
        index = {name: int(name[2:]) for name in atom}
        if any(index[name] >= sizes[name[0]] for name in atom):
            raise InputError(f"a variable among {', '.join(atom)} is not declared")
        match [(name, value) for name, value in atom.items() if name[0] == "X"]:
            case []:
                rows.append(torch.zeros(sizes["Y"], dtype=torch.float64))
                for name, value in atom.items():
                    rows[-1][index[name]] = value
                offset.append(-constant)
            case [(name, 1.0 | -1.0 as value)] if len(atom) == 1:
                end, at = -constant / value, index[name]
                if value > 0:
                    high[at] = min(float(high[at]), end)
                else:
                    low[at] = max(float(low[at]), end)
            case _:
                raise InputError(f"expected a bound of one input, got one of {', '.join(atom)}")
        atom[""] = constant
    if not rows or not bool((torch.isfinite(low + high) & (low <= high)).all()):
        raise InputError("a case needs a finite, non-empty box of all inputs and a row of outputs")
    return Box(low, high, ((torch.stack(rows), torch.tensor(offset, dtype=torch.float64)),))


@dataclass(frozen=True)
class Answer:
    """`holds`, `violated` or `unknown`; where it is violated the input, flat, and the network's outputs there."""

    verdict: Verdict
    input: Tensor | None = None
    output: Tensor | None = None
    seconds: float = 0.0
    parts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        tensors = {"input": self.input, "output": self.output}
        plain = {name: None if t is None else t.tolist() for name, t in tensors.items()}
        return {"verdict": self.verdict, **plain, "seconds": self.seconds, "parts": self.parts}


def verify_property(
    model: nn.Module | ExportedProgram,
    example: Tensor,
    boxes: tuple[Box, ...],
    *,
    ball: float | None = None,
    seconds: float = math.inf,
) -> Answer:
    """Whether a property of VNN-LIB holds for a network: its boxes are split until it is proved or an input violates it.

    Guarantee: `holds` and `violated` are about the real function of the stored weights, rounding included.

    Args:
        model: affine up to pointwise activations and max pooling; splits are made at those of ReLU kind.
        example: a batch of one input.
        boxes: as read by `read_vnnlib`.
        ball: in place of every box the ℓ2 ball of this radius around its middle.
        seconds: of processor time; when they end, the answer is `unknown`.

    References: Demarchi et al. 2023 (VNN-LIB); Wang et al. 2021 (β-CROWN).
    """
    began = time.process_time()
    program = capture(model, example)
    cache = Cache(RTOL)
    with torch.no_grad(), full_precision():
        run = propagate(program, None, RTOL, cache)
        engine = LocalBound.of(run, cache)
        network = engine.network
        if network is None:
            raise Refused(f"no property can be proved for this network: {engine.notes[0]}")
        sizes = boxes[0].low.numel(), boxes[0].cases[0][0].shape[1]
        if sizes != (network.sizes[0], network.sizes[-1]):
            raise InputError(
                f"the property has {sizes[0]} inputs and {sizes[1]} outputs, the network {network.sizes[0]} and "
                f"{network.sizes[-1]}"
            )
        function, shape = as_function(program), tuple(example.shape[1:])
        parts, open_ = 0, False
        for box in boxes:
            middle = (box.low + box.high) / 2
            widths = None
            norm: Norm = "l2"
            if ball is None:
                norm = "linf"
                widths = inflate(torch.maximum(box.high - middle, middle - box.low))
            enclosed = enclose_ball(
                network,
                middle,
                1.0 if ball is None else ball,
                norm,
                widths=widths,
                tighten=tighten,
                deadline=began + seconds,
            )
            if enclosed is None:
                open_ = True
                continue
            search = Branching(
                enclosed,
                claim_of(box),
                lambda points: function(points.reshape(-1, *shape)),
                lambda points: evaluate(run, cache, engine.rounding, points.reshape(-1, *shape)),
                deadline=began + seconds,
                corners=None if ball is not None else (box.low, box.high),
            )
            holds = search.decide()
            parts += search.visited
            if search.broken is not None:
                output = function(search.broken.reshape(1, *shape))[0]
                spent = time.process_time() - began
                return Answer("violated", search.broken, output, spent, parts)
            open_ = open_ or not holds
    spent = time.process_time() - began
    return Answer("unknown" if open_ else "holds", seconds=spent, parts=parts)


def claim_of(box: Box) -> Claim:
    """That none of the cases happens in the box."""
    rows = torch.cat([case[0] for case in box.cases])
    offset = torch.cat([case[1] for case in box.cases])
    lengths = [len(case[1]) for case in box.cases]
    ends = itertools.accumulate(lengths)
    # shorter clauses repeat their last row
    clauses = [
        [min(end - length + i, end - 1) for i in range(max(lengths))]
        for end, length in zip(ends, lengths, strict=True)
    ]
    return Claim(rows, offset, torch.tensor(clauses))
