"""Properties in VNN-LIB: read from a file, and proved, violated or left open for a network.

A property describes what must not happen: inputs X in a box with outputs Y that fulfil linear inequalities,

    (assert (>= X_0 0.6)) (assert (<= X_0 0.68)) … (assert (or (and (<= Y_0 Y_1) (<= Y_0 Y_2)) (and (>= Y_3 1.5))))

It holds for a network where no input of the box does that (`unsat`), and is violated by an input that does (`sat`). Asserted are
`<=` and `>=` between two variables or a variable and a number, with `and` and `or` around them; an input is compared with
numbers only. Numbers are read as the nearest float64. A file is not trusted: sizes are bounded, and anything else is refused.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import full_precision, inflate
from equipoise.lipschitz.attack import as_function
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.local.backward import Ball, enclose_ball, lower_bounds
from equipoise.lipschitz.local.branch import ATTACK_STEPS, PART_STEPS, Attack, Branching
from equipoise.lipschitz.local.graph import Network
from equipoise.lipschitz.local.measure import LocalBound, evaluate
from equipoise.lipschitz.local.slopes import relaxed_bounds, tight_bounds, usual_slopes
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

#: bytes of a file, alternatives of a property, nested parentheses
LARGEST, CASES, DEPTH = 1 << 24, 10_000, 40
#: boxes of up to this many inputs are halved, others split at neurons
HALVED = 16
#: relative gap of every operator norm
RTOL = 1e-3
#: coefficients of `Σ coefficient·variable ≤ 0`; that of "" is the constant
Atom = dict[str, float]
#: `rows·y ≤ offset` for all rows
Case = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Box:
    """Inputs between `low` and `high`, and the cases of outputs that must not happen there."""

    low: Tensor
    high: Tensor
    cases: list[Case]


def read_vnnlib(path: str | Path) -> list[Box]:
    """The boxes of a property; what is not understood is refused in a sentence."""
    file = Path(path)
    try:
        if file.stat().st_size > LARGEST:
            raise InputError(f"{path} is larger than {LARGEST >> 20} MB")
        text = file.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error

    names: dict[str, list[str]] = {"X": [], "Y": []}
    formulas = []
    for command in _parse(re.sub(";.*", "", text)):
        match command:
            case ["declare-const", str(name), "Real"] if name[:1] in names:
                names[name[0]].append(name)
            case ["assert", formula]:
                formulas.append(formula)
            case _:
                raise InputError(f"expected declare-const or assert, got {command!r:.60}")
    for letter, own in names.items():
        if not own or own != [f"{letter}_{i}" for i in range(len(own))]:
            raise InputError(f"expected the variables {letter}_0, {letter}_1, … declared in order")

    place = {name: i for own in names.values() for i, name in enumerate(own)}
    boxes: dict[bytes, Box] = {}
    for atoms in _alternatives(["and", *formulas], place):
        box = _box(atoms, place, len(names["X"]), len(names["Y"]))
        key = torch.stack([box.low, box.high]).numpy().tobytes()
        boxes.setdefault(key, Box(box.low, box.high, [])).cases.extend(box.cases)
    return list(boxes.values())


def _parse(text: str) -> list[Any]:
    """Nested lists of words."""
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", text):
        if word == "(":
            stack.append([])
        elif word == ")" and len(stack) > 1:
            inner = stack.pop()
            stack[-1].append(inner)
        else:
            stack[-1].append(word)
        if len(stack) > DEPTH:
            raise InputError(f"the property has more than {DEPTH} nested parentheses")
    if len(stack) > 1:
        raise InputError("a parenthesis of the property is not closed")
    return stack[0]


def _alternatives(formula: Any, place: dict[str, int]) -> list[list[Atom]]:
    """A formula as alternatives, each a list of inequalities."""
    match formula:
        case ["or", *parts]:
            return [each for part in parts for each in _alternatives(part, place)]
        case ["and", *parts]:
            choices = [_alternatives(part, place) for part in parts]
            if math.prod(map(len, choices)) > CASES:
                raise InputError(f"the property has more than {CASES:,} alternatives")
            return [list(itertools.chain(*each)) for each in itertools.product(*choices)]
        case ["<=" | ">=" as sign, str(left), str(right)]:
            if sign == ">=":
                left, right = right, left
            atom = {"": 0.0}
            for word, factor in ((left, 1.0), (right, -1.0)):
                if word in place:
                    atom[word] = atom.get(word, 0.0) + factor
                else:
                    atom[""] += factor * _number(word)
            return [[atom]]
    raise InputError(f"expected <=, >=, and, or, got {formula!r:.60}")


def _number(word: str) -> float:
    if not re.fullmatch(r"[-+]?[0-9.]{1,40}([eE][-+]?\d{1,3})?", word):
        raise InputError(f"expected a number or a declared variable, got {word!r:.60}")
    return float(word)


def _box(atoms: list[Atom], place: dict[str, int], inputs: int, outputs: int) -> Box:
    """One alternative: bounds of the inputs, and rows of the outputs."""
    low = torch.full((inputs,), -math.inf, dtype=torch.float64)
    high = -low
    rows, offset = [], []
    for atom in atoms:
        variables = [(name, value) for name, value in atom.items() if name]
        match variables:
            case [(name, value)] if name[0] == "X" and value:
                at, end = place[name], -atom[""] / value
                if value > 0:
                    high[at] = min(float(high[at]), end)
                else:
                    low[at] = max(float(low[at]), end)
            case _ if variables and all(name[0] == "Y" for name, _ in variables):
                row = torch.zeros(outputs, dtype=torch.float64)
                for name, value in variables:
                    row[place[name]] = value
                rows.append(row)
                offset.append(-atom[""])
            case _:
                raise InputError("expected a bound of one input, or an inequality of outputs")
    if not rows or not bool((torch.isfinite(low + high) & (low <= high)).all()):
        raise InputError("a property needs bounds of all inputs and an inequality of outputs")
    return Box(low, high, [(torch.stack(rows), torch.tensor(offset, dtype=torch.float64))])


@dataclass(frozen=True)
class Answer:
    """`holds`, `violated` or `unknown`; where it is violated the input, flat, and the network's outputs there."""

    verdict: Literal["holds", "violated", "unknown"]
    seconds: float = 0.0
    input: Tensor | None = None
    output: Tensor | None = None


def verify_property(
    model: nn.Module | ExportedProgram,
    example: Tensor,
    boxes: list[Box],
    *,
    ball: float | None = None,
    seconds: float = math.inf,
) -> Answer:
    """Whether a property holds for a network: its boxes are split until that is proved, or an input violates it.

    Guarantee: `holds` and `violated` are about the real function of the stored weights, rounding included.

    Args:
        model: affine up to pointwise activations and max pooling.
        example: a batch of one input.
        boxes: as read by `read_vnnlib`.
        ball: the ℓ2 ball of this radius around the middle of every box in its place.
        seconds: of processor time; when they end, the answer is `unknown`.
    """
    began = time.process_time()
    cache = Cache(RTOL)
    with torch.no_grad(), full_precision():
        run = propagate(capture(model, example), None, RTOL, cache)
        engine = LocalBound.of(run, cache)
        if engine.network is None:
            raise Refused(f"no property can be proved for this network: {engine.notes[0]}")
        sizes = len(boxes[0].low), boxes[0].cases[0][0].shape[1]
        if sizes != (engine.network.sizes[0], engine.network.sizes[-1]):
            raise InputError(
                f"the property has {sizes[0]} inputs and {sizes[1]} outputs, the network others"
            )
        function, shape = as_function(run.program), example.shape[1:]
        verifier = _Verifier(
            engine.network,
            lambda points: function(points.reshape(-1, *shape)),
            lambda points: evaluate(run, cache, engine.rounding, points.reshape(-1, *shape)),
            ball,
            began + seconds,
        )
        holds = [verifier.check(box) for box in boxes if verifier.broken is None]
    spent = time.process_time() - began
    if verifier.broken is not None:
        return Answer("violated", spent, verifier.broken, verifier.function(verifier.broken)[0])
    return Answer("holds" if all(holds) else "unknown", spent)


@dataclass
class _Verifier:
    network: Network
    function: Callable[[Tensor], Tensor]
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]]
    radius: float | None
    deadline: float
    broken: Tensor | None = None

    def check(self, box: Box) -> bool:
        """Whether no case happens in the box; an input at which one does is stored in `broken`."""
        halved = self.radius is None and len(box.low) <= HALVED
        parts, steps = [box], ATTACK_STEPS
        while parts and self.broken is None and time.process_time() < self.deadline:
            part = parts.pop()
            ball = self._ball(part, tight=not halved)
            if ball is None:
                return False
            attack = Attack(ball, self.function, self.evaluate)
            last = len(self.network.nodes) - 1
            left = [
                (rows, offset)
                for rows, offset in part.cases
                if not bool((lower_bounds(ball, last, rows) > offset).any())
            ]
            for case in left:
                if self.broken is None:
                    self.broken = attack.everywhere(*case, steps)
            if left and halved:
                parts += self._halves(Box(part.low, part.high, left), ball)
            elif left and self.broken is None:
                return self._branch(attack, left)
            steps = PART_STEPS
        return not parts and self.broken is None

    def _ball(self, box: Box, tight: bool) -> Ball | None:
        middle = (box.low + box.high) / 2
        widths = inflate(torch.maximum(box.high - middle, middle - box.low))
        return enclose_ball(
            self.network,
            middle,
            self.radius or 1.0,
            "linf" if self.radius is None else "l2",
            widths=widths if self.radius is None else None,
            bounds=(lower_bounds, tight_bounds) if tight else None,
            deadline=self.deadline,
        )

    def _halves(self, box: Box, ball: Ball) -> list[Box]:
        """Both halves of the box along the input that moves the bounds most."""
        rows = torch.cat([rows for rows, _ in box.cases])
        last, arrived = len(self.network.nodes) - 1, dict[int, Tensor]()
        relaxed_bounds(ball, last, rows, usual_slopes(ball, last, len(rows)), arrived)
        at = int((arrived[0].abs().sum(0) * (box.high - box.low)).argmax())
        low, high = box.low.clone(), box.high.clone()
        low[at] = high[at] = (box.low[at] + box.high[at]) / 2
        return [Box(low, box.high, box.cases), Box(box.low, high, box.cases)]

    def _branch(self, attack: Attack, cases: list[Case]) -> bool:
        """Whether one row of every case, the one that is nearest to it, is proved by splits at neurons."""
        last = len(self.network.nodes) - 1
        rows, offset = [], []
        for own, numbers in cases:
            n = int((lower_bounds(attack.ball, last, own) - numbers).argmax())
            rows.append(own[n])
            offset.append(numbers[n])
        search = Branching(attack, torch.stack(rows), torch.stack(offset), self.deadline)
        proved = search.decide()
        # else another row may hold where this one is broken
        if all(len(own) == 1 for own, _ in cases):
            self.broken = search.broken
        return proved is True
