"""Attacks on the inputs of a run: inside every certified radius, where none may break, and beyond it, which shows their power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import betainc
from torch import Tensor

from equipoise.attacks import AttackResult, pgd, smooth_pgd
from equipoise.attacks.pgd import overtaken
from equipoise.core.bounds import format_down
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.runs.inputs import InputId, Inputs, Item
from equipoise.runs.jobs import usable_device
from equipoise.runs.models import Portable, portable
from equipoise.runs.run import Run, as_levels, open_run
from equipoise.runs.settings import parse_map
from equipoise.runs.store import Attacked, AttackRow, Row, Store, locked
from equipoise.runs.workers import TaskSpec
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream
from equipoise.smoothing.noise import noise_key
from equipoise.smoothing.procedures import Ints

#: multiples of the certified radius that are attacked: nothing may break at the first, the second shows the attack's power
INSIDE, BEYOND = 0.99, 1.5
#: level of the test that confirms a break of a certificate of a smoothed classifier
CONFIRMED = 1e-6

#: called after every input with the number of attacked inputs and of all inputs
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Violation:
    """A certificate that an attack broke; for a smoothed classifier, confirmed on fresh draws."""

    id: InputId
    distance: float
    radius: float


@dataclass(frozen=True)
class AttackSummary:
    """Figures over the attacked inputs.

    Args:
        folder: of the run.
        kind: what was attacked, the network ("base") or its smoothed version ("smoothed").
        inputs: how many were attacked.
        inside: how many were attacked inside their certified radius.
        broken: certificates that broke there; any one is a bug, or the risk alpha.
        broken_beyond: how many of them broke at 1.5 times their radius: the power of the attack.
        accuracy: ε → share of the inputs that no attack broke, an upper bound of the robust accuracy.
        certified: ε → certified accuracy of the same inputs.
        failures: why inputs could not be attacked.
    """

    folder: Path
    kind: Attacked
    inputs: int
    inside: int
    broken: tuple[Violation, ...]
    broken_beyond: int
    accuracy: dict[float, float]
    certified: dict[float, float]
    failures: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        curve = [
            {"epsilon": e, "certified": self.certified[e], "attacked": share} for e, share in self.accuracy.items()
        ]
        plain = asdict(self) | {"run": str(self.folder), "kind": str(self.kind), "accuracy": curve}
        del plain["folder"], plain["certified"]
        return plain

    def lines(self) -> list[str]:
        """The figures as sentences."""
        what = "the network itself" if self.kind == Attacked.BASE else "the smoothed classifier"
        lines = [
            f"{self.inputs} inputs of {self.folder} attacked, {what}",
            f"inside certified radii: {len(self.broken)} of {self.inside} broke (0 may)",
            f"at {BEYOND:g} times the radius: {self.broken_beyond} of {self.inside} broke (the power of the attack)",
        ]
        for violation in self.broken:
            radius, distance = format_down(violation.radius, 6), format_down(violation.distance, 6)
            lines.append(f"VIOLATION at input {violation.id}: certified radius {radius}, broken at {distance}")
        if self.failures:
            name, reason = next(iter(self.failures.items()))
            lines.append(f"{len(self.failures)} inputs could not be attacked; the first, {name}: {reason}")
        return lines


def attack_run(
    run: str | Path | Run,
    model: Any,
    dataset: Any,
    *,
    epsilons: Sequence[float] = (),
    steps: int = 20,
    restarts: int = 1,
    samples: int = 16,
    votes: int = 1000,
    alpha: float = 1e-3,
    seed: int = 0,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AttackSummary:
    """ℓ2 attacks on the inputs of a run: at 0.99 and 1.5 times every certified radius, and at given radii.

    The attack is on what the certificates speak of: the smoothed classifier of a sampled run, the network of a proved one.
    A smoothed success is a test at level alpha on `votes` draws; inside a certified radius it counts only if ten times as many
    fresh draws confirm it at a level of one in a million. Results go into the run, one input at a time; what was stored with
    the same settings is not attacked again.

    Args:
        run: a run, or its directory.
        model: the model of the run.
        dataset: the data of the run.
        epsilons: further radii, for accuracy under attack beside certified accuracy.
        steps: gradient steps per start.
        restarts: random starts.
        samples: noise draws per step of the smoothed attack.
        votes: draws that judge a smoothed attack.
        alpha: risk of calling a smoothed attack successful when it is not.
        seed: of starts and noise.
        limit: attack the first inputs of the run only.
        device: where the network runs.
        progress: called after every input with (done, total).

    Returns:
        How many certificates broke inside their radius (none may), how many at 1.5 times it, and the accuracies.
    """
    run = run if isinstance(run, Run) else open_run(run)
    levels = sorted({level for level in as_levels(epsilons) if level > 0})
    counts = {"steps": steps, "restarts": restarts, "samples": samples, "votes": votes}
    for name, value in counts.items():
        if not isinstance(value, int) or not 1 <= value <= 10**7:
            raise InputError(f"{name} must be a whole number from 1 to 10,000,000, got {value!r}")

    network, inputs = portable(model), Inputs.of(dataset)
    require_same_inputs(run, network, inputs)
    if not inputs.labelled:
        raise InputError(f"{inputs.name} has no labels: an attack needs them")
    attacker = _Attacker(run, network, usable_device(device), steps, restarts, samples, votes, alpha, seed)

    rows = run.rows[:limit]
    with locked(run.folder), Store(run.folder, run.manifest, writable=True) as store:
        stored = {(r.id, r.epsilon): r for r in store.attacks() if attacker.made(r)}
        for count, row in enumerate(rows, 1):
            if any((row.id, e) not in stored for e in attacker.radii(row, levels)):
                fresh = attacker.attack(inputs.attempt(row.position, run.settings.num_classes), row, levels)
                store.put_attacks(fresh)
                stored |= {(r.id, r.epsilon): r for r in fresh}
            if progress is not None:
                progress(count, len(rows))
    return attacker.summary(rows, levels, stored)


def require_same_inputs(run: Run, model: Portable, inputs: Inputs) -> None:
    """Refuse another model or other data than the run's.

    Args:
        run: the run.
        model: the model given.
        inputs: the data given.
    """
    manifest = run.manifest
    found = [] if model.hash == manifest.model.hash else [f"model: {manifest.model.hash[:19]}… → {model.hash[:19]}…"]
    if manifest.data.inputs != len(inputs):
        found.append(f"inputs: {manifest.data.inputs} → {len(inputs)}")
    else:
        selection = manifest.settings.inputs[0]
        fingerprint = inputs.fingerprint(selection.positions(len(inputs), inputs.labels))
        if len(manifest.settings.inputs) == 1 and fingerprint != manifest.data.fingerprint:
            found.append(f"data: {manifest.data.fingerprint[:19]}… → {fingerprint[:19]}…")
    if found:
        raise Refused(f"{run.folder} is a run of another model or other data ({'; '.join(found)})")


@dataclass
class _Attacker:
    """Attacks inputs one by one and counts what broke."""

    run: Run
    model: Portable
    device: str
    steps: int
    restarts: int
    samples: int
    votes: int
    alpha: float
    seed: int
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run, results = self.run, self.run.results()
        self.kind = Attacked.BASE if run.kind == "proved" else Attacked.SMOOTHED
        self.module = self.model.network(self.device)
        radii = np.where(results.correct, results.radius, 0.0).tolist()
        self.certified = dict(zip(run.ids, radii, strict=True))
        # ℓ2 balls lie in ℓ∞ balls of the same radius, but not in ℓ1 balls
        self.comparable = not (run.kind == "proved" and run.settings.norm == "l1")

    def made(self, row: AttackRow) -> bool:
        """Whether a stored attack was made with these settings."""
        return (row.kind, row.steps, row.restarts, row.seed) == (self.kind, self.steps, self.restarts, self.seed)

    def radii(self, row: Row, levels: Sequence[float]) -> list[float]:
        """The radii at which an input is attacked: inside and beyond its certificate, and the given ones."""
        radius = self.certified[row.id] if self.comparable else 0.0
        own = [radius * INSIDE, radius * BEYOND] if 0 < radius < 1e30 else []
        return [] if row.failure is not None or str(row.id) in self.failures else [*own, *levels]

    def attack(self, item: Item, row: Row, levels: Sequence[float]) -> list[AttackRow]:
        """One row for each radius of an input, from the smallest on; what cannot be attacked is a failure."""
        try:
            if item.problem is not None:
                raise Refused(item.problem)
            return self._attack(item, row, levels)
        except Refused as error:
            self.failures[str(item.id)] = str(error)
            return []
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            shape = tuple(item.x.shape)
            raise InputError(f"the network cannot be attacked at inputs of shape {shape}: {one_line(error)}") from error

    def _attack(self, item: Item, row: Row, levels: Sequence[float]) -> list[AttackRow]:
        x, y = item.x[None].to(self.device), torch.tensor([item.label], device=self.device)
        chosen = self._map(row)
        reached = 0.0 if self._wrong(x, y, chosen) and self._counts(item, x[0], 0.0, chosen) else np.inf

        rows = []
        for epsilon in sorted(self.radii(row, levels)):
            if reached > epsilon:
                result = self._search(x, y, epsilon, chosen)
                distance = float(result.distance[0])
                if bool(result.success[0]) and self._counts(item, result.adversarial[0].to(x.dtype), distance, chosen):
                    reached = distance
            success = reached <= epsilon
            distance_ = reached if success else None
            rows.append(
                AttackRow(item.id, self.kind, epsilon, success, distance_, self.steps, self.restarts, self.seed)
            )
        return rows

    def _map(self, row: Row) -> SimplexMap | None:
        """The map that the certificate of this input speaks of; None: the majority vote."""
        if self.kind == Attacked.BASE:
            return None
        return parse_map(self.run.manifest.map or (None if row.soft is None else row.soft.map))

    def _wrong(self, x: Tensor, y: Tensor, chosen: SimplexMap | None) -> bool:
        """Whether an input is misclassified as it is."""
        if self.kind == Attacked.BASE:
            with torch.no_grad():
                out: Tensor = self.module(x)
            if not bool(torch.isfinite(out).all()):
                raise Refused("the network returns NaN or infinity there: it gives no answer to attack")
            return bool(out.argmax(dim=1) != y)
        return self._beaten(x, y, chosen, self.seed + 2, self.votes, self.alpha)

    def _beaten(self, x: Tensor, y: Tensor, chosen: SimplexMap | None, seed: int, draws: int, level: float) -> bool:
        """Whether the smoothed classifier prefers another class than y at x, shown by a test on fresh draws."""
        judge = self._classifier(chosen, seed)
        if chosen is not None and not chosen.votes:
            return bool(overtaken(judge, x, y, chosen, draws, level)[0])
        counts = judge.counts(x[0], draws, input_id=0, stream=Stream.PREDICTION)
        return outvoted(counts, int(y), level)

    def _search(self, x: Tensor, y: Tensor, epsilon: float, chosen: SimplexMap | None) -> AttackResult:
        how: dict[str, Any] = {"restarts": self.restarts, "seed": self.seed}
        if self.kind == Attacked.BASE:
            return pgd(self.module, x, y, epsilon, self.steps, **how)
        how |= {"draws": self.samples, "check_draws": self.votes, "alpha": self.alpha}
        return smooth_pgd(self._classifier(chosen, self.seed), x, y, epsilon, self.steps, **how)

    def _classifier(self, chosen: SimplexMap | None, seed: int) -> SmoothedClassifier:
        settings = self.run.settings.model_copy(update={"seed": seed % 2**64})
        return TaskSpec(self.model, settings, chosen, device=self.device).classifier()

    def _counts(self, item: Item, z: Tensor, distance: float, chosen: SimplexMap | None) -> bool:
        """Whether a success counts: a smoothed one inside a certificate only if fresh draws confirm it."""
        if self.kind == Attacked.BASE or distance >= self.certified[item.id]:
            return True
        fresh = noise_key(self.seed, f"confirm/{item.id}", Stream.PREDICTION, 0)
        y = torch.tensor([item.label], device=z.device)
        return self._beaten(z[None], y, chosen, fresh, 10 * self.votes, CONFIRMED)

    def summary(
        self, rows: Sequence[Row], levels: Sequence[float], stored: dict[tuple[InputId, float], AttackRow]
    ) -> AttackSummary:
        """Figures of the inputs that were attacked at all of their radii."""
        whole = [
            row for row in rows
            if self.radii(row, levels) and all((row.id, e) in stored for e in self.radii(row, levels))
        ]  # fmt: skip
        inside, broken, broken_beyond = 0, list[Violation](), 0
        for row in whole:
            radius = self.certified[row.id]
            if not self.comparable or not 0 < radius < 1e30:
                continue
            own = [stored[row.id, e] for e in self.radii(row, levels)]
            hits = [r.distance for r in own if r.success and r.distance is not None]
            inside += 1
            if any(d * (1 + 1e-12) < radius for d in hits):
                broken.append(Violation(row.id, min(hits), radius))
            broken_beyond += stored[row.id, radius * BEYOND].success

        count = max(len(whole), 1)
        accuracy = {e: sum(not stored[row.id, e].success for row in whole) / count for e in levels}
        certified = {e: sum(self.certified[row.id] >= e for row in whole) / count for e in levels}
        return AttackSummary(
            self.run.folder, self.kind, len(whole), inside, tuple(broken), broken_beyond, accuracy, certified,
            self.failures,
        )  # fmt: skip


def outvoted(counts: Ints, label: int, level: float) -> bool:
    """Whether some class is more likely than the label, by binomial tests of each against it, together at `level`.

    With c_k votes for k and c_y for the label, `P(Bin(c_k + c_y, ½) ≥ c_k) = I_½(c_k, c_y + 1)` if the two are equally likely.

    Args:
        counts: votes per class.
        label: the class that should win.
        level: of the test.

    >>> outvoted(np.array([40, 60, 0]), 0, 1e-3), outvoted(np.array([10, 45, 45]), 0, 1e-3)
    (False, True)
    """
    others = np.delete(np.asarray(counts, dtype=np.float64), label)
    tails = np.where(others > 0, betainc(np.maximum(others, 1.0), float(counts[label]) + 1.0, 0.5), 1.0)
    return bool((tails * (1 + 1e-10) * len(others) <= level).any())
