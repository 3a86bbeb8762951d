"""Branch and bound: parts of a ball on which the relaxation proves nothing are split until it does, or an input breaks the claim.

The claim: `rows·f(x) > offset` for all rows at every point of the ball; for a robust classifier the rows are `f_y − f_k`.

*Parts.* A neuron of a hinge that may switch is split by the sign of its input z_j: on one part `z_j ≥ 0`, on the other
`z_j ≤ 0`. A part is bounded like the ball (`slopes`), with the interval of z_j cut at 0. There the hinge is linear, and a row g
that differs from the exact one to the side that the cut allows costs nothing: this difference is the multiplier of β-CROWN,
and like every g it is valid whatever its value.

*Broken.* A point inside the ball with `rows·f(x) ≤ offset`, by values in float64 with their rounding added.

References: Wang et al. 2021 (β-CROWN); De Palma et al. 2021 (splits chosen by a bound of both parts).
"""

import time
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equipoise.core.precision import gamma, inflate
from equipoise.lipschitz.capture import as_function
from equipoise.lipschitz.local.backward import Ball, dual_norm
from equipoise.lipschitz.local.curves import Hinge
from equipoise.lipschitz.local.slopes import Relaxation, optimise, relaxed_bounds, usual_slopes
from equipoise.lipschitz.rounding import Rounding
from equipoise.lipschitz.rules.registry import shape_of

#: parts of the ball: by name and node, one row for each
Parts = dict[tuple[str, int], Tensor]

#: parts that are split together, and entries of their rows at the widest node
BATCH, ENTRIES = 128, 1_000_000
#: neurons that are tried for a split
CANDIDATES = 6
#: how often parts without a neuron to split are bounded again
REPEATS = 30
#: steps of Adam on the ball and on a part of it, and the first of them on a part
WHOLE_STEPS, STEPS, RATE = 50, 20, 0.04
#: starts and gradient steps of an attack, and steps from a part
STARTS, ATTACK_STEPS, PART_STEPS = 8, 100, 5


@dataclass
class Attack:
    """Gradient descent on a ball for an input that breaks a claim.

    Args:
        ball: in one of the norms, or a box.
        rounding: of the network, which gives its values with bounds of their rounding.
        dtype: in which an input is stored.
    """

    ball: Ball
    rounding: Rounding
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.program = self.rounding.run.program
        self.function = as_function(self.program)

    def _inputs(self, points: Tensor) -> Tensor:
        """Flat points as a batch of inputs."""
        return points.reshape(-1, *shape_of(self.program.inputs[0])[1:])

    def everywhere(self, rows: Tensor, offset: Tensor, steps: int = ATTACK_STEPS) -> Tensor | None:
        """An input of the ball with `rows·f ≤ offset` for all rows, from random points; None where none was met.

        Args:
            rows: (rows, outputs).
            offset: (rows,).
            steps: of descent.
        """
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(STARTS, len(self.ball.x), generator=generator, dtype=torch.float64)
        claim = rows.expand(STARTS, -1, -1), offset.expand(STARTS, -1)
        return self.descend(self.least(noise), *claim, steps)

    def any_of(self, rows: Tensor) -> Tensor | None:
        """An input of the ball with `row·f ≤ 0` for one of the rows (rows, outputs); None where none was met."""
        found = (self.everywhere(row[None], torch.zeros(1, dtype=torch.float64)) for row in rows)
        return next((point for point in found if point is not None), None)

    def descend(self, points: Tensor, rows: Tensor, offset: Tensor, steps: int) -> Tensor | None:
        """The same from given points, each with its own rows (points, rows, outputs) and offsets (points, rows).

        Args:
            points: (points, inputs).
            rows: of every point.
            offset: of every point.
            steps: of descent.
        """
        for step in range(steps + 1):
            points = self._project(points).requires_grad_()
            with torch.enable_grad():
                values = (
                    torch.einsum("nro,no->nr", rows, self.function(self._inputs(points))) - offset
                )
                worst = values.amax(1)
                (gradient,) = torch.autograd.grad(worst.sum(), points)
            points = points.detach()
            for n in (worst <= 0).nonzero().flatten().tolist():
                if self._breaks(points[n], rows[n], offset[n]):
                    return points[n]
            length = 0.25 * (1 - step / (steps + 1))
            points = points + length * (self.least(gradient.nan_to_num()) - self.ball.x)
        return None

    def least(self, A: Tensor) -> Tensor:
        """Where on the ball `A·x` is least, for every row."""
        ball = self.ball
        if ball.norm == "linf":
            step = A.sign() * (ball.radius if ball.widths is None else ball.widths)
        elif ball.norm == "l1":
            step = one_hot(A.abs().argmax(1), A.shape[1]) * A.sign() * ball.radius
        else:
            step = A / dual_norm(A, "l2").clamp_min(1e-300)[:, None] * ball.radius
        return ball.x - step

    def _project(self, points: Tensor) -> Tensor:
        """Points of the ball in the dtype they are stored in, a little inside: storing them rounds."""
        ball, eps = self.ball, torch.finfo(self.dtype).eps
        step = points - ball.x
        if ball.norm == "linf":
            radius = ball.radius if ball.widths is None else ball.widths
            most = (radius * (1 - 1e-9) - eps * ball.x.abs()).clamp_min(0)
            step = torch.maximum(torch.minimum(step, most), -most)
        else:
            order = 2 if ball.norm == "l2" else 1
            around = float(torch.linalg.vector_norm(ball.x, order)) + ball.radius
            longest = max(ball.radius * (1 - 1e-9) - eps * around, 1e-300)
            size = torch.linalg.vector_norm(step, order, dim=1, keepdim=True)
            step = step * (longest / size.clamp_min(longest))
        return (ball.x + step).to(self.dtype).double()

    def _breaks(self, x: Tensor, rows: Tensor, offset: Tensor) -> bool:
        """Whether x lies in the ball and breaks the claim, rounding included."""
        ball = self.ball
        step = (x - ball.x).abs() * (1 + gamma(len(x) + 16, torch.float64))
        order = {"l2": 2, "l1": 1, "linf": inf}[ball.norm]
        inside = (
            float(torch.linalg.vector_norm(step, order)) <= ball.radius
            if ball.widths is None
            else bool((step <= ball.widths).all())
        )
        values, error = (t[0] for t in self.rounding.evaluate(self._inputs(x)))
        size = rows.abs() @ values.abs() + offset.abs()
        noise = rows.abs() @ error + gamma(len(values) + 16, torch.float64) * size
        return inside and bool((rows @ values - offset + inflate(noise) <= 0).all())


@dataclass
class Branching:
    """The search for a proof on the ball of an attack, or for an input that breaks the claim.

    Args:
        attack: on the ball, with all nodes enclosed.
        rows: (rows, outputs).
        offset: (rows,).
        deadline: of `time.process_time()`.
    """

    attack: Attack
    rows: Tensor
    offset: Tensor
    deadline: float = inf
    repeated: int = 0
    broken: Tensor | None = None

    def decide(self) -> bool | None:
        """Whether the claim holds; None where that stays open. `broken` is an input that breaks it, if it does not."""
        ball = self.attack.ball
        usual = usual_slopes(ball, ball.network.last, len(self.rows))
        usual.shift = {i: torch.zeros_like(t) for i, t in usual.lower.items()}
        parts = _numbers(usual) | {("row", 0): torch.arange(len(self.rows))}
        for s, _ in self._hinges.values():
            parts["low", s] = ball.low[s].expand(len(self.rows), -1)
            parts["high", s] = ball.high[s].expand(len(self.rows), -1)

        parts = self._open(parts, WHOLE_STEPS, None)
        batch = max(1, min(BATCH, ENTRIES // (2 * ball.network.widest)))
        while self.broken is None and len(parts["row", 0]):
            last = {name: t[-batch:] for name, t in parts.items()}
            # where nothing is left to split, more steps may do
            self.repeated += int((last["score", 0][:, 0] == 0).any())
            if self.repeated > REPEATS or time.process_time() > self.deadline:
                return None
            more = self._open(self._split(last, self._best(last)), STEPS, RATE)
            parts = {name: torch.cat([t[:-batch], more[name]]) for name, t in parts.items()}
        return self.broken is None

    @property
    def _hinges(self) -> dict[int, tuple[int, Hinge]]:
        """Source and curve of every activation that can be split."""
        nodes = self.attack.ball.network.activations.items()
        return {i: (a.source, a.curve) for i, a in nodes if isinstance(a.curve, Hinge)}

    def _ball(self, parts: Parts) -> tuple[Ball, Relaxation]:
        """The ball with the intervals of every part, and the free numbers of their bounds."""
        whole = self.attack.ball
        low, high, lines = list(whole.low), list(whole.high), dict(whole.lines)
        for i, (s, curve) in self._hinges.items():
            low[s], high[s] = parts["low", s], parts["high", s]
            lines[i] = curve.lines(low[s], high[s])
        numbers = {
            n: {i: t for (own, i), t in parts.items() if own == n} for n in vars(Relaxation())
        }
        return replace(whole, low=low, high=high, lines=lines), Relaxation(**numbers)

    def _open(self, parts: Parts, steps: int, rate: float | None) -> Parts:
        """Bound some parts; those on which nothing is proved, with the neurons that may be split."""
        ball, start = self._ball(parts)
        last, index = ball.network.last, parts["row", 0]
        rows, offset = self.rows[index], self.offset[index]
        bounds, relaxation = optimise(
            ball, last, rows, start, steps=steps, rate=rate, enough=offset, deadline=self.deadline
        )
        arrived: dict[int, Tensor] = {}
        relaxed_bounds(ball, last, rows, relaxation, arrived)
        scores = [torch.zeros(len(rows), CANDIDATES, dtype=torch.float64)]
        for i, (s, _) in self._hinges.items():
            # how far the chord is above the hinge, times the coefficient
            a, b = ball.low[s].clamp_max(0), ball.high[s].clamp_min(0)
            height = -a * b / (b - a).clamp_min(1e-300)
            scores.append(arrived[i].abs() * height if i in arrived else 0 * height)
        parts = parts | _numbers(relaxation)
        parts["score", 0], parts["neuron", 0] = torch.cat(scores, 1).topk(CANDIDATES)
        open_ = bounds <= offset
        if open_.any():
            starts = self.attack.least(arrived[0][open_])
            claim = rows[open_][:, None], offset[open_][:, None]
            self.broken = self.attack.descend(starts, *claim, PART_STEPS)
        return {name: t[open_] for name, t in parts.items()}

    def _best(self, parts: Parts) -> Tensor:
        """The neuron of every part whose split leaves the least open, by the bounds with the slopes at hand."""
        tried = {name: t.repeat_interleave(CANDIDATES, 0) for name, t in parts.items()}
        both = self._split(tried, parts["neuron", 0].flatten(), once=False)
        ball, relaxation = self._ball(both)
        index = both["row", 0]
        bounds = relaxed_bounds(ball, ball.network.last, self.rows[index], relaxation)
        left = (bounds - self.offset[index]).clamp_max(0).reshape(2, -1, CANDIDATES).sum(0)
        best = left.masked_fill(parts["score", 0] == 0, -inf).argmax(1, keepdim=True)
        return parts["neuron", 0].gather(1, best)[:, 0]

    def _split(self, parts: Parts, neuron: Tensor, once: bool = True) -> Parts:
        """Every part with the input of one neuron at least 0, then again with it at most 0: the hinge has one slope on each.

        With `once`, parts without such a neuron are not made twice.
        """
        made = {name: torch.cat([t, t]) for name, t in parts.items()}
        neuron = torch.cat([neuron, neuron])
        at = CANDIDATES  # the first scores belong to no neuron
        for i, (s, curve) in self._hinges.items():
            n = made["low", s].shape[1]
            here = ((neuron >= at) & (neuron < at + n)).nonzero().flatten()
            j, active = neuron[here] - at, here < len(neuron) // 2
            ends = made["low", s][here, j], made["high", s][here, j]
            made["low", s][here, j] = torch.where(active, 0.0, ends[0])
            made["high", s][here, j] = torch.where(active, ends[1], 0.0)
            slope = torch.where(active, curve.right.expand(n)[j], curve.left.expand(n)[j])
            made["lower", i][here, j] = slope
            made["upper", i][here, j] = slope
            at += n
        kept = (neuron >= CANDIDATES) | (torch.arange(len(neuron)) < len(neuron) // 2)
        return {name: t[kept] for name, t in made.items()} if once else made


def _numbers(relaxation: Relaxation) -> Parts:
    """The free numbers of a relaxation, by name and node."""
    return {(name, i): t for name, part in vars(relaxation).items() for i, t in part.items()}
