"""Random networks bounded globally and locally, and attacked: a standing adversary of every upper bound.

Each program is bounded by every route that takes it (`QUESTIONS`), and each bound is attacked on its own domain. Refusals are
counted; an exception that is not a refusal, or a bound below what an attack reaches, is a violation, shrunk and printed as a
script that shows it without this package's attack code.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from equipoise.core.errors import EquipoiseError
from equipoise.lipschitz import induced_bound, lipschitz_bound, local_lipschitz
from equipoise.lipschitz.local import Effort
from equipoise.testing.runner import REFERENCE_ROUNDING, Batch
from equipoise_lab.fuzz.adversary import Findings, Norm, Target, Witness, assault, confirmed
from equipoise_lab.fuzz.facts import check_facts
from equipoise_lab.fuzz.programs import PREAMBLE, Program, shrunk
from equipoise_lab.fuzz.statements import expressions, random_program

IMPORTS = "from equipoise.lipschitz import induced_bound, lipschitz_bound, local_lipschitz\n"
FUNCTIONS = {
    "lipschitz_bound": lipschitz_bound,
    "induced_bound": induced_bound,
    "local_lipschitz": local_lipschitz,
    "torch": torch,
}


@dataclass(frozen=True)
class Question:
    """A bound asked for: the expression that gives it, its norm, and the domain it holds on.

    `radius` alone means the ball around the origin, with a centre (by `scale`) the ball around that; None means everywhere.
    """

    text: str
    norm: Norm = "l2"
    radius: float | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Violation:
    """A program whose bound is below what an attack reached, or whose bounding failed without a refusal."""

    program: Program
    question: Question
    claimed: float
    witness: Witness | None
    error: str = ""

    def __str__(self) -> str:
        if self.witness is None:
            return f"{self.question.text} raised {self.error}"
        return f"{self.question.text} = {self.claimed!r}, reached {self.witness.value!r} ({self.witness.kind})"


@dataclass(frozen=True)
class Verdict:
    """What became of one question: the bound and the stretch reached, a refusal (both None) or a violation."""

    upper: float | None = None
    reached: float | None = None
    violation: Violation | None = None


def questions(program: Program, rng: random.Random) -> Iterator[Question]:
    """The bounds to ask of a program: global with its totals, in ℓ1 or ℓ∞, and local at two efforts and radii."""
    chain = rng.choice(("closed",) * 8 + ("auto",) * 6)
    settings = f"ball={program.ball}, rtol={rng.choice((1e-3, 1e-3, 0.05))}, chain={chain!r}"
    for total in ("upper", "product", "fused"):
        yield Question(f"lipschitz_bound(network, example, {settings}).{total}", "l2", program.ball)
    order: Norm = rng.choice(("l1", "linf"))
    if program.ball is None:
        yield Question(f"induced_bound(network, example, {order!r}).value", order)
    if len(program.inputs) == 1 and len(program.inputs[0]) > 1:
        for effort in rng.sample(get_args(Effort), 2):
            scale = rng.choice(program.scales)
            radius = scale * rng.choice((1e-4, 1e-2, 0.3, 3.0))
            text = f"local_lipschitz(network, centre, {radius!r}, steps=3, effort={effort!r}).upper"
            yield Question(text, "l2", radius, scale)


class Trial:
    """One program with its network, its example and what attacks reached so far, by domain."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program, self.seed = program, seed
        self.network = program.build()
        self.target = Target(self.network, program.inputs)
        # a batch that is mixed is bounded as a whole
        batch = 1 + seed % 2 if self.target.together else 1
        self.example = program.draw(seed, batch=batch)
        self._reached: dict[tuple[float | None, float | None], Findings] = {}
        self._asked: dict[str, Any] = {}

    def centre(self, scale: float) -> Tensor:
        """The point around which a local bound is asked, for the program's only input."""
        return self.program.draw(self.seed + 7, scale)[0]

    def ask(self, question: Question) -> float:
        """The bound; the call is made once for all its totals."""
        call, _, total = question.text.rpartition(".")
        if call not in self._asked:
            names = {**FUNCTIONS, "network": self.network, "example": _unpacked(self.example)}
            if question.scale is not None:
                names["centre"] = self.centre(question.scale)
            try:
                self._asked[call] = eval(call, names)
            except Exception as error:
                self._asked[call] = error
                raise
        if isinstance(self._asked[call], Exception):
            raise self._asked[call]
        return float(getattr(self._asked[call], total))

    def attack(self, question: Question) -> Findings:
        """The largest stretches found on the question's domain."""
        key = (question.radius, question.scale)
        if key not in self._reached:
            norms: tuple[Norm, ...] = (
                ("l2",) if question.radius is not None else ("l2", "l1", "linf")
            )
            points = self._points(question)
            self._reached[key] = assault(
                self.target, points, self._inside(question), norms, seed=self.seed
            )
        return self._reached[key]

    def _points(self, question: Question) -> Tensor:
        """Gaussian points of several sizes, spikes, ties and constant rows; for a local bound the centre and its ball."""
        g = torch.Generator().manual_seed(self.seed)
        n = self.target.width
        rows = torch.randn(12, n, generator=g, dtype=torch.float64)
        rows[3] = rows[3].sign() + 1e-3 * rows[4]
        rows[5] = 1 + 1e-3 * rows[6]
        rows[7] = 1e-3 * rows[8] + torch.nn.functional.one_hot(torch.tensor(self.seed % n), n)
        if question.scale is not None and question.radius is not None:
            centre = self.centre(question.scale).double().reshape(1, -1)
            rows = centre + question.radius * rows / math.sqrt(n)
            rows[0] = centre
            return rows
        size = 1.0 if question.radius is None else question.radius / math.sqrt(n)
        scales = torch.tensor(self.program.scales, dtype=torch.float64) * size
        sizes = scales[torch.randint(len(scales), (len(rows),), generator=g)]
        return (
            rows * (sizes * torch.tensor([1.0, 0.03, 20.0, 1.0] * 3, dtype=torch.float64))[:, None]
        )

    def _inside(self, question: Question) -> Callable[[Tensor], Tensor]:
        if question.radius is None:
            return lambda rows: rows
        centre = (
            0.0 if question.scale is None else self.centre(question.scale).double().reshape(1, -1)
        )
        most = question.radius * (1 - 1e-9)

        def project(rows: Tensor) -> Tensor:
            moved = rows - centre
            length = torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp_min(1e-300)
            return centre + moved * (most / length).clamp_max(1.0)

        return project

    def judge_facts(self, ball: float) -> Verdict:
        """What every rule says of every node on a ball, held against values."""
        question = Question(f"check_facts(network, example, ball={ball})", radius=ball)
        try:
            wrong = check_facts(self.network, _unpacked(self.example), ball=ball, seed=self.seed)
        except EquipoiseError:
            return Verdict()
        except Exception as error:  # noqa: BLE001 – whatever it is, it should have been a refusal
            wrong = [f"{type(error).__name__}: {error}"]
        stronger = (
            Violation(self.program, question, math.nan, None, "; ".join(wrong[:2]))
            if wrong
            else None
        )
        return Verdict(violation=stronger)

    def judge(self, question: Question) -> Verdict:
        """The bound against the attack; what exceeds it counts once rounding is taken off."""
        try:
            upper = self.ask(question)
        except EquipoiseError:
            return Verdict()
        except Exception as error:  # noqa: BLE001 – whatever it is, it should have been a refusal
            return Verdict(
                violation=Violation(
                    self.program, question, math.nan, None, f"{type(error).__name__}: {error}"
                )
            )
        strongest = self.attack(question).best
        witnesses = [w for (norm, _), w in strongest.items() if norm == question.norm]
        reached = 0.0
        for witness in witnesses:
            if not witness.value <= upper:
                witness = confirmed(self.target, witness, question.norm)
                if not upper >= witness.value * (1 - REFERENCE_ROUNDING):
                    return Verdict(
                        upper, witness.value, Violation(self.program, question, upper, witness)
                    )
            reached = max(reached, min(witness.value, upper))
        if math.isnan(upper):
            return Verdict(
                violation=Violation(
                    self.program, question, upper, None, "a bound that is not a number"
                )
            )
        return Verdict(upper, reached)


def _unpacked(example: tuple[Tensor, ...]) -> Any:
    return example[0] if len(example) == 1 else example


@functools.cache
def _rows() -> Any:
    return expressions()


def random_networks(batch: Batch) -> None:
    """One random program, bounded and attacked in every way; violations become scripts."""
    seed = batch.integer(0, 2**30)
    rng = random.Random(seed)
    verdicts = examine(random_program(rng, _rows()), rng, seed % 1000)
    answered = [v for v in verdicts if v.upper is not None and v.violation is None]
    if not answered and not any(v.violation for v in verdicts):
        batch.tally.refused += 1
    for verdict in answered:
        batch.tally.record(None, verdict.upper, verdict.reached, batch.label)
    for verdict in verdicts:
        if verdict.violation is not None:
            batch.tally.violations += 1
            smallest = minimised(verdict.violation, seed % 1000)
            batch.tally.examples.append(f"{batch.label}: {_first_line(smallest)}")
            batch.tally.examples.append(script(smallest, seed % 1000, batch.label))


def examine(program: Program, rng: random.Random, seed: int) -> list[Verdict]:
    """The verdict of every question, up to the first violation."""
    trial = Trial(program, seed)
    verdicts: list[Verdict] = []
    for question in questions(program, rng):
        verdicts.append(trial.judge(question))
        if verdicts[-1].violation is not None:
            return verdicts
    return [*verdicts, trial.judge_facts(rng.choice((0.5, 2.0, 10.0)))]


def minimised(violation: Violation, seed: int) -> Violation:
    """The same kind of violation by a smaller program."""
    smallest = violation

    facts = violation.question.text.startswith("check_facts")

    def still(program: Program) -> bool:
        nonlocal smallest
        trial = Trial(program, seed)
        ball = violation.question.radius
        new = (
            trial.judge_facts(ball) if facts and ball else trial.judge(violation.question)
        ).violation
        if new is None or (new.witness is None) != (violation.witness is None):
            return False
        if not facts and new.error.split(":")[0] != violation.error.split(":")[0]:
            return False
        smallest = new
        return True

    shrunk(violation.program, still)
    return smallest


def script(violation: Violation, seed: int, label: str = "") -> str:
    """A script that shows the violation: the network, the call, and the pair or direction that exceeds it."""
    program, question, witness = violation.program, violation.question, violation.witness
    trial = Trial(program, seed)
    lines = [
        f"# {violation.question.text.split('(')[0]}: {_first_line(violation)}",
        f"# {label}",
        PREAMBLE + IMPORTS,
    ]
    lines += ["", program.source, "", ""]
    lines.append(f"network = Network().eval().to(torch.{program.dtype}).requires_grad_(False)")
    lines.append(f"example = {_text(trial.example, program.dtype)}")
    if question.scale is not None:
        lines.append(f"centre = {_text((trial.centre(question.scale),), program.dtype)}")
    if question.text.startswith("check_facts"):
        return (
            "\n".join(
                [
                    *lines,
                    "from equipoise_lab.fuzz.facts import check_facts",
                    f"print({question.text})",
                ]
            )
            + "\n"
        )
    lines.append(f"upper = float({question.text})")
    lines.append('print("upper bound", upper)')
    if witness is not None:
        lines += _shown(program, question, witness)
    return "\n".join(lines) + "\n"


def _first_line(violation: Violation) -> str:
    return str(violation).splitlines()[0][:200]


def _shown(program: Program, question: Question, witness: Witness) -> list[str]:
    sizes = [math.prod(s) for s in program.inputs]

    def row_text(row: Tensor) -> str:
        parts = [p.reshape(s) for p, s in zip(row.split(sizes), program.inputs, strict=True)]
        return _text(tuple(parts), "float64", always=True)

    order = {"l2": "2", "l1": "1", "linf": "float('inf')"}[question.norm]
    lines = ["", "network = network.double()", "", "", "def flat(out):"]
    lines.append(
        "    return torch.cat([t.flatten() for t in (out if isinstance(out, tuple) else (out,))])"
    )
    lines += ["", "", f"x = {row_text(witness.x)}", f"y = {row_text(witness.y)}"]
    if witness.kind == "pair":
        lines.append(
            "change = flat(network(*(t.clone() for t in x))) - flat(network(*(t.clone() for t in y)))"
        )
        lines.append("gap = flat(x) - flat(y)")
    else:
        lines.append("with torch.autograd.forward_ad.dual_level():  # the derivative at x along y")
        lines.append(
            "    out = network(*(torch.autograd.forward_ad.make_dual(a, b).clone() for a, b in zip(x, y)))"
        )
        lines.append("    change = torch.autograd.forward_ad.unpack_dual(flat(out)).tangent")
        lines.append("gap = flat(y)")
    lines.append(f"reached = float(change.norm({order}) / gap.norm({order}))")
    lines.append('print("reached", reached, "VIOLATED" if reached > upper else "fine")')
    return lines


def _text(tensors: tuple[Tensor, ...], dtype: str, always: bool = False) -> str:
    texts = [f"torch.tensor({t.tolist()}, dtype=torch.{dtype})" for t in tensors]
    return texts[0] if len(texts) == 1 and not always else f"({', '.join(texts)},)"
