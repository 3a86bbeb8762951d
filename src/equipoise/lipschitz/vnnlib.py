"""Properties in VNN-LIB: read from a file, and proved, violated or left open for a network.

A property describes what must not happen: inputs X in a box with outputs Y that fulfil linear inequalities,

    (assert (>= X_0 0.6)) (assert (<= X_0 0.68)) … (assert (or (and (<= Y_0 Y_1) (<= Y_0 Y_2)) (and (>= Y_3 1.5))))

It holds for a network where no input of the box does that (`unsat`), and is violated by an input that does (`sat`). Asserted are
`<=` and `>=` between two variables or a variable and a number, with `and` and `or` around them; an input is compared with
numbers only. Numbers are read as the nearest float64. A file is not trusted: sizes are bounded, and anything else is refused.
"""

import functools
import itertools
import re
import time
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core import InputError, Refused, explained, inflate, proving
from equipoise.core.files import read_bounded
from equipoise.lipschitz.capture import as_function, capture
from equipoise.lipschitz.local.backward import Ball, enclose_ball, lower_bounds
from equipoise.lipschitz.local.branch import ATTACK_STEPS, PART_STEPS, Attack, Branching
from equipoise.lipschitz.local.graph import Network
from equipoise.lipschitz.local.measure import LocalBound
from equipoise.lipschitz.local.slopes import relaxed_bounds, tight_bounds, usual_slopes
from equipoise.lipschitz.propagate import propagate
from equipoise.lipschitz.rounding import Rounding
from equipoise.norms.spectral import Cache

#: bytes of a file, alternatives of a property, inequalities and coefficients in all of them, nested parentheses
LARGEST, CASES, ATOMS, ENTRIES, DEPTH = 1 << 24, 10_000, 10**7, 10**8, 40
#: boxes of up to this many inputs are halved, others split at neurons
HALVED = 16
#: relative gap of every operator norm
RTOL = 1e-3
#: two words, variables or numbers, of which the first is at most the second
Atom = tuple[str, str]
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
    with explained(f"cannot read {path}"):
        text = read_bounded(path, LARGEST).decode("ascii")

    names: list[str] = []
    formulas = []
    for command in _parse(re.sub(";.*", "", text)):
        match command:
            case ["declare-const", str(name), "Real"]:
                names.append(name)
            case ["assert", formula]:
                formulas.append(formula)
            case _:
                raise InputError(f"expected declare-const or assert, got {command!r:.60}")
    inputs = sum(name.startswith("X") for name in names)
    xs = {f"X_{i}": i for i in range(inputs)}
    ys = {f"Y_{i}": i for i in range(len(names) - inputs)}
    if not xs or not ys or sorted(names) != sorted([*xs, *ys]):
        raise InputError("expected the variables X_0, X_1, … and Y_0, Y_1, …, each declared once")

    boxes: dict[bytes, Box] = {}
    alternatives = _alternatives(["and", *formulas])
    if not alternatives:
        raise InputError("the property has no alternatives: an empty or never happens")
    entries = 0
    for atoms in alternatives:
        low, high, case = _read_case(atoms, xs, ys)
        entries += case[0].numel()
        if entries > ENTRIES:
            raise InputError(f"the property has more than {ENTRIES:,} coefficients of outputs")
        key = torch.stack([low, high]).numpy().tobytes()
        boxes.setdefault(key, Box(low, high, [])).cases.append(case)
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


def _alternatives(formula: Any) -> list[list[Atom]]:
    """A formula as alternatives, each a list of inequalities."""
    match formula:
        case ["or", *parts]:
            return [each for part in parts for each in _alternatives(part)]
        case ["and", *parts]:
            choices = [_alternatives(part) for part in parts]
            count = prod(map(len, choices))
            length = sum(max(map(len, choice), default=0) for choice in choices)
            if count > CASES or count * length > ATOMS:
                raise InputError(
                    f"the property has more than {CASES:,} alternatives, or {ATOMS:,} inequalities in all of them"
                )
            return [list(itertools.chain(*each)) for each in itertools.product(*choices)]
        case ["<=", str(left), str(right)] | [">=", str(right), str(left)]:
            return [[(left, right)]]
    raise InputError(f"expected <=, >=, and, or, got {formula!r:.60}")


def _read_case(
    atoms: list[Atom], xs: dict[str, int], ys: dict[str, int]
) -> tuple[Tensor, Tensor, Case]:
    """One alternative: both ends of the inputs, and rows of the outputs."""
    ends = [-inf] * len(xs), [inf] * len(xs)
    others = []
    for left, right in atoms:
        if left in xs:
            ends[1][xs[left]] = min(ends[1][xs[left]], _number(right))
        elif right in xs:
            ends[0][xs[right]] = max(ends[0][xs[right]], _number(left))
        else:
            others.append((left, right))
    rows = torch.zeros(len(others), len(ys), dtype=torch.float64)
    offset = torch.zeros(len(others), dtype=torch.float64)
    for n, pair in enumerate(others):
        for word, sign in zip(pair, (1.0, -1.0), strict=True):
            if word in ys:
                rows[n, ys[word]] += sign
            else:
                offset[n] -= sign * _number(word)
    low, high = torch.tensor(ends, dtype=torch.float64)
    if not others or not (torch.isfinite(low + high) & (low <= high)).all():
        raise InputError("a property needs bounds of all inputs and an inequality of outputs")
    return low, high, (rows, offset)


@functools.lru_cache(maxsize=2**16)
def _number(word: str) -> float:
    if not re.fullmatch(r"[-+]?(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][-+]?\d{1,3})?", word):
        raise InputError(f"expected a number or a declared variable, got {word!r:.60}")
    return float(word)


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
    seconds: float = inf,
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
    with proving():
        run = propagate(capture(model, example), None, RTOL, cache)
        engine = LocalBound(run, cache)
        if engine.network is None:
            raise Refused(f"no property can be proved for this network: {engine.notes[0]}")
        sizes = len(boxes[0].low), boxes[0].cases[0][0].shape[1]
        if sizes != (engine.network.sizes[0], engine.network.sizes[-1]):
            raise InputError(
                f"the property has {sizes[0]} inputs and {sizes[1]} outputs, the network others"
            )
        rounding = Rounding(run, cache)
        unproved = False
        for box in boxes:
            answer = _check(engine.network, box, rounding, ball, began + seconds)
            if isinstance(answer, Tensor):
                (output,) = as_function(run.program)(answer.reshape(example[:1].shape))
                return Answer("violated", time.process_time() - began, answer, output)
            unproved |= not answer
    return Answer("unknown" if unproved else "holds", time.process_time() - began)


def _check(
    network: Network, box: Box, rounding: Rounding, radius: float | None, deadline: float
) -> bool | Tensor:
    """Whether it is proved that no case happens in the box; an input at which one does, where one was met."""
    last, halved = network.last, radius is None and len(box.low) <= HALVED
    parts, steps = [box], ATTACK_STEPS
    while parts and time.process_time() < deadline:
        part = parts.pop()
        middle = (part.low + part.high) / 2
        widths = inflate(torch.maximum(part.high - middle, middle - part.low))
        ball = enclose_ball(
            network,
            middle,
            radius or 1.0,
            "linf" if radius is None else "l2",
            widths=widths if radius is None else None,
            bounds=None if halved else (lower_bounds, tight_bounds),
            deadline=deadline,
        )
        if ball is None:
            return False
        attack, left = Attack(ball, rounding), []
        for rows, offset in part.cases:
            margins = lower_bounds(ball, last, rows) - offset
            if (margins > 0).any():
                continue
            broken = attack.everywhere(rows, offset, steps)
            if broken is not None:
                return broken
            nearest = int(margins.argmax())
            left.append((rows, offset, rows[nearest], offset[nearest]))
        if left and not halved:
            # one row of every case, the one that is nearest to its proof, by splits at neurons
            _, _, row, limit = zip(*left, strict=True)
            search = Branching(attack, torch.stack(row), torch.stack(limit), deadline)
            proved = search.decide()
            if search.broken is not None and all(len(rows) == 1 for rows, *_ in left):
                return search.broken
            # else another row may hold where this one is broken
            return proved is True
        if left:
            parts += _halves(Box(part.low, part.high, [case[:2] for case in left]), ball)
        steps = PART_STEPS
    return not parts


def _halves(box: Box, ball: Ball) -> list[Box]:
    """Both halves of the box along the input that moves the bounds most."""
    rows = torch.cat([rows for rows, _ in box.cases])
    last, arrived = ball.network.last, dict[int, Tensor]()
    relaxed_bounds(ball, last, rows, usual_slopes(ball, last, len(rows)), arrived)
    at = int((arrived[0].abs().sum(0) * (box.high - box.low)).argmax())
    low, high = box.low.clone(), box.high.clone()
    low[at] = high[at] = (box.low[at] + box.high[at]) / 2
    return [Box(low, box.high, box.cases), Box(box.low, high, box.cases)]
