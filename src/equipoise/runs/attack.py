"""A run from the other side: attacks inside every certified radius, where none may break, and beyond it; and its classifier as
it is deployed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.attacks import misclassified, pgd, smooth_pgd
from equipoise.core import EquipoiseError, InputError, Refused, format_down, guarded, require_number
from equipoise.core.files import check_document
from equipoise.runs.jobs import Job, prepare, usable_device
from equipoise.runs.run import Run, Violation, as_levels, open_run
from equipoise.runs.sources import InputId, Inputs, Item, Selection, portable
from equipoise.runs.store import AttackRow, Row, Store, differences, locked
from equipoise.runs.workers import TaskSpec, require_dimension
from equipoise.smoothing import SmoothedClassifier, Stream
from equipoise.smoothing.noise import noise_key

#: multiples of the certified radius that are attacked: nothing may break at the first, the second shows the attack's power
INSIDE = 0.99
BEYOND = 1.5
#: levels of the tests that call a smoothed attack successful, and that confirm one inside a certificate
SUCCESS = 1e-3
CONFIRMED = 1e-6


@dataclass(frozen=True)
class AttackSummary:
    """Figures over the attacked inputs.

    Args:
        run: its folder.
        kind: what was attacked, the network ("base") or its smoothed version ("smoothed").
        inputs: how many were attacked.
        inside: how many were attacked inside their certified radius.
        broken: certificates that broke there; any one is a bug, or the risk alpha.
        broken_beyond: how many of them broke at 1.5 times their radius: the power of the attack. These three also count
            the attacks that the run had before.
        accuracy: for each `epsilon` the `attacked` accuracy, the share of the inputs that no attack broke, which is an upper
            bound of the robust accuracy, and the `certified` accuracy of the same inputs.
        failures: why inputs could not be attacked.
    """

    run: str
    kind: str
    inputs: int
    inside: int
    broken: list[Violation]
    broken_beyond: int
    accuracy: list[dict[str, float]]
    failures: dict[str, str]

    def lines(self) -> list[str]:
        """The figures as sentences."""
        what = "the network itself" if self.kind == "base" else "the smoothed classifier"
        lines = [
            f"{self.inputs} inputs of {self.run} attacked, {what}",
            f"inside certified radii: {len(self.broken)} of {self.inside} of the run broke (0 may)",
            f"at {BEYOND:g} times the radius: {self.broken_beyond} of {self.inside} of them broke (the power of the attack)",
        ]
        for v in self.broken:
            radius = format_down(v.radius)
            distance = format_down(v.distance)
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
    votes: int = 1000,
    seed: int = 0,
    limit: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
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
        steps: gradient steps from one random start.
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
    for name, value in {
        "steps": steps,
        "votes": votes,
        "limit": 1 if limit is None else limit,
    }.items():
        require_number(value, name, least=1, most=10**7, whole=True)
    job = prepare(model, dataset, run.settings.model_copy(update={"device": device}))
    changes = differences(run.manifest, job.manifest, ("device", "fixed map", "constant"))
    if changes:
        raise Refused(
            f"{run.folder} is a run of another model or other data ({'; '.join(changes)})"
        )
    if not job.inputs.labelled:
        raise InputError(f"{job.inputs.name} has no labels: an attack needs them")

    attacker = _Attacker(run, job, votes, {"steps": steps, "seed": seed})
    rows = run.rows[:limit]
    attacked: list[InputId] = []
    failures: dict[str, str] = {}
    with locked(run.folder), Store(run.folder, run.manifest, writable=True) as store:
        success = {
            (old.id, old.epsilon): old.success
            for old in store.attacks()
            if old.model_dump(include={"steps", "seed"}) == attacker.settings
        }
        for count, row in enumerate(rows, 1):
            radii = attacker.radii(row, levels)
            try:
                if any((row.id, epsilon) not in success for epsilon in radii):
                    item = job.inputs.attempt(row.position, run.settings.num_classes)
                    fresh = attacker.attack(item, radii)
                    store.put_attacks(fresh)
                    success |= {(new.id, new.epsilon): new.success for new in fresh}
                attacked += [row.id] if radii else []
            except Refused as error:
                failures[str(row.id)] = str(error)
            if progress is not None:
                progress(count, len(rows))

    certified = attacker.certified
    beyond = {(name, radius * BEYOND) for name, radius in certified.items()}
    count = max(len(attacked), 1)
    return AttackSummary(
        str(run.folder),
        attacker.kind,
        len(attacked),
        *run.contradictions(attacker.results),
        len({old.id for old in run.attacks() if old.success and (old.id, old.epsilon) in beyond}),
        [
            {
                "epsilon": e,
                "certified": sum(certified[name] >= e for name in attacked) / count,
                "attacked": sum(not success[name, e] for name in attacked) / count,
            }
            for e in levels
        ],
        failures,
    )


@dataclass
class _Attacker:
    """Attacks inputs one by one."""

    run: Run
    job: Job
    votes: int
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.kind = "base" if self.run.kind == "proved" else "smoothed"
        self.device = self.job.spec.device
        self.module = self.job.spec.model.network(self.device)
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
        """One row for each radius of an input, from the smallest on.

        Args:
            item: the input.
            radii: sorted.
        """
        if item.problem is not None:
            raise Refused(item.problem)
        what = f"an attack at an input of shape {tuple(item.x.shape)}"
        return guarded(lambda: self._attack(item, radii), what)

    def _attack(self, item: Item, radii: Sequence[float]) -> list[AttackRow]:
        x = item.x[None].to(self.device)
        y = torch.tensor([item.label], device=self.device)
        seed = self.settings["seed"]
        fresh = noise_key(seed, f"confirm/{item.id}", Stream.PREDICTION, 0)

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
        if self._wrong(x, y, seed + 2, self.votes, SUCCESS) and counts(x, 0.0):
            reached = 0.0
        rows = []
        for epsilon in radii:
            if reached > epsilon:
                if self.kind == "base":
                    norm = self.run.settings.norm
                    result = pgd(self.module, x, y, epsilon, norm=norm, **self.settings)
                else:
                    result = smooth_pgd(
                        self._classifier(seed),
                        x,
                        y,
                        epsilon,
                        check_draws=self.votes,
                        alpha=SUCCESS,
                        **self.settings,
                    )
                distance = float(result.distance[0])
                if result.success[0] and counts(result.adversarial.to(x.dtype), distance):
                    reached = distance
            success = reached <= epsilon
            row = AttackRow(
                id=item.id,
                epsilon=epsilon,
                success=success,
                distance=reached if success else None,
                **self.settings,
            )
            rows.append(row)
        return rows

    def _wrong(self, x: Tensor, y: Tensor, seed: int, draws: int, level: float) -> bool:
        """Whether another class than y wins at x; of the smoothed classifier, shown by a test on these draws."""
        if self.kind == "smoothed":
            return bool(misclassified(self._classifier(seed), x, y, draws, level))
        with torch.no_grad():
            out = self.module(x)
        if not torch.isfinite(out).all():
            raise Refused("the network returns NaN or infinity there: it gives no answer to attack")
        return bool(out.argmax(dim=1) != y)

    def _classifier(self, seed: int) -> SmoothedClassifier:
        """The run's classifier with noise of another seed."""
        manifest = self.run.manifest.reseeded(seed % 2**64)
        return replace(self.job.spec, manifest=manifest).classifier()


def predict_run(
    run: Run,
    model: Any,
    dataset: Any,
    *,
    n: int = 1000,
    alpha: float = 1e-3,
    limit: int | None = None,
    device: str = "cpu",
) -> Iterator[dict[str, Any]]:
    """The answers of a run's classifier to other inputs, one by one: `id`, `label`, `answer`, and `failure`, why it got none.

    The label is None where the data has none, the answer where the classifier abstains.

    Args:
        run: a sampled run of votes, whose noise is used.
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
    if run.kind == "proved" or settings.soft:
        raise Refused(
            "answers are majority votes under noise: a proved run is about the answers of the network itself, and for a run of "
            "soft scores certify the inputs instead"
        )

    inputs = Inputs.of(dataset)
    # fresh noise: the draws of the certificates are not used again
    manifest = run.manifest.reseeded(None)
    classifier = TaskSpec(network, manifest, usable_device(device), torch.empty(0)).classifier()
    selection = check_document({"limit": limit}, Selection, "predict")
    for position in selection.positions(len(inputs)):
        row = {"id": inputs.ids[position]}
        row |= dict.fromkeys(("label", "answer", "failure"))
        try:
            item = inputs.item(int(position))
            require_dimension(settings, item.x)
            x = item.x[None].to(device)
            answer = int(classifier.predict(x, n, alpha, ids=[item.id])[0])
            row["label"] = item.label if inputs.labelled else None
            row["answer"] = answer if answer >= 0 else None
        except (EquipoiseError, OSError) as error:
            row["failure"] = str(error)
        yield row
