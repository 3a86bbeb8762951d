"""Attacks on a claimed bound, all in float64: Jacobians by forward differentiation, pairs near and far, gradient ascent.

What is attacked is the real-number map of the stored weights, so a float64 copy of the network stands for it, and what
rounding may have added to a stretch is measured before it counts: Monte Carlo arithmetic (Parker 1997) repeats the evaluation
with every parameter and every result of every operation perturbed by a few units in the last place, and the spread is taken off.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

Norm = Literal["l2", "l1", "linf"]
#: relative size of the perturbations: 16 units in the last place, above the rounding of sums of a few hundred terms
PERTURBATION = 2.0**-48
#: repetitions of the perturbed evaluation, and the multiple of the largest deviation that is taken off
REPEATS, FACTOR = 4, 6.0
#: evaluations that a Jacobian may take at all points together, for a network that takes one sample at a time
ALONE = 120
ORDERS: dict[str, float] = {"l2": 2.0, "l1": 1.0, "linf": math.inf}


class Perturbed(TorchFunctionMode):
    """Monte Carlo arithmetic: parameters and the results of every operation move by a few units in the last place.

    Views keep their memory, so that what is written through them still arrives.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def _factor(self, value: Tensor) -> Tensor:
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
        return 1 + PERTURBATION * (2 * noise - 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation with its parameters moved; move its result unless that shares memory with an operand."""

        def weight(value: Any) -> Any:
            return value * self._factor(value) if isinstance(value, nn.Parameter) else value

        args, kwargs = torch.utils._pytree.tree_map(weight, (args, kwargs or {}))
        out = func(*args, **kwargs)
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        memory = {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, Tensor)}

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.numel() == 0:
                return value
            if value.untyped_storage().data_ptr() in memory:
                return value
            return value * self._factor(value)

        return torch.utils._pytree.tree_map(moved, out)


class Target:
    """The float64 copy of a network as a map from rows of flat inputs `(b, n)` to rows of flat outputs `(b, m)`."""

    def __init__(self, network: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.network = copy.deepcopy(network).double().requires_grad_(False)
        self.shapes = shapes
        self.sizes = [math.prod(s) for s in shapes]
        self.width = sum(self.sizes)
        self.together = all(len(s) > 1 and s[0] == 1 for s in shapes) and self._apart()
        self.backward = True

    def _parts(self, rows: Tensor) -> list[Tensor]:
        pieces = rows.split(self.sizes, 1)
        return [p.reshape(-1, *s[1:]) for p, s in zip(pieces, self.shapes, strict=True)]

    def _apart(self) -> bool:
        """Whether a batch gives what its samples give one by one."""
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(3, self.width, generator=g, dtype=torch.float64)
        try:
            with torch.no_grad():
                together = _flat(self.network(*(p.clone() for p in self._parts(rows))), 3)
        except Exception:  # noqa: BLE001 – a program may run on a batch of one only, and fail in any way on another
            return False
        alone = torch.cat([self.one(row) for row in rows])
        return together.shape == alone.shape and bool(
            torch.allclose(together, alone, rtol=1e-9, atol=1e-12)
        )

    def one(self, row: Tensor) -> Tensor:
        """The outputs of one input, as the network runs it."""
        pieces = row.reshape(1, -1).split(self.sizes, 1)
        inputs = [p.reshape(s).clone() for p, s in zip(pieces, self.shapes, strict=True)]
        return _flat(self.network(*inputs), 1)

    def __call__(self, rows: Tensor) -> Tensor:
        """The outputs of every input."""
        if self.together:
            return _flat(self.network(*(p.clone() for p in self._parts(rows))), len(rows))
        return torch.cat([self.one(row) for row in rows])

    def along(self, rows: Tensor, directions: Tensor) -> Tensor:
        """`J(x)·v` of every row by forward differentiation, which in-place operations do not break."""
        if not self.together and len(rows) > 1:
            return torch.cat(
                [self.along(r[None], v[None]) for r, v in zip(rows, directions, strict=True)]
            )
        with torch.no_grad(), forward_ad.dual_level():
            out = (
                self(forward_ad.make_dual(rows, directions))
                if self.together
                else self.one(forward_ad.make_dual(rows[0], directions[0]))
            )
            tangent = forward_ad.unpack_dual(out).tangent
            return torch.zeros_like(out) if tangent is None else tangent.clone()

    def jacobians(self, rows: Tensor) -> Tensor:
        """The Jacobian at every row, `(b, m, n)`."""
        b, n = rows.shape
        eye = torch.eye(n, dtype=torch.float64)
        slopes = self.along(rows.repeat_interleave(n, 0), eye.repeat(b, 1))
        return slopes.reshape(b, n, -1).mT


def _flat(output: Any, rows: int) -> Tensor:
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    if rows > 1 and any(t.dim() == 0 or t.shape[0] != rows for t in tensors):
        raise ValueError("an output has no batch dimension")
    return torch.cat([t.reshape(rows, -1) for t in tensors], 1).double()


@dataclass(frozen=True)
class Witness:
    """What shows a stretch: a pair of inputs, or an input and a direction; `value` is the ratio less its rounding."""

    kind: Literal["pair", "jacobian"]
    x: Tensor
    y: Tensor
    value: float = 0.0


@dataclass
class Findings:
    """The largest stretch found in each norm by pairs and by Jacobians, with what shows it."""

    best: dict[tuple[str, str], Witness] = field(default_factory=dict)

    def offer(
        self, norm: Norm, values: Tensor, kind: Literal["pair", "jacobian"], x: Tensor, y: Tensor
    ) -> None:
        """Keep the largest finite value."""
        values = torch.where(torch.isfinite(values), values, torch.zeros_like(values))
        i = int(values.argmax())
        value = float(values[i])
        if (norm, kind) not in self.best or value > self.best[norm, kind].value:
            self.best[norm, kind] = Witness(
                kind, x[i].detach().clone(), y[i].detach().clone(), value
            )


def size(rows: Tensor, norm: str) -> Tensor:
    """The norm of every row, without overflow of squares."""
    top = rows.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    return torch.linalg.vector_norm(rows / top, ORDERS[norm], dim=-1) * top[..., 0]


def assault(
    target: Target,
    points: Tensor,
    inside: Callable[[Tensor], Tensor] = lambda rows: rows,
    norms: tuple[Norm, ...] = ("l2",),
    steps: int = 12,
    seed: int = 0,
) -> Findings:
    """The largest stretch found on the domain (`inside` projects to it), from the given points on."""
    findings = Findings()
    g = torch.Generator().manual_seed(seed)
    points = inside(points if target.together else points[: max(2, ALONE // target.width)])
    directions = _through_jacobians(target, points, norms, findings)
    spread = size(points, "l2")[:, None] / math.sqrt(points.shape[1]) + 1e-300
    factors = torch.tensor([1e-4, 1e-2, 0.3, 3.0], dtype=torch.float64)[
        torch.arange(len(points)) % 4, None
    ]
    others = inside(points + spread * factors * directions)
    random = inside(
        points + spread * factors * torch.randn(points.shape, generator=g, dtype=torch.float64)
    )
    for y in (others, random, points[torch.randperm(len(points), generator=g)]):
        _pairs(target, points, y, norms, findings)
    if "l2" in norms and steps:
        x, y = _ascended(target, points, others, inside, steps, findings)
        _through_jacobians(target, torch.cat([x, y])[: len(points)], norms, findings)
    return findings


def _through_jacobians(
    target: Target, points: Tensor, norms: tuple[Norm, ...], findings: Findings
) -> Tensor:
    """Norms of the Jacobians at the points; the steepest directions."""
    n = points.shape[1]
    g = torch.Generator().manual_seed(1)
    fallback = torch.randn(points.shape, generator=g, dtype=torch.float64)
    fallback = fallback / size(fallback, "l2")[:, None]
    try:
        J = target.jacobians(points)
    # no forward derivative of some operation: pairs only
    except (
        RuntimeError,
        NotImplementedError,
    ):
        return fallback
    keep = torch.isfinite(J).flatten(1).all(1)
    if not bool(keep.any()):
        return fallback
    J, x = J[keep], points[keep]
    top = J.abs().amax((1, 2), keepdim=True).clamp_min(1e-300)
    _, s, Vh = torch.linalg.svd(J / top, full_matrices=False)
    steepest = Vh[:, 0]
    if "l2" in norms:
        findings.offer("l2", s[:, 0] * top.flatten(), "jacobian", x, steepest)
    if "l1" in norms:
        sums = J.abs().sum(1)
        findings.offer(
            "l1",
            sums.amax(1),
            "jacobian",
            x,
            torch.nn.functional.one_hot(sums.argmax(1), n).double(),
        )
    if "linf" in norms:
        sums = J.abs().sum(2)
        rows = J[torch.arange(len(J)), sums.argmax(1)]
        findings.offer(
            "linf", sums.amax(1), "jacobian", x, torch.where(rows < 0, -1.0, 1.0).double()
        )
    directions = fallback.clone()
    directions[keep] = steepest
    return directions


def _pairs(
    target: Target, x: Tensor, y: Tensor, norms: tuple[Norm, ...], findings: Findings
) -> None:
    with torch.no_grad():
        change, gap = target(x) - target(y), x - y
    for norm in norms:
        apart = size(gap, norm)
        findings.offer(
            norm,
            torch.where(apart > 0, size(change, norm) / apart.clamp_min(1e-300), 0.0),
            "pair",
            x,
            y,
        )


def _ascended(
    target: Target,
    x: Tensor,
    y: Tensor,
    inside: Callable[[Tensor], Tensor],
    steps: int,
    findings: Findings,
) -> tuple[Tensor, Tensor]:
    """Pairs that climb the logarithm of their stretch; every step is an attack in its own right."""
    scale = (size(x, "l2") / math.sqrt(x.shape[1]) + 1e-300)[:, None]
    u, w = (x / scale).requires_grad_(), (y / scale).requires_grad_()
    optimiser = torch.optim.Adam([u, w], lr=0.05)
    for _ in range(steps):
        a, b = inside(u * scale), inside(w * scale)
        try:
            change = target(a) - target(b)
            top = change.detach().abs().amax(1).clamp_min(1e-300)
            ratio = (
                (change / top[:, None]).norm(dim=1)
                * top
                / size((a - b).detach(), "l2").clamp_min(1e-300)
            )
            findings.offer("l2", torch.where((a == b).all(1), 0.0, ratio.detach()), "pair", a, b)
            far = ((a - b) / scale).norm(dim=1)
            loss = -(
                (change / top[:, None]).norm(dim=1).clamp_min(1e-30).log()
                - far.clamp_min(1e-6).log()
            ).nan_to_num()
            optimiser.zero_grad()
            loss.sum().backward()
        except RuntimeError:  # an in-place operation overwrote what the gradient needs
            break
        for p in (u, w):
            if p.grad is not None:
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimiser.step()
    return inside(u.detach() * scale), inside(w.detach() * scale)


def confirmed(target: Target, witness: Witness, norm: Norm) -> Witness:
    """The witness with its ratio evaluated alone and what rounding may have added taken off."""

    def change() -> Tensor:
        if witness.kind == "pair":
            with torch.no_grad():
                return target.one(witness.x) - target.one(witness.y)
        alone = copy.copy(target)
        alone.together = False
        return alone.along(witness.x[None], witness.y[None])

    plain = change()
    deviation = 0.0
    for repeat in range(REPEATS):
        with Perturbed(repeat):
            moved = change()
        deviation = max(deviation, float(size(moved - plain, norm)))
    gap = witness.x - witness.y if witness.kind == "pair" else witness.y
    apart = float(size(gap[None], norm)) * (1 + 1e-14)
    value = (float(size(plain, norm)) - FACTOR * deviation) / apart if apart > 0 else 0.0
    return Witness(witness.kind, witness.x, witness.y, value if math.isfinite(value) else 0.0)
