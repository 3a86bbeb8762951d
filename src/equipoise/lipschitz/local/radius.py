"""`certified_radius`: how far can this input move before its decision may change? Proved, for any network with a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused, require_one_of
from equipoise.core.precision import deflate, full_precision, inflate
from equipoise.lipschitz.capture import as_examples, capture
from equipoise.lipschitz.chains import chain_total
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.local.backward import Norm, enclose_ball
from equipoise.lipschitz.local.graph import Network, Unsupported, read_network
from equipoise.lipschitz.local.integral import Case, integral_radius, relaxed_radius, together_radius
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.report import pair_constants
from equipoise.lipschitz.rounding import Rounding
from equipoise.norms.spectral import Cache

Effort = Literal["auto", "fast", "relaxation", "integral"]
#: `effort="auto"` leaves the relaxation out of networks with more neurons than this
NEURONS = 20_000
#: the largest radius that is looked for
LARGEST = 1e30

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Radii:
    """Per sample: a proved radius, the rival that limits it, and the method that proved it.

    `margins` are the proved margins at the inputs themselves (against `rivals`); `note` says what was left out, and why.
    `deployed`: the radii hold for the network as it is evaluated in its own dtype, too, not only for the real function.
    """

    radius: Tensor
    labels: Tensor
    rivals: Tensor
    margins: Tensor
    methods: tuple[str, ...]
    norm: Norm = "l2"
    seconds: tuple[float, ...] = field(default=(), compare=False)
    note: str = ""
    deployed: bool = False

    def __len__(self) -> int:
        return len(self.radius)

    def accuracy(self, epsilon: float) -> float:
        """Share of the inputs that keep their label within `epsilon` (`R ≥ ε` and `R > 0`)."""
        return float(((self.radius >= epsilon) & (self.radius > 0)).double().mean())


def certified_radius(
    model: nn.Module,
    x: Tensor,
    labels: Tensor | None = None,
    *,
    norm: Norm = "l2",
    effort: Effort = "auto",
    seconds: float | None = None,
    rtol: float = 1e-3,
    deployed: bool = True,
    progress: Progress | None = None,
) -> Radii:
    """The largest proved radius per sample: no input strictly within it is given another label than `labels`.

    `f_y(x') > f_k(x')` for all k ≠ y and all `‖x' − x‖ < R`, by the best of

    * `global`: `min_k (f_y − f_k)(x)/(√2·L)`, L the network's bound;
    * `pairs`: `min_k (f_y − f_k)(x)/(L'·‖w_y − w_k‖)`, w the rows of the last layer and L' the bound of what comes before it
      (what a 1-Lipschitz network is made for);
    * `relaxation`: backward linear relaxation of all margins on the ball (ℓ2, ℓ∞ and ℓ1);
    * `integral`: local constants of every margin, proved by multipliers, summed along the radius (ℓ2);
    * `multipliers`: one local constant of all margins together, where more neurons may switch than the integral takes (ℓ2).

    Guarantee: for the real-number map of the captured graph with the stored weights, rounding of the margins and of every
    bound included; and for the network as it is evaluated in its own dtype, whose rounding at every point of the ball is
    bounded and taken off the margins (`lipschitz.rounding` says in which model of arithmetic). Where that rounding is not
    known, `Radii.deployed` is False, the note says why, and the radii are about the real function alone.

    Args:
        model: a classifier in evaluation mode whose output has shape (batch, classes).
        x: a batch of inputs.
        labels: (batch,), by default the network's own decisions. A sample that is not classified as labelled has radius 0.
        norm: of the ball: `l2`, `linf` or `l1`. What is proved in ℓ2 counts in the others as far as the norms compare.
        effort: `fast` (global and pairs), `relaxation`, `integral`, or `auto`: all that the network's size allows, and a
            note about the rest.
        seconds: budget per sample; when it ends, the best radius proved so far is returned.
        rtol: relative gap asked of every operator norm.
        deployed: whether to cover the rounding of the forward pass on the whole ball.
        progress: called with (done, total) after every sample.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> _ = net[0].weight.data.copy_(torch.eye(2))
    >>> certified_radius(net, torch.tensor([[3.0, 1.0]])).radius.numpy().round(4).tolist()
    [1.4142]

    References: Tsuzuku et al. 2018 (global, pairs); Zhang et al. 2018 (relaxation); Fazlyab et al. 2019 (multipliers).
    """
    (x,) = as_examples(x)
    if x.dim() < 2 or not bool(torch.isfinite(x).all()):
        raise InputError(f"x needs a batch dimension and finite values, got shape {tuple(x.shape)}")
    require_one_of(get_args(Norm), norm=norm)
    require_one_of(get_args(Effort), effort=effort)
    if seconds is not None and not seconds > 0:
        raise InputError(f"seconds must be positive, got {seconds}")
    program = capture(model, x[:1])
    shapes = [tuple(o.meta["val"].shape) for o in program.outputs]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][1] < 2:
        raise InputError(f"a classifier has one output (batch, classes ≥ 2), this model's output has shape {shapes}")
    if labels is not None and (labels.shape != x.shape[:1] or bool(((labels < 0) | (labels >= shapes[0][1])).any())):
        raise InputError(f"labels must be {len(x)} integers from 0 to {shapes[0][1] - 1}")
    with torch.no_grad(), full_precision():
        run = propagate(program, None, rtol, cache := Cache(rtol))
        certifier = Certifier.of(run, cache, norm, effort, deployed)
        found = []
        for i, sample in enumerate(x):
            began = time.monotonic()
            label = None if labels is None else int(labels[i])
            deadline = math.inf if seconds is None else began + seconds
            found.append((*certifier.certify(sample[None], label, deadline), time.monotonic() - began))
            if progress is not None:
                progress(i + 1, len(x))
    radius, label_, rival, margin, methods, took = zip(*found, strict=True)
    numbers = {"radius": radius, "margins": margin}
    return Radii(
        **{k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()},
        labels=torch.tensor(label_),
        rivals=torch.tensor(rival),
        methods=tuple(methods),
        norm=norm,
        seconds=tuple(took),
        note=certifier.note,
        deployed=deployed and certifier.rounding is not None,
    )


Found = tuple[float, int, int, float, str]


@dataclass
class Certifier:
    """What is the same for all samples: the global constants per pair of classes, and the network if it can be read."""

    run: Propagation
    cache: Cache
    norm: Norm
    effort: Effort
    network: Network | None
    whole: float
    pairs: Tensor | None
    note: str
    rounding: Rounding | None = None
    deployed: bool = True

    @classmethod
    def of(cls, run: Propagation, cache: Cache, norm: Norm, effort: Effort, deployed: bool = True) -> Certifier:
        """Read the network and take its global constants."""
        network, note, rounding = None, "", None
        try:
            network = read_network(run, cache)
        except Unsupported as reason:
            note = f"global bounds only: {reason}"
        if network is not None and effort == "auto" and network.neurons > NEURONS:
            note = (
                f"global bounds only: {network.neurons:,} neurons are too many for the relaxation to be tried "
                "unasked; effort='relaxation' tries"
            )
            effort = "fast"
        try:
            rounding = Rounding.of(run, cache)
        except Refused as reason:
            if deployed:
                note = f"{note}; " * bool(note) + f"about the real function alone, its evaluation may round: {reason}"
        chain = chain_total(run)
        whole = exp_up(min(run.fused, math.inf if chain is None else chain))
        return cls(run, cache, norm, effort, network, whole, pair_constants(run), note, rounding, deployed)

    def certify(self, x: Tensor, label: int | None, deadline: float) -> Found:
        """Radius, label, rival, margin and method of one sample."""
        logits, slip = self.logits(x)
        label = int(logits.argmax()) if label is None else label
        others = [k for k in range(len(logits)) if k != label]
        gap = logits[label] - logits[others] - inflate(slip[label] + slip[others])
        gap = gap - 2.0**-50 * (gap.abs() + logits.abs().max() * 2)
        first = int(gap.argmin())
        if not float(gap[first]) > 0:
            return 0.0, label, others[first], float(gap[first]), "not classified as labelled"
        radius, at, method = self._global(gap, label, others, x.numel())
        if self.rounding is not None and self.deployed:
            radius, at, method = self._evaluated(x, gap, label, others, radius)
        if self.network is not None and self.effort != "fast" and 0 < radius < LARGEST:
            better = self._local(x, gap, label, others, deadline, radius)
            if better[0] > radius:
                radius, at, method = better
        return radius, label, others[at], float(gap[at]), method

    def _lost(self, x: Tensor, radius: float, label: int, others: list[int]) -> Tensor:
        """What a forward pass may take off every margin at inputs within `radius`; 0 where only real functions are meant."""
        if self.rounding is None or not self.deployed:
            return torch.zeros(len(others), dtype=torch.float64)
        off = self.rounding.deployed(x, inflate(radius * self._share(x.numel())))[0]
        return inflate(off[label] + off[others])

    def _share(self, entries: int) -> float:
        """ℓ2 length of what is 1 long in the norm of the ball, at most."""
        return math.sqrt(entries) * (1 + 2.0**-50) if self.norm == "linf" else 1.0

    def _evaluated(
        self, x: Tensor, gap: Tensor, label: int, others: list[int], radius: float
    ) -> tuple[float, int, str]:
        """By global constants, with margins that outlast the rounding of a forward pass anywhere in the ball."""
        best = (0.0, int(gap.argmin()), "rounding exceeds the margin")
        cap = radius
        for _ in range(8):
            left = _less(gap, self._lost(x, cap, label, others))
            if float(left.min()) > 0:
                found = self._global(left, label, others, x.numel())
                best = max(best, (min(found[0], cap), *found[1:]))
            if best[0] >= cap / 2:
                break
            cap /= 16  # the rounding grows with the ball: a smaller one may keep more
        return best

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The exact logits lie within the second tensor of the first."""
        if self.network is not None:
            ball = enclose_ball(self.network, x, 0.0, "l1", most_rows=0)
            if ball is not None:
                return ball.centre[-1], ball.slip[-1]
        if self.rounding is not None:
            found = self.rounding(x)
            return found.values[0], found.error[0]
        box = enclose(self.run, x, 1e-300, self.cache)[self.run.program.outputs[0]]
        if box.mid is None or not math.isfinite(box.rho):
            raise Refused(
                "the rounding of this network's forward pass is not bounded, so its margins are not known; bound the network "
                "with lipschitz_bound and use equipoise.nn.certified_radius(logits, labels, bound, tolerance=…)"
            )
        return box.mid.flatten(), torch.full_like(box.mid.flatten(), box.rho)

    def _global(self, gap: Tensor, label: int, others: list[int], entries: int) -> tuple[float, int, str]:
        """By constants of the whole space, in ℓ2, and what they say in the norm asked for."""
        share = self._share(entries)
        constants = {"global": torch.full_like(gap, inflate(math.sqrt(2) * self.whole))}
        if self.pairs is not None:
            constants["pairs"] = self.pairs[label][others]
        best = (-1.0, 0, "")
        for method, constant in constants.items():
            radii = torch.where(constant > 0, deflate(gap / inflate(constant * share)), math.inf).clamp_max(LARGEST)
            if float(radii.min()) > best[0]:
                best = float(radii.min()), int(radii.argmin()), method
        return best

    def _local(
        self, x: Tensor, gap: Tensor, label: int, others: list[int], deadline: float, known: float
    ) -> tuple[float, int, str]:
        """By the relaxation, and in ℓ2 by the integral."""
        assert self.network is not None
        eye = torch.eye(len(gap) + 1, dtype=torch.float64)
        covers = self.rounding is not None and self.deployed
        lost = (lambda radius: self._lost(x, radius, label, others)) if covers else None
        case = Case(self.network, x, eye[label] - eye[others], gap, self.norm, deadline=deadline, lost=lost)
        radius = relaxed_radius(case, max(known, 1e-12) * 2)
        worst = int(case.relaxed(radius).argmin()) if radius > 0 else int(gap.argmin())
        found = radius, worst, "relaxation"
        base = max(radius, known)
        if self.norm == "l2" and self.effort != "relaxation" and time.monotonic() < deadline:
            more, limiting = integral_radius(case, base)
            if more > base:
                found = more, limiting, "integral"
            elif (more := together_radius(case, base)) > base:
                found = more, worst, "multipliers"
        return found


def _less(gap: Tensor, lost: Tensor) -> Tensor:
    """`gap − lost`, rounded down."""
    return torch.where(lost > 0, gap - lost - 2.0**-50 * (gap.abs() + lost), gap)
