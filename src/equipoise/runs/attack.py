"""A run from the other side: attacks inside every certified radius, where none may break, and beyond it; and its classifier as
it is deployed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.attacks import misclassified, pgd, smooth_pgd
from equipoise.core.bounds import format_down
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.runs.jobs import Job, prepare, usable_device
from equipoise.runs.run import Run, Violation, as_levels, open_run
from equipoise.runs.sources import InputId, Inputs, Item, Selection, portable
from equipoise.runs.store import AttackRow, Row, Store, differences, locked
from equipoise.runs.workers import TaskSpec, require_dimension
from equipoise.smoothing import Stream
from equipoise.smoothing.noise import noise_key

#: multiples of the certified radius that are attacked: nothing may break at the first, the second shows the attack's power
INSIDE, BEYOND = 0.99, 1.5
#: levels of the tests that call a smoothed attack successful, and that confirm one inside a certificate
SUCCESS, CONFIRMED = 1e-3, 1e-6

#: called after every input with the number of attacked inputs and of all inputs
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class AttackSummary:
    """Figures over the attacked inputs.

    Args:
        run: its folder.
        kind: what was attacked, the network ("base") or its smoothed version ("smoothed").
        inputs: how many were attacked.
        inside: how many were attacked inside their certified radius.
        broken: certificates that broke there; any one is a bug, or the risk alpha.
        broken_beyond: how many of them broke at 1.5 times their radius: the power of the attack.
        accuracy: ε → share of the inputs that no attack broke, an upper bound of the robust accuracy.
        certified: ε → certified accuracy of the same inputs.
        failures: why inputs could not be attacked.
    """

    run: str
    kind: str
    inputs: int
    inside: int
    broken: list[Violation]
    broken_beyond: int
    accuracy: dict[float, float]
    certified: dict[float, float]
    failures: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = asdict(self)
        certified = plain.pop("certified")
        shares = self.accuracy.items()
        plain["accuracy"] = [
            {"epsilon": e, "certified": certified[e], "attacked": share} for e, share in shares
        ]
        return plain

    def lines(self) -> list[str]:
        """The figures as sentences."""
        what = "the network itself" if self.kind == "base" else "the smoothed classifier"
        lines = [
            f"{self.inputs} inputs of {self.run} attacked, {what}",
            f"inside certified radii: {len(self.broken)} of {self.inside} broke (0 may)",
            f"at {BEYOND:g} times the radius: {self.broken_beyond} of {self.inside} broke (the power of the attack)",
        ]
        for v in self.broken:
            radius, distance = format_down(v.radius, 6), format_down(v.distance, 6)
            lines.append(
                f"VIOLATION at input {v.id}: certified radius {radius}, broken at {distance}"
            )
        for name, reason in [*self.failures.items()][:1]:
            lines.append(
                f"{len(self.failures)} inputs could not be attacked; the first, {name}: {reason}"
            )
        return lines


def attack_run(
    run: str | Path | Run,
    model: Any,
    dataset: Any,
    *,
    epsilons: Sequence[float] = (),
    steps: int = 20,
    restarts: int = 1,
    votes: int = 1000,
    seed: int = 0,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AttackSummary:
    """Attacks on the inputs of a run: at 0.99 and 1.5 times every certified radius, and at given radii.

    The attack is on what the certificates are about: the smoothed classifier of a sampled run in ℓ2, the network of a proved
    one in the norm of its balls.
    A smoothed success is a test at level 0.001 on `votes` draws; inside a certified radius it counts only if ten times as many
    fresh draws confirm it at a level of one in a million. Results go into the run, one input at a time; what was stored with
    the same settings is not attacked again.

    Args:
        run: a run, or its directory.
        model: the model of the run.
        dataset: the data of the run.
        epsilons: further radii, for accuracy under attack beside certified accuracy.
        steps: gradient steps per start.
        restarts: random starts.
        votes: draws that judge a smoothed attack.
        seed: of starts and noise.
        limit: attack the first inputs of the run only.
        device: where the network runs.
        progress: called after every input with (done, total).

    Returns:
        How many certificates broke inside their radius (none may), how many at 1.5 times it, and the accuracies.
    """
    run = run if isinstance(run, Run) else open_run(run)
    levels = [level for level in as_levels(epsilons) if level > 0]
    for name, value in {"steps": steps, "restarts": restarts, "votes": votes}.items():
        if not isinstance(value, int) or not 1 <= value <= 10**7:
            raise InputError(f"{name} must be a whole number from 1 to 10,000,000, got {value!r}")
    job = prepare(model, dataset, run.settings.model_copy(update={"device": device}))
    changes = differences(run.manifest, job.manifest, ("device", "fixed map", "constant"))
    if changes:
        raise Refused(
            f"{run.folder} is a run of another model or other data ({'; '.join(changes)})"
        )
    if not job.inputs.labelled:
        raise InputError(f"{job.inputs.name} has no labels: an attack needs them")

    attacker = _Attacker(run, job, steps, restarts, votes, seed)
    rows = run.rows[:limit]
    stored: dict[tuple[InputId, float], bool] = {}
    with locked(run.folder), Store(run.folder, run.manifest, writable=True) as store:
        for old in store.attacks():
            if (old.steps, old.restarts, old.seed) == (steps, restarts, seed):
                stored[old.id, old.epsilon] = old.success
        for count, row in enumerate(rows, 1):
            radii = attacker.radii(row, levels)
            if any((row.id, epsilon) not in stored for epsilon in radii):
                fresh = attacker.attack(
                    job.inputs.attempt(row.position, run.settings.num_classes), radii
                )
                store.put_attacks(fresh)
                stored |= {(new.id, new.epsilon): new.success for new in fresh}
            if progress is not None:
                progress(count, len(rows))

    inside, broken = run.contradictions(attacker.results)
    certified = attacker.certified
    failures = attacker.failures
    whole = [row.id for row in rows if attacker.radii(row, levels) and str(row.id) not in failures]
    count = max(len(whole), 1)
    return AttackSummary(
        str(run.folder),
        attacker.kind,
        len(whole),
        inside,
        broken,
        sum(stored.get((name, certified[name] * BEYOND), False) for name in whole),
        {e: sum(not stored[name, e] for name in whole) / count for e in levels},
        {e: sum(certified[name] >= e for name in whole) / count for e in levels},
        failures,
    )


@dataclass
class _Attacker:
    """Attacks inputs one by one."""

    run: Run
    job: Job
    steps: int
    restarts: int
    votes: int
    seed: int
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind: Any = "base" if self.run.kind == "proved" else "smoothed"
        self.module = self.job.model.network(self.job.device)
        self.results = self.run.results()
        self.certified = self.run.certified(self.results)

    def radii(self, row: Row, levels: Sequence[float]) -> list[float]:
        """The radii at which an input is attacked, sorted: inside and beyond its certificate, and further ones.

        Args:
            row: of the input.
            levels: the further radii.
        """
        if row.failure is not None:
            return []
        radius = self.certified[row.id]
        own = {radius * INSIDE, radius * BEYOND} if 0 < radius < 1e30 else set()
        return sorted(own | set(levels))

    def attack(self, item: Item, radii: Sequence[float]) -> list[AttackRow]:
        """One row for each radius of an input, from the smallest on; an input that cannot be attacked is a failure.

        Args:
            item: the input.
            radii: sorted.
        """
        try:
            if item.problem is not None:
                raise Refused(item.problem)
            return self._attack(item, radii)
        except Refused as error:
            self.failures[str(item.id)] = str(error)
            return []
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            shape = tuple(item.x.shape)
            raise InputError(
                f"the network cannot be attacked at inputs of shape {shape}: {one_line(error)}"
            ) from error

    def _attack(self, item: Item, radii: Sequence[float]) -> list[AttackRow]:
        x = item.x[None].to(self.job.device)
        y = torch.tensor([item.label], device=self.job.device)
        settings: dict[str, Any] = {
            "steps": self.steps,
            "restarts": self.restarts,
            "seed": self.seed,
        }
        fresh = noise_key(self.seed, f"confirm/{item.id}", Stream.PREDICTION, 0)

        def counts(z: Tensor, distance: float) -> bool:
            """Whether a success counts: a smoothed one inside a certificate only if fresh draws confirm it.

            Args:
                z: the misclassified point.
                distance: of z to the input.
            """
            if self.kind == "base" or distance >= self.certified[item.id]:
                return True
            return self._wrong(z, y, fresh, 10 * self.votes, CONFIRMED)

        reached = math.inf
        if self._wrong(x, y, self.seed + 2, self.votes, SUCCESS) and counts(x, 0.0):
            reached = 0.0
        rows = []
        for epsilon in radii:
            if reached > epsilon:
                if self.kind == "base":
                    result = pgd(
                        self.module, x, y, epsilon, norm=self.run.settings.norm, **settings
                    )
                else:
                    classifier = self._spec(self.seed).classifier()
                    result = smooth_pgd(
                        classifier, x, y, epsilon, check_draws=self.votes, alpha=SUCCESS, **settings
                    )
                distance = float(result.distance[0])
                if bool(result.success[0]) and counts(result.adversarial.to(x.dtype), distance):
                    reached = distance
            outcome: dict[str, Any] = {
                "success": reached <= epsilon,
                "distance": reached if reached <= epsilon else None,
            }
            rows.append(
                AttackRow(id=item.id, kind=self.kind, epsilon=epsilon, **outcome, **settings)
            )
        return rows

    def _wrong(self, x: Tensor, y: Tensor, seed: int, draws: int, level: float) -> bool:
        """Whether another class than y wins at x; of the smoothed classifier, shown by a test on these draws."""
        if self.kind == "smoothed":
            return bool(misclassified(self._spec(seed).classifier(), x, y, draws, level))
        with torch.no_grad():
            out: Tensor = self.module(x)
        if not bool(torch.isfinite(out).all()):
            raise Refused("the network returns NaN or infinity there: it gives no answer to attack")
        return bool(out.argmax(dim=1) != y)

    def _spec(self, seed: int) -> TaskSpec:
        """The run's classifier with noise of another seed."""
        settings = self.run.settings.model_copy(update={"seed": seed % 2**64})
        return self.job.spec(self.run.manifest.model_copy(update={"settings": settings}))


@dataclass(frozen=True)
class Answer:
    """The answer to one input: a class, or −1 where it abstains; `failure` says why an input got none."""

    id: InputId
    label: int
    answer: int
    failure: str | None = None


def predict_run(
    run: Run,
    model: Any,
    dataset: Any,
    *,
    n: int = 1000,
    alpha: float = 1e-3,
    limit: int | None = None,
    device: str = "cpu",
) -> Iterator[Answer]:
    """The answers of a run's classifier to other inputs, one by one.

    Args:
        run: whose noise is used; a proved run answers with the network itself.
        model: the model of the run; another one is refused.
        dataset: the inputs.
        n: draws per input.
        alpha: risk per input of an answer that is not the majority class under the noise.
        limit: at most this many inputs.
        device: where the network runs.

    Guarantee: an answer other than the majority class is given with probability at most alpha per input, over the draws;
    otherwise it abstains. Certificates of the run are about these answers. Reference: Cohen et al. 2019, PREDICT.
    """
    if not 1 <= n <= 10**10 or not 0 < alpha < 1:
        raise InputError(
            f"the number of draws must be positive and alpha between 0 and 1, got {n} and {alpha}"
        )
    settings = run.settings
    network = portable(model)
    if network.hash != run.manifest.model.hash:
        raise InputError(
            f"{run.folder} certifies another model than {network.source}: nothing of it holds for it"
        )
    sampled = run.kind == "sampled"
    if sampled and settings.soft:
        raise Refused(
            "answers are majority votes, but this run certifies soft scores: certify the inputs instead"
        )

    inputs = Inputs.of(dataset)
    module = network.network(usable_device(device))
    # fresh noise: the draws of the certificates are not used again
    fresh = TaskSpec(network, settings.model_copy(update={"seed": None}), device=device)
    classifier = fresh.classifier() if sampled else None
    for position in Selection(limit=limit).positions(len(inputs)):
        try:
            item = inputs.item(int(position))
            require_dimension(settings, item.x)
            x = item.x[None].to(device)
            with torch.inference_mode():
                answer = (
                    module(x).argmax()
                    if classifier is None
                    else classifier.predict(x, n, alpha, ids=[item.id])[0]
                )
        except (EquipoiseError, OSError) as error:
            yield Answer(inputs.ids[position], -1, -1, str(error))
            continue
        yield Answer(item.id, item.label, int(answer))
