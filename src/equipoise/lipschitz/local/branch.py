"""Branch and bound: parts of a ball on which the relaxation proves nothing are split until it does, or an input breaks the claim.

The claim is a list of clauses. Each is a set of rows c and numbers d, and says that at every point of the ball `c·f(x) > d` for
*one* of its rows; a robust classifier has a clause with one row, `f_y − f_k > 0`, per rival k.

*Parts.* A neuron of a hinge that may switch is split by the sign of its input z_j: on one part `z_j ≥ 0`, on the other
`z_j ≤ 0`. A part is bounded like the ball (`slopes`), with the interval of z_j cut at 0. There the hinge is linear, and a row g
that differs from the exact one to the side that the cut allows costs nothing: this difference is the multiplier of β-CROWN,
and like every g it is valid whatever its value. Boxes of few coordinates are halved instead, with all intervals refined.

*Broken.* A point inside the ball at which every row of a clause is `c·f(x) ≤ d`, by values in float64 with their rounding added.

References: Wang et al. 2021 (β-CROWN); De Palma et al. 2021 (branching by a bound of both parts).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equipoise.core.precision import gamma, inflate
from equipoise.lipschitz.local.backward import Ball, dual_norm, lower_bounds
from equipoise.lipschitz.local.curves import Hinge, Lines
from equipoise.lipschitz.local.slopes import Relaxation, optimise, relaxed_bounds, usual_slopes

#: a part of the ball: by name and node, one row per row of its clause
Part = dict[tuple[str, int], Tensor]

#: boxes of up to this many coordinates are halved
COORDINATES = 16
#: parts that are split together, and entries of their rows at the widest node
BATCH, ENTRIES = 128, 1_000_000
#: neurons that are tried for a split
CANDIDATES = 6
#: steps of Adam on the ball and on a part of it, and the first of them on a part; halves of boxes go without
WHOLE_STEPS, STEPS, RATE = 50, 20, 0.04
#: starts and gradient steps per clause of the search for an input that breaks the claim, and steps from a part
STARTS, ATTACK_STEPS, PART_STEPS = 8, 100, 5


@dataclass(frozen=True)
class Claim:
    """`max over the rows i of a clause of rows_i·f(x) − offset_i > 0`, for every clause.

    `clauses` (clauses, most rows of one) holds indices of rows; a shorter clause repeats one of its rows.
    """

    rows: Tensor
    offset: Tensor
    clauses: Tensor

    def values(self, outputs: Tensor, clause: Tensor) -> Tensor:
        """`rows·f − offset` of some outputs, for all rows of one clause each."""
        index = self.clauses[clause]
        return torch.einsum("nro,no->nr", self.rows[index], outputs) - self.offset[index]


@dataclass
class Branching:
    """The search on one ball.

    Args:
        ball: with all nodes enclosed.
        claim: to be proved.
        function: the network on a batch of flat inputs, differentiable.
        evaluate: values of a batch of flat inputs, and bounds of their rounding.
        dtype: in which an input that breaks the claim is stored.
        deadline: of `time.process_time()`.
        corners: least and largest coordinates of an input that breaks the claim, where the ball is a little larger than that.
    """

    ball: Ball
    claim: Claim
    function: Callable[[Tensor], Tensor]
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]]
    dtype: torch.dtype = torch.float64
    deadline: float = math.inf
    corners: tuple[Tensor, Tensor] | None = None
    visited: int = 0
    stuck: bool = False
    attacked: bool = False
    broken: Tensor | None = None

    def __post_init__(self) -> None:
        ball = self.ball
        if ball.norm == "linf" and ball.widths is None:
            self.ball = replace(ball, widths=torch.full_like(ball.x, ball.radius))

    def decide(self) -> bool | None:
        """Whether the claim holds; None where that stays open. `broken` is an input that breaks it, if it does not."""
        if self.attack():
            return False
        rows = self.claim.clauses.shape[1]
        batch = rows * max(1, min(BATCH, ENTRIES // (2 * rows * self.ball.network.widest)))
        parts = self._open(self._whole(), first=True)
        while self.broken is None and len(parts["clause", 0]):
            if time.process_time() > self.deadline or self.stuck:
                return None
            last = {name: t[-batch:] for name, t in parts.items()}
            more = self._open(self._split(last))
            parts = {name: torch.cat([t[:-batch], more[name]]) for name, t in parts.items()}
        return self.broken is None

    def attack(self) -> bool:
        """Whether an input that breaks the claim is known, after a search from random points that is made once."""
        if not self.attacked:
            self.attacked = True
            count = len(self.claim.clauses)
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(
                count * STARTS, self.ball.x.shape[-1], generator=generator, dtype=torch.float64
            )
            clause = torch.arange(count).repeat_interleave(STARTS)
            self._descend(self._least(self.ball, noise), clause, ATTACK_STEPS)
        return self.broken is not None

    @property
    def _hinges(self) -> dict[int, tuple[int, Hinge]]:
        """Source and curve of every activation that can be split."""
        nodes = self.ball.network.activations.items()
        return {i: (a.source, a.curve) for i, a in nodes if isinstance(a.curve, Hinge)}

    @property
    def _halves(self) -> bool:
        """Whether parts are halves of boxes."""
        return self.ball.widths is not None and len(self.ball.x) <= COORDINATES

    def _whole(self) -> Part:
        """The ball itself, once for every clause."""
        ball = self.ball
        rows = self.claim.clauses.numel()
        part: Part = {}
        for s, _ in self._hinges.values():
            part["low", s] = ball.low[s].expand(rows, -1)
            part["high", s] = ball.high[s].expand(rows, -1)
        if self._halves and ball.widths is not None:
            part["x", 0] = ball.x.expand(rows, -1)
            part["widths", 0] = ball.widths.expand(rows, -1)
        part["clause", 0] = torch.arange(len(self.claim.clauses)).repeat_interleave(
            self.claim.clauses.shape[1]
        )
        return part | _numbers(self._usual(ball, rows))

    def _usual(self, ball: Ball, rows: int) -> Relaxation:
        """The usual lines, and no multipliers of splits."""
        usual = usual_slopes(ball, len(ball.network.nodes) - 1, rows)
        usual.shift = {i: torch.zeros_like(t) for i, t in usual.lower.items()}
        return usual

    def _ball(self, parts: Part, before: float = math.inf) -> Ball:
        """The ball with the intervals of some parts, a row of them for each row, at nodes before one."""
        ball = self.ball
        low, high, lines = list(ball.low), list(ball.high), dict[int, Lines]()
        for i, (s, curve) in self._hinges.items():
            if i > before:
                continue
            low[s], high[s] = parts["low", s], parts["high", s]
            lines[i] = curve.lines(low[s], high[s])
        x, widths = parts.get(("x", 0), ball.x), parts.get(("widths", 0), ball.widths)
        return replace(ball, low=low, high=high, lines=ball.lines | lines, x=x, widths=widths)

    def _open(self, parts: Part, first: bool = False) -> Part:
        """Bound some parts; those on which nothing is proved, with what they may be split at."""
        clause, r, last = (
            parts["clause", 0],
            self.claim.clauses.shape[1],
            len(self.ball.network.nodes) - 1,
        )
        self.visited += len(clause) // r
        index = self.claim.clauses[clause[::r]].flatten()
        rows, offset = self.claim.rows[index], self.claim.offset[index]
        if self._halves:
            self._refine(parts)
        ball = self._ball(parts)
        start = self._usual(ball, len(rows)) if self._halves else _relaxation(parts)
        bounds, relaxation = optimise(
            ball,
            last,
            rows,
            start,
            steps=0 if self._halves else WHOLE_STEPS if first else STEPS,
            rate=None if first else RATE,
            enough=offset,
            deadline=self.deadline,
        )
        arrived: dict[int, Tensor] = {}
        relaxed_bounds(ball, last, rows, relaxation, arrived)
        parts = parts | _numbers(relaxation)
        parts["gap", 0] = bounds - offset
        parts["scores", 0] = self._scores(ball, arrived)
        least = self._least(ball, arrived[0])
        proved = (parts["gap", 0] > 0).reshape(-1, r).any(1).repeat_interleave(r)
        left = {name: t[~proved] for name, t in parts.items()}
        if not bool(proved.all()):
            self._descend(least[~proved], clause[~proved], PART_STEPS)
        return left

    def _scores(self, ball: Ball, arrived: dict[int, Tensor]) -> Tensor:
        """What a split may gain: per coordinate of a box, or per neuron that may switch, all hinges side by side."""
        if self._halves and ball.widths is not None:
            return arrived[0].abs() * ball.widths
        scores = []
        for i, (s, _) in self._hinges.items():
            low, high = ball.low[s].clamp_max(0), ball.high[s].clamp_min(0)
            height = -low * high / (high - low).clamp_min(1e-300)
            scores.append(arrived.get(i, torch.zeros_like(low)).abs() * height)
        return torch.cat(scores, 1) if scores else torch.zeros(len(arrived[0]), 1)

    def _split(self, parts: Part) -> Part:
        """Both parts of each, one after the other."""
        r = self.claim.clauses.shape[1]
        # the row that is nearest to a proof decides where
        nearest = parts["gap", 0].reshape(-1, r).argmax(1) + r * torch.arange(
            len(parts["gap", 0]) // r
        )
        scores, tried = parts["scores", 0][nearest].topk(
            min(CANDIDATES, parts["scores", 0].shape[1])
        )
        if self._halves:
            return self._halved(parts, tried[:, 0].repeat_interleave(r))
        self.stuck = bool((scores[:, 0] == 0).any())
        k = tried.shape[1]
        heads = {name: t[nearest].repeat_interleave(k, 0) for name, t in parts.items()}
        both = self._cut(heads, tried.flatten())
        index = self.claim.clauses[both["clause", 0]].gather(
            1, (nearest % r).repeat_interleave(2 * k)[:, None]
        )[:, 0]
        bounds = relaxed_bounds(
            self._ball(both),
            len(self.ball.network.nodes) - 1,
            self.claim.rows[index],
            _relaxation(both),
        )
        worse = (bounds - self.claim.offset[index]).reshape(-1, k, 2)
        # a part that is proved already counts as 0
        value = worse.clamp_max(0).sum(2).masked_fill(scores == 0, -math.inf)
        best = tried.gather(1, value.argmax(1)[:, None])[:, 0]
        return self._cut(parts, best.repeat_interleave(r), r)

    def _cut(self, parts: Part, neurons: Tensor, r: int = 1) -> Part:
        """Every part with the input of one neuron at least 0, and at most 0; the hinge has one slope on each."""
        made = {
            name: torch.stack([t.reshape(-1, r, *t.shape[1:])] * 2, 1).flatten(0, 2)
            for name, t in parts.items()
        }
        neurons = torch.stack([neurons.reshape(-1, r)] * 2, 1).flatten()
        active = torch.tensor([True, False]).repeat_interleave(r).repeat(len(neurons) // (2 * r))
        at = 0
        for i, (s, curve) in self._hinges.items():
            n = self.ball.network.sizes[s]
            here = ((neurons >= at) & (neurons < at + n)).nonzero().flatten()
            j, side = neurons[here] - at, active[here]
            slope = torch.where(side, curve.right.expand(n)[j], curve.left.expand(n)[j])
            made["low", s][here, j] = torch.where(side, 0.0, made["low", s][here, j])
            made["high", s][here, j] = torch.where(side, made["high", s][here, j], 0.0)
            made["lower", i][here, j] = slope
            made["upper", i][here, j] = slope
            at += n
        return made

    def _halved(self, parts: Part, coordinate: Tensor) -> Part:
        made = {name: torch.cat([t, t]) for name, t in parts.items()}
        x, widths = made["x", 0], made["widths", 0]
        at = torch.arange(len(x)), torch.cat([coordinate, coordinate])
        half = widths[at] / 2
        x[at] += torch.cat([half[: len(coordinate)], -half[len(coordinate) :]])
        widths[at] = inflate(half) + 2.0**-51 * x[at].abs()
        return made

    def _refine(self, parts: Part) -> None:
        """Refine the intervals of pre-activations on the boxes of some parts, by lines."""
        r = self.claim.clauses.shape[1]
        names = [name for name in parts if name[0] in ("low", "high", "x", "widths")]
        first = {name: parts[name][::r] for name in names}
        for s in sorted({s for s, _ in self._hinges.values()}):
            low, high = first["low", s].clone(), first["high", s].clone()
            open_ = ((low < 0) & (high > 0)).any(0).nonzero().flatten()
            unit = one_hot(open_, low.shape[1]).double()
            ball = self._ball(first, before=s)
            wide = replace(
                ball,
                x=ball.x.repeat_interleave(2 * len(unit), 0),
                widths=first["widths", 0].repeat_interleave(2 * len(unit), 0),
                lines={i: lines.repeated(2 * len(unit)) for i, lines in ball.lines.items()},
            )
            rows = torch.cat([unit, -unit]).repeat(len(low), 1)
            bounds = lower_bounds(wide, s, rows).reshape(len(low), 2, len(unit))
            low[:, open_] = torch.maximum(low[:, open_], bounds[:, 0])
            high[:, open_] = torch.minimum(high[:, open_], -bounds[:, 1])
            first["low", s], first["high", s] = torch.minimum(low, high), torch.maximum(low, high)
        for name, t in first.items():
            parts[name] = t.repeat_interleave(r, 0)

    def _least(self, ball: Ball, A: Tensor) -> Tensor:
        """Where on the ball `A·x` is least, a little inside."""
        if ball.norm == "linf":
            step = A.sign() * ball.widths
        elif ball.norm == "l1":
            step = one_hot(A.abs().argmax(1), A.shape[1]) * A.sign() * ball.radius
        else:
            step = A / dual_norm(A, "l2").clamp_min(1e-300)[:, None] * ball.radius
        return ball.x - step

    def _project(self, points: Tensor) -> Tensor:
        """Points of the ball in the dtype they are stored in, a little inside: storing them rounds."""
        ball = self.ball
        step, eps = points - ball.x, torch.finfo(self.dtype).eps
        if ball.widths is not None:
            most = (ball.widths * (1 - eps) - eps * ball.x.abs()).clamp_min(0)
            step = torch.maximum(torch.minimum(step, most), -most)
        else:
            order = 2 if ball.norm == "l2" else 1
            around = float(torch.linalg.vector_norm(ball.x, order)) + ball.radius
            largest = max(ball.radius * (1 - 1e-9) - eps * around, 0.0)
            size = torch.linalg.vector_norm(step, order, dim=1, keepdim=True)
            step = step * (largest / size.clamp_min(max(largest, 1e-300)))
        return (ball.x + step).to(self.dtype).double()

    def _descend(self, points: Tensor, clause: Tensor, steps: int) -> None:
        """Descend from some points on the largest value of their clause; the first that breaks it is stored in `broken`."""
        ball = self.ball
        for step in range(steps + 1):
            points = self._project(points).requires_grad_()
            with torch.enable_grad():
                worst = self.claim.values(self.function(points), clause).amax(1)
                (gradient,) = torch.autograd.grad(worst.sum(), points)
            points = points.detach()
            for n in (worst <= 0).nonzero().flatten().tolist():
                if self._breaks(points[n], clause[n]):
                    self.broken = points[n]
                    return
            points = points + 0.25 * (1 - step / (steps + 1)) * (
                self._least(ball, gradient.nan_to_num()) - ball.x
            )

    def _breaks(self, x: Tensor, clause: Tensor) -> bool:
        """Whether x lies in the ball and breaks the clause, rounding included."""
        ball = self.ball
        step = (x - ball.x).abs() * (1 + gamma(len(x) + 16, torch.float64))
        if self.corners is not None:
            inside = bool(((self.corners[0] <= x) & (x <= self.corners[1])).all())
        elif ball.widths is not None:
            inside = bool((step <= ball.widths).all())
        else:
            inside = (
                float(torch.linalg.vector_norm(step, 2 if ball.norm == "l2" else 1)) <= ball.radius
            )
        values, error = self.evaluate(x[None])
        rows = self.claim.rows[self.claim.clauses[clause]]
        upper = self.claim.values(values, clause[None])[0]
        noise = (rows.abs() @ error[0]) + gamma(rows.shape[1] + 16, torch.float64) * (
            rows.abs() @ values[0].abs() + self.claim.offset[self.claim.clauses[clause]].abs()
        )
        return inside and bool((upper + inflate(noise) <= 0).all())


def _numbers(relaxation: Relaxation) -> Part:
    """The free numbers of a relaxation, by name and node."""
    return {(name, i): t for name, part in vars(relaxation).items() for i, t in part.items()}


def _relaxation(parts: Part) -> Relaxation:
    names = vars(Relaxation())
    return Relaxation(
        **{name: {i: t for (own, i), t in parts.items() if own == name} for name in names}
    )
