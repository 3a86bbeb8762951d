"""`certified_radius`: how far can this input move before its decision may change? Proved, for any network with a bound.

This module is the only certified-radius engine for fixed networks: `certified_radius` for a batch in memory, and `Certifier`
for callers that capture a network once and send it batch after batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from equipoise.core import (
    InputError,
    Refused,
    Shape,
    deflate,
    float64,
    frobenius,
    inflate,
    proving,
    require_labels,
    require_one_of,
    require_positive,
)
from equipoise.lipschitz.capture import Program, as_batch, capture
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.induced import induced_pairs
from equipoise.lipschitz.local.backward import Ball, Norm
from equipoise.lipschitz.local.branch import Attack, Branching
from equipoise.lipschitz.local.graph import Network, Unsupported, read_network
from equipoise.lipschitz.local.integral import (
    Case,
    integral_radius,
    less,
    multipliers_prove,
    relaxed_radius,
)
from equipoise.lipschitz.local.measure import whole_bound
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.report import pair_constants
from equipoise.lipschitz.rounding import Rounding
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.norms.spectral import Cache

Effort = Literal["auto", "fast", "relaxation", "integral"]
Deployed = Literal["float32"]
Progress = Callable[[int, int], None]

#: `effort="auto"` leaves the relaxation out of networks with more neurons than this
NEURONS = 20_000
#: the largest radius that is looked for
LARGEST = 1e30
#: and the smallest that boxes are tried at
_SMALLEST = 1e-12
#: what `Radii.methods` says of an input without a radius
WRONG, UNPROVED = "not classified as labelled", "classified as labelled, nothing proved"

#: balls on which the rounding of the deployed pass is bounded
_TRIES = 10


@dataclass(frozen=True)
class Radii:
    """Per sample: a proved radius, the rival that limits it, and the method that proved it.

    `radius` is about the real function of the stored weights: its margins are evaluated in float64 with their rounding
    covered. `deployed` holds the radii for a forward pass in float32, where they were asked for. `predictions` are the
    classes with the largest value; an input can be classified as labelled with nothing proved (`right`, radius 0). `margins`
    are those at the inputs against `rivals`: proved (rounded down) where the radius is positive, else as evaluated.
    `note` says what was left out, and why. Where one radius `epsilon` was asked about, `verdicts` has the answers, and
    `broken` an input of that ball, by sample, at which another class is proved to be at least as large as the label.
    """

    radius: Tensor
    labels: Tensor
    predictions: Tensor
    rivals: Tensor
    margins: Tensor
    methods: tuple[str, ...]
    norm: Norm = "l2"
    seconds: tuple[float, ...] = field(default=(), compare=False)
    note: str = ""
    deployed: Tensor | None = None
    epsilon: float | None = None
    broken: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.radius)

    @property
    def right(self) -> Tensor:
        """Whether the label has the largest value, whatever was proved."""
        return self.predictions == self.labels

    @property
    def verdicts(self) -> tuple[str, ...]:
        """`proved`, `broken` or `undecided` at `epsilon`, for every sample."""
        epsilon = inf if self.epsilon is None else self.epsilon
        return tuple(
            "proved" if radius >= epsilon else "broken" if n in self.broken else "undecided"
            for n, radius in enumerate(self.radius.tolist())
        )

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
    epsilon: float | None = None,
    complete: bool = False,
    seconds: float | None = None,
    rtol: float = 1e-3,
    deployed: Deployed | None = None,
    progress: Progress | None = None,
) -> Radii:
    """The largest proved radius per sample: no input strictly within it is given another label than `labels`.

    `f_y(x') > f_k(x')` for all k ≠ y and all `‖x' − x‖ < R`, by the best of

    * `global`: `min_k (f_y − f_k)(x)/(√2·L)`, L the network's bound;
    * `pairs`: `min_k (f_y − f_k)(x)/(L'·‖w_y − w_k‖)`, w the rows of the last layer and L' the bound of what comes before it
      (what a 1-Lipschitz network is made for);
    * `linf`, `l1`: the same with product bounds in those norms, `margin/(2·L_∞)` and `margin/L_1`, or by pairs;
    * `boxes`: the same with constants of a ball, where the methods below do not read the network (attention, layer norms), or
      it has no others (gates, powers): radii then go up to the length of the input;
    * `relaxation`: backward linear relaxation of all margins on the ball (ℓ2, ℓ∞ and ℓ1), with optimised slopes and, in ℓ2, on
      the ball that every layer stays in;
    * `integral`: local constants of every margin, proved by multipliers, summed along the radius (ℓ2);
    * `branching`: the relaxation on parts of the ball, with `complete`.

    Guarantee: for the real function of the stored weights. Its margins are evaluated in float64, and the rounding of that
    evaluation and of every bound is covered. `deployed="float32"` adds radii for the network as it runs in float32, whose
    rounding at every point of the ball is bounded and taken off the margins (`lipschitz.rounding` says in which model of
    arithmetic); these are smaller, and 0 where a float32 pass may be off by more than the margin.

    Args:
        model: a classifier in evaluation mode whose output has shape (batch, classes).
        x: a batch of inputs.
        labels: (batch,), by default the network's own decisions. A sample that is not classified as labelled has radius 0.
        norm: of the ball: `l2`, `linf` or `l1`. What is proved in one norm counts in the others as far as the norms compare.
        effort: `fast` (constants of the whole space), `relaxation`, `integral`, or `auto`: all that the network's size allows.
            What is left out is said in the note.
        epsilon: the only radius asked about: methods are tried from cheap to tight until one proves it, and the radius
            returned is at least `epsilon`, or roughly what the relaxation proves. Much faster than the largest radius.
        complete: with `epsilon`, go on until the radius is proved or broken: search for an input of the ball with another
            label, and split the ball by the signs of neurons until every part is proved (`Radii.verdicts`, `Radii.broken`).
            For small networks of ReLU kind, with `seconds`.
        seconds: budget per sample, in seconds of processor time; when it ends, the best radius proved so far is returned.
        rtol: relative gap asked of every operator norm.
        deployed: `"float32"` also bounds the radius of the network evaluated in float32.
        progress: called with (done, total) after every sample.

    Returns:
        Radii of all samples, with labels, rivals, methods and the note.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> _ = net[0].weight.data.copy_(torch.eye(2))
    >>> certified_radius(net, torch.tensor([[3.0, 1.0]])).radius.numpy().round(4).tolist()
    [1.4142]

    References: Tsuzuku et al. 2018 (global, pairs); Zhang et al. 2018 (relaxation); Fazlyab et al. 2019 (multipliers).
    """
    x = as_batch(x)
    certifier = Certifier.of(model, x[:1], norm=norm, effort=effort, rtol=rtol, deployed=deployed)
    return certifier.radii(
        x, labels, epsilon=epsilon, complete=complete, seconds=seconds, progress=progress
    )


@dataclass
class Certifier:
    """A network, captured and bounded once: `radii` certifies batch after batch of inputs.

    `constants` holds, by method, upper bounds of the constants of `f_i − f_j` (classes, classes) in the norm of the ball, good
    for radii up to `largest`. Where the network has constants of balls only, every sample gets a certifier of its own.
    """

    run: Propagation
    largest: float
    cache: Cache
    norm: Norm
    effort: Effort
    classes: int
    deployed: Deployed | None = None
    rounding: Rounding = field(init=False)
    constants: dict[str, Tensor] = field(init=False, default_factory=dict)
    network: Network | None = field(init=False, default=None)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module | ExportedProgram,
        example: Tensor,
        *,
        norm: Norm = "l2",
        effort: Effort = "auto",
        rtol: float = 1e-3,
        deployed: Deployed | None = None,
    ) -> Certifier:
        """Capture the network on one input, read it, and take its constants.

        Args:
            model: as for `certified_radius`.
            example: a batch of one input.
            norm: of the balls.
            effort: which methods to try.
            rtol: relative gap asked of every operator norm.
            deployed: `"float32"`: also radii of the network evaluated in float32.
        """
        require_one_of(Norm, norm=norm)
        require_one_of(Effort, effort=effort)
        if deployed is not None:
            require_one_of(Deployed, deployed=deployed)
        program = capture(model, example)
        shapes = list(map(shape_of, program.outputs))
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][1] < 2:
            raise InputError(
                f"a classifier has one output (batch, classes ≥ 2), this model's output has shape {shapes}"
            )

        cache = Cache(rtol)
        with proving():
            try:
                run, largest = propagate(program, None, rtol, cache), LARGEST
            except Refused:
                run, largest = _on_ball(program, cache, norm, example)
            return cls(run, largest, cache, norm, effort, shapes[0][1], deployed)

    def __post_init__(self) -> None:
        self.rounding = Rounding(self.run, self.cache)
        self._take_constants()
        self._read_network()
        self._check_rounding()

    @property
    def note(self) -> str:
        """What the radii are about, and what was left out, and why."""
        about = "Radii are about the real function of the stored weights; the rounding of margins in float64 is covered"
        if self.deployed is not None:
            about += f"; `deployed`: as evaluated in {self.deployed}"
        return "; ".join([about, *self.notes])

    def _say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _take_constants(self) -> None:
        """Constants of the whole space, turned into the norm of the ball by `‖δ‖_∞ ≤ ‖δ‖₂ ≤ ‖δ‖₁ ≤ √d‖δ‖₂ ≤ d‖δ‖_∞`."""
        logs = {node: facts.fused for node, facts in self.run.facts.items()}
        logs[self.output] = min(logs[self.output], whole_bound(self.run, self.cache))
        self.constants.update(self._in_l2(logs))
        if "pairs" not in self.constants:
            self._say("no constants by pairs: the network does not end in a linear layer")

        d = prod(self.shape)
        longest = {"l2": sqrt(d) * (1 + 2.0**-50), "linf": float(d), "l1": 1.0}[self.norm]
        for order in ("linf", "l1"):
            factor = longest if order == "l1" else 1.0
            try:
                self.constants[order] = inflate(induced_pairs(self.run, order) * factor)
            except Refused as reason:
                if order == self.norm:
                    self._say(f"no product bound in {order}: {reason}")

    @property
    def shape(self) -> Shape:
        """The shape of a batch of one input."""
        return shape_of(self.run.program.inputs[0])

    @property
    def output(self) -> fx.Node:
        """The node of the logits."""
        return self.run.program.outputs[0]

    @property
    def root(self) -> float:
        """`‖δ‖₂` is at most this many times the norm of the ball."""
        return _root(self.norm, self.shape)

    def _in_l2(self, logs: Mapping[fx.Node, float]) -> dict[str, Tensor]:
        """Constants of all pairs of classes from bounds of the nodes in ℓ2, given as logarithms."""
        both = inflate(sqrt(2) * exp_up(logs[self.output]) * self.root)
        found = {"global": torch.full((self.classes, self.classes), both, dtype=torch.float64)}
        pairs = pair_constants(self.run, logs)
        return found if pairs is None else found | {"pairs": inflate(pairs * self.root)}

    def _read_network(self) -> None:
        """The network for the relaxation, or a note why there is none."""
        if self.effort == "fast":
            return
        if self.largest < LARGEST:
            return self._say("constants of balls only: the network has none of the whole space")
        try:
            network = read_network(self.run, self.cache)
        except Unsupported as reason:
            return self._say(f"no relaxation: {reason}")
        if self.effort == "auto" and network.neurons > NEURONS:
            return self._say(
                f"global bounds only: {network.neurons:,} neurons are too many for the relaxation to be tried unasked; "
                "effort='relaxation' tries"
            )
        self.network = network
        if self.norm != "l2" and self.effort != "relaxation":
            self._say("no integral and no multipliers: they are for ℓ2")

    def _check_rounding(self) -> None:
        """Refuse a deployed pass whose rounding is not bounded; a note where that of the float64 pass is not."""
        if self.deployed is not None:
            try:
                self.rounding.require(torch.float32)
            except Refused as reason:
                raise Refused(
                    f"there are no radii for a pass in {self.deployed}: {reason}"
                ) from reason
        if self.rounding.unknown:
            self._say(
                f"nothing is proved: {self.rounding.unknown}; bound the network with "
                "lipschitz_bound and use equipoise.smoothing.margin_radius(logits, labels, bound, error=…)"
            )

    def radii(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        epsilon: float | None = None,
        complete: bool = False,
        seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Radii:
        """Radii of a batch of inputs.

        Args:
            x: inputs of the shape the network was captured with.
            labels: (batch,), by default the network's own decisions.
            epsilon: the only radius asked about, see `certified_radius`.
            complete: whether to branch until that is proved or broken.
            seconds: budget per sample, in seconds of processor time.
            progress: called with (done, total) after every sample.
        """
        if seconds is not None:
            require_positive(seconds=seconds)
        if epsilon is not None:
            require_positive(epsilon=epsilon)
        elif complete:
            raise InputError("complete=True decides about one radius: give epsilon")
        expected = self.shape[1:]
        if tuple(x.shape[1:]) != expected:
            raise InputError(f"expected inputs of shape {expected}, got {tuple(x.shape[1:])}")
        y = None if labels is None else require_labels(labels, len(x), self.classes).cpu()

        rows: list[dict[str, Any]] = []
        with proving():
            for certifier, part in self._parts(x, epsilon):
                some = None if y is None else y[part]
                for row in certifier._rows(x[part], some, epsilon, complete, seconds):
                    rows.append(row)
                    if progress is not None:
                        progress(len(rows), len(x))

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([row[name] for row in rows], dtype=dtype)

        return Radii(
            radius=column("radius", torch.float64),
            labels=column("label", torch.long),
            predictions=column("prediction", torch.long),
            rivals=column("rival", torch.long),
            margins=column("margin", torch.float64),
            methods=tuple(row["method"] for row in rows),
            norm=self.norm,
            seconds=tuple(row["seconds"] for row in rows),
            note=self.note,
            deployed=None if self.deployed is None else column("deployed", torch.float64),
            epsilon=epsilon,
            broken={
                n: row["broken"].reshape(expected).to(x.dtype)
                for n, row in enumerate(rows)
                if epsilon is not None and row["broken"] is not None
            },
        )

    def _parts(self, x: Tensor, epsilon: float | None) -> Iterator[tuple[Certifier, slice]]:
        """Who certifies which samples."""
        if self.largest == LARGEST:
            yield self, slice(None)
            return
        for n in range(len(x)):
            part = slice(n, n + 1)
            run, largest = _on_ball(self.run.program, self.cache, self.norm, x[part], epsilon)
            yield replace(self, run=run, largest=largest), part

    def _rows(
        self,
        x: Tensor,
        labels: Tensor | None,
        epsilon: float | None,
        complete: bool,
        seconds: float | None,
    ) -> Iterator[dict[str, Any]]:
        """What is found for every sample, one by one."""
        began = time.process_time()
        values, error = self.rounding.evaluate(x)
        predictions = values.argmax(1)
        y = predictions if labels is None else labels

        # margins[n, k] = f_y − f_k, proved from below; the label's own column never limits
        own = torch.nn.functional.one_hot(y, self.classes).bool()
        evaluated = (values.gather(1, y[:, None]) - values).masked_fill(own, inf)
        rounding = inflate(error.gather(1, y[:, None]) + error)
        rounding += 2.0**-49 * (rounding + 2 * values.abs().amax(1, keepdim=True))
        wrong = ((evaluated + rounding) < 0).any(1)
        margins = evaluated - rounding
        margins = margins.masked_fill(own, inf).nan_to_num(nan=-inf, posinf=inf, neginf=-inf)

        stacked = torch.stack(list(self.constants.values()))
        best = stacked.amin(0)[y]  # (samples, classes)
        radii = torch.where(margins > 0, deflate(margins / best), 0.0).nan_to_num(
            nan=0.0, posinf=self.largest
        )
        radii = radii.masked_fill(own, inf).clamp_max(self.largest)
        known = radii.amin(1)
        deployed = (
            self._deployed(x, y, margins, best, known) if self.deployed is not None else known
        )
        each = (time.process_time() - began) / len(x)

        for n in range(len(x)):
            began = time.process_time()
            label = int(y[n])
            k = int(radii[n].argmin()) if float(known[n]) > 0 else int(evaluated[n].argmin())
            method = list(self.constants)[int(stacked[:, label, k].argmin())]
            method = method if self.largest == LARGEST else "boxes"
            row: dict[str, Any] = {
                "radius": float(known[n]), "deployed": float(deployed[n]), "label": label, "prediction": int(predictions[n]),
                "rival": k, "margin": float(margins[n, k]), "method": method, "broken": x[n] if wrong[n] else None,
            }  # fmt: skip
            if float(margins[n].min()) > 0:
                deadline = inf if seconds is None else began + seconds
                self._improve(x[n : n + 1], margins[n], row, epsilon, complete, deadline)
            if not row["radius"] > 0:
                row["method"] = UNPROVED if row["prediction"] == label else WRONG
                row["margin"] = float(evaluated[n, k])
            if row["method"] == UNPROVED:
                self._say(
                    "some inputs are classified as labelled with nothing proved: the rounding of a float64 pass may exceed their "
                    "margins, or the network has no finite bound"
                )
            row["seconds"] = time.process_time() - began + each
            yield row

    def _lost(self, x: Tensor, labels: Tensor, radius: Tensor) -> Tensor:
        """What a deployed pass may take off every margin at inputs within `radius` of x, (samples, classes)."""
        off = self.rounding.deployed(x, inflate(radius * self.root))
        return inflate(off.gather(1, labels[:, None]) + off)

    def _deployed(
        self, x: Tensor, labels: Tensor, margins: Tensor, constants: Tensor, known: Tensor
    ) -> Tensor:
        """Radii, up to `known`, at which the margins outlast the rounding of a pass anywhere in the ball.

        It is bounded on the ball `high`, and what it leaves of the margins is a radius.
        """
        low, high = torch.zeros_like(known), known
        own = torch.nn.functional.one_hot(labels, self.classes).bool()
        for _ in range(_TRIES):
            left = less(margins, self._lost(x, labels, high))
            reached = deflate(left / constants).masked_fill(own, inf).amin(1)
            low = torch.maximum(low, torch.minimum(reached, high).nan_to_num(nan=0.0))
            high = high / 8
        return low

    def _improve(
        self,
        x: Tensor,
        margins: Tensor,
        row: dict[str, Any],
        epsilon: float | None,
        complete: bool,
        deadline: float,
    ) -> None:
        """Larger radii by the relaxation and by multipliers, where there are any."""
        if row["radius"] >= (self.largest if epsilon is None else epsilon) or self.effort == "fast":
            return
        label = row["label"]
        others = [k for k in range(self.classes) if k != label]
        eye = torch.eye(self.classes, dtype=torch.float64)
        rows = eye[label] - eye[others]
        if self.network is None:
            self._by_boxes(x, margins, row, others, epsilon, deadline)
            if complete and epsilon is not None and row["radius"] < epsilon:
                ball = Ball(Network((), ()), x.double().flatten(), epsilon, self.norm)
                row["broken"] = Attack(ball, self.rounding, x.dtype).any_of(rows)
            return
        case = Case(self.network, x, rows, margins[others], self.norm, deadline=deadline)
        search = self._branching(case, epsilon) if complete and epsilon is not None else None
        radius, limiting, method = self._local(case, row["radius"], epsilon, search)
        if search is not None:
            row["broken"] = search.broken
        if radius > row["radius"]:
            row.update(
                radius=radius,
                rival=others[limiting],
                margin=float(margins[others[limiting]]),
                method=method,
            )

        if self.deployed is not None:
            y = torch.tensor([label])

            def lost(radius: float) -> Tensor:
                return self._lost(x, y, float64([radius]))[0][others]

            row["deployed"] = max(
                row["deployed"],
                self._local(
                    replace(case, lost=lost, bounds={}, failed=inf), row["deployed"], epsilon
                )[0],
            )

    def _by_boxes(
        self,
        x: Tensor,
        margins: Tensor,
        row: dict[str, Any],
        others: list[int],
        epsilon: float | None,
        deadline: float,
    ) -> None:
        """A larger radius by local constants: those of a ball prove its radius, or what margins and constants leave of it."""
        low, high = row["radius"], self.largest
        tried = max(low, _SMALLEST) if epsilon is None else epsilon
        while high > 1.02 * max(low, _SMALLEST) and time.process_time() < deadline:
            boxes = enclose(self.run, x, inflate(tried * self.root), self.cache)
            found = self._in_l2({node: box.log for node, box in boxes.items()})
            constants = torch.stack(list(found.values())).amin(0)[row["label"], others]
            reached, k = deflate(margins[others] / constants).min(0)
            proved = min(tried, float(reached))
            if proved > low:
                low, rival = proved, others[k]
                row.update(radius=low, rival=rival, margin=float(margins[rival]), method="boxes")
            if low == epsilon:
                break
            high = min(high, max(tried, float(reached)))
            tried = sqrt(max(low, _SMALLEST) * high)

    def _branching(self, case: Case, epsilon: float) -> Branching | None:
        """The search on one ball, for the rivals that the relaxation leaves open."""
        open_ = case.relaxed(epsilon) <= 0
        ball = case.ball(epsilon) if open_.any() else None
        if ball is None:
            return None
        attack, rows = Attack(ball, self.rounding, case.x.dtype), case.rows[open_]
        zero = torch.zeros(len(rows), dtype=torch.float64)
        return Branching(attack, rows, zero, case.deadline, broken=attack.any_of(rows))

    def _at(self, case: Case, epsilon: float, search: Branching | None) -> str | None:
        """The method that proves every margin on the ball, from cheap to tight; None where none does."""
        if case.holds(epsilon):
            return "relaxation"
        if search is not None and search.broken is not None:
            return None
        if self.effort != "relaxation" and multipliers_prove(case, epsilon):
            return "integral"
        return "branching" if search is not None and search.decide() else None

    def _local(
        self, case: Case, known: float, epsilon: float | None, search: Branching | None = None
    ) -> tuple[float, int, str]:
        """By the relaxation, and in ℓ2 by the integral."""
        if epsilon is not None:
            method = self._at(case, epsilon, search)
            if method is not None:
                return epsilon, int(case.margins.argmin()), method
            return relaxed_radius(case, known, 0.2), int(case.margins.argmin()), "relaxation"

        integral = self.norm == "l2" and self.effort != "relaxation"
        case.tight = not integral  # there this is only where the integral begins
        radius, method = relaxed_radius(case, known, 0.2 if integral else 1e-2), "relaxation"
        case.tight = True
        case.balls.clear()
        limiting = int(case.shares(case.failed).argmin()) if case.failed < inf else 0
        if integral and radius > 0 and time.process_time() < case.deadline:
            more, rival = integral_radius(case, radius)
            if more > radius:
                radius, limiting, method = more, rival, "integral"
            finer = relaxed_radius(case, radius)
            if finer > radius:
                radius, method = finer, "relaxation"
        if radius == 0:
            self._say("the relaxation proved nothing for some inputs")
        for note in case.notes:
            self._say(note)
        if time.process_time() >= case.deadline:
            self._say("the time was up for some inputs")
        return radius, limiting, method


def _root(norm: Norm, shape: Shape) -> float:
    return sqrt(prod(shape)) * (1 + 2.0**-50) if norm == "linf" else 1.0


def _on_ball(
    program: Program, cache: Cache, norm: Norm, x: Tensor, epsilon: float | None = None
) -> tuple[Propagation, float]:
    """Bounds around one input, and the largest radius they are good for: `epsilon`, or such that inputs get twice as long."""
    root = _root(norm, tuple(x[:1].shape))
    length = inflate(float(frobenius(x.detach().double().reshape(1, -1))))
    largest = epsilon or length / root or 1.0
    return propagate(program, inflate(length + root * largest), cache.rtol, cache), largest
