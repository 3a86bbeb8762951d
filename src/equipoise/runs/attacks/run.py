"""Attacks on the inputs of a run, stored beside its certificates, checked against them and summed up."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import InputError
from equipoise.core.accuracy import certified_at
from equipoise.core.errors import require_one_of
from equipoise.core.files import make_folder
from equipoise.runs.attacks.search import Known, Search, Searcher, Target, Violation, find_target
from equipoise.runs.rows import InputId, Item
from equipoise.runs.run import open_run
from equipoise.runs.store import Attacked, AttackRow, Store, locked


@dataclass(frozen=True)
class AttackSummary:
    """Figures over the attacked inputs.

    `accuracy[kind][ε]` is the share of attacked inputs that no attack broke: an upper bound of the robust accuracy.
    `certified[ε]` is the certified accuracy of the same inputs, a lower bound for the smoothed classifier; empty if the run
    has no certificates. `tried` counts smoothed attacks made at a radius inside a certificate of the right label.
    """

    folder: Path | None
    inputs: int
    accuracy: dict[Attacked, dict[float, float]]
    certified: dict[float, float]
    certified_inputs: int
    tried: int
    violations: tuple[Violation, ...]
    suspected: tuple[Violation, ...]
    withdrawn: int
    alpha: float | None
    about: str
    rows: tuple[AttackRow, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        levels = list(next(iter(self.accuracy.values()), {}))
        curve = [
            {"epsilon": e, "certified": self.certified.get(e), **{kind: by[e] for kind, by in self.accuracy.items()}}
            for e in levels
        ]
        return {
            "run": None if self.folder is None else str(self.folder), "inputs": self.inputs, "accuracy": curve,
            "certified_inputs": self.certified_inputs, "tried_inside_certificates": self.tried,
            "violations": [asdict(v) for v in self.violations], "suspected": [asdict(v) for v in self.suspected],
            "withdrawn": self.withdrawn, "about": self.about,
            "failures": self.failures, "attacks": [asdict(r) for r in self.rows],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The figures as sentences."""
        where = "not stored: give --run to keep them" if self.folder is None else f"stored in {self.folder}"
        lines = [f"{self.inputs} inputs attacked, {where}", self.about]
        if self.certified_inputs:
            lines.append(
                f"{self.tried} smoothed attacks inside a certified radius: {len(self.violations)} broke the certificate"
                + (f", {self.withdrawn} suspected and not confirmed" if self.withdrawn else "")
            )
        lines += [
            f"VIOLATION at input {v.id}: certified radius {v.radius:g}, broken at distance {v.distance:g} (ε = {v.epsilon:g})"
            for v in self.violations
        ]
        lines += [
            f"SUSPECTED at input {v.id}: certified radius {v.radius:g}, stored as broken at distance {v.distance:g}, but the "
            "same attack does not find the point again: repeat it with the --batch-size it was made with"
            for v in self.suspected
        ]
        if self.violations and self.alpha is not None:
            lines.append(
                f"each certificate holds with probability 1 − {self.alpha:g}: of {self.certified_inputs} up to "
                f"{self.alpha * self.certified_inputs:g} may be wrong on average; more than that is a bug"
            )
        if self.failures:
            name, reason = next(iter(self.failures.items()))
            lines.append(f"{len(self.failures)} inputs could not be attacked; the first, {name}: {reason}")
        return lines


def summarise_attacks(
    target: Target,
    levels: Sequence[float],
    kinds: Sequence[Attacked],
    rows: Mapping[tuple[InputId, Attacked, float], AttackRow],
    searcher: Searcher,
    certified: Mapping[InputId, Known],
) -> AttackSummary:
    """Figures of the selected inputs that were attacked in every way asked for."""
    ids = [target.inputs.ids[p] for p in target.positions]
    whole = [i for i in ids if all((i, k, e) in rows for k in kinds for e in levels)]
    kept = [rows[i, k, e] for k in kinds for e in levels for i in whole]
    count = max(len(whole), 1)
    accuracy = {k: {e: sum(not rows[i, k, e].success for i in whole) / count for e in levels} for k in kinds}
    known = [certified[i] for i in whole if i in certified]
    proved = {e: sum(certified_at(c.radius, c.right, e) for c in known) / len(known) for e in levels} if known else {}
    tried = sum(
        r.kind == Attacked.SMOOTHED and r.id in certified and certified[r.id].contradicts(r.epsilon) for r in kept
    )
    unique = {(v.id, v.distance): v for v in reversed(searcher.violations)}
    alpha = None if target.parameters is None else target.parameters.alpha
    failures = {str(i): reason for i, reason in searcher.failures.items()}
    return AttackSummary(
        target.folder, len(whole), accuracy, proved, len(known), tried, tuple(reversed(unique.values())),
        tuple(searcher.suspected), len(searcher.withdrawn), alpha, _about(target), tuple(kept), failures,
    )  # fmt: skip


def _about(target: Target) -> str:
    text = "Accuracy under attack is an upper bound of the robust accuracy: a stronger attack may lower it."
    if target.parameters is None:
        return text
    chosen = "the majority vote" if target.map is None else f"{target.map}"
    if target.parameters.soft and target.map is None:
        chosen = "the map of each input"
    return (
        f"{text} Smoothed attacks are on the classifier smoothed with sigma {target.parameters.sigma:g} and {chosen}, which is "
        "what the certificates are about; attacks on the network itself are not held against them."
    )


__all__ = ["AttackSummary", "Search", "Violation", "attack_run"]

#: what `kind` may be, and which classifiers it attacks
KINDS: dict[str, tuple[Attacked, ...]] = {**{str(kind): (kind,) for kind in Attacked}, "both": tuple(Attacked)}

#: called after every block of inputs with the number of attacked inputs and of all inputs
Progress = Callable[[int, int], None]


def attack_run(
    model: Any,
    dataset: Any,
    *,
    epsilons: Sequence[float],
    run_dir: str | Path | None = None,
    kind: str | None = None,
    sigma: float | None = None,
    steps: int = 20,
    restarts: int = 1,
    samples: int = 16,
    votes: int = 1000,
    confirm: int = 10_000,
    alpha: float = 1e-3,
    seed: int = 0,
    skip: int = 0,
    limit: int | None = None,
    stride: int = 1,
    batch_size: int = 64,
    device: str = "cpu",
    name: str | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> AttackSummary:
    """ℓ2 attacks of several radii on the inputs of a run: accuracy under attack, above certified accuracy.

    `base` is projected gradient ascent on the network, `smoothed` the same on the smoothed classifier of the run (its σ, its
    map). Accuracy under attack is an upper bound of the true robust accuracy; for `smoothed` each success is a test at level
    alpha on `votes` draws. A smoothed success strictly inside a certified radius is tested again, on `confirm` fresh draws at
    a level of one in a million: confirmed, it is a violation; otherwise it is withdrawn. (A stored success that the same attack
    does not find again, to be tested, stays and is listed as suspected.) Attacks on the network say nothing
    about certificates of the smoothed classifier and are not held against them.

    What was stored with the same radius, steps, restarts and seed is not attacked again. Results depend on `batch_size`
    (random starts are drawn for a block at once), not on interruptions.

    Args:
        model: as in `certify`.
        dataset: as in `certify`.
        epsilons: radii, in the units of the model's input.
        run_dir: a certification run of this model and data, or a new directory (which needs `sigma`). None: nothing is kept.
        kind: "base", "smoothed" or "both"; default both where a noise level is known.
        sigma: noise level; that of the run if there is one.
        steps: gradient steps per start.
        restarts: random starts.
        samples: noise draws per step of the smoothed attack.
        votes: draws that judge a smoothed attack.
        confirm: fresh draws that confirm a break of a certificate.
        alpha: risk of calling a smoothed attack successful when it is not.
        seed: of starts and noise.
        skip: leave out the first inputs of the data.
        limit: at most this many of them.
        stride: take every so many-th; only inputs of the run are attacked.
        batch_size: inputs attacked at once.
        device: where the network runs.
        name: of the data, for the manifest.
        again: attack what is stored, too.
        progress: called after every block with (done, total).

    >>> import tempfile, torch
    >>> net = torch.nn.Linear(2, 2, bias=False).eval()
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> x, y = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0])
    >>> attack_run(net, (x, y), epsilons=[0.5, 1.0]).accuracy["base"]  # the boundary is at distance 1/√2 and 3/√2
    {0.5: 1.0, 1.0: 0.5}
    """
    levels = _levels(epsilons)
    how = Search(steps, restarts, samples, votes, confirm, alpha, seed)
    target = find_target(
        model, dataset, run_dir, sigma=sigma, skip=skip, limit=limit, stride=stride, device=device, name=name
    )
    kinds = _kinds(kind, target)
    if batch_size < 1:
        raise InputError(f"batch_size must be positive, got {batch_size}")
    with _opened(target) as store:
        certified = {} if target.folder is None else known_certificates(target.folder)
        searcher = Searcher(target.module(), target.parameters, target.map, target.device, how, certified)
        stored = [] if store is None else store.attacks()
        memory = _Memory([] if again else [r for r in stored if how.made(r)], certified)
        for first in range(0, len(target.positions), batch_size):
            block = target.positions[first : first + batch_size]
            for each in kinds:
                doubted = memory.doubted([target.inputs.ids[p] for p in block], each, levels)
                missing = [p for p in block if doubted or memory.lacks(target.inputs.ids[p], each, levels)]
                items = list(searcher.readable(target.inputs, missing))
                known = [np.inf] * len(items) if doubted else memory.reached(items, each)
                rows = searcher.attack(each, items, levels, known) if items else []
                rows = searcher.keep_suspects(rows, doubted)
                memory.add(rows)
                if store is not None and rows:
                    store.put_attacks(rows)
            if progress is not None:
                progress(min(first + batch_size, len(target.positions)), len(target.positions))
    return summarise_attacks(target, levels, kinds, memory.rows, searcher, certified)


class _Memory:
    """Outcomes by (id, kind, ε): what need not be attacked again.

    A stored break of a certificate is doubted: its whole block is attacked anew, as it was the first time, to have the point
    that fresh draws can test.
    """

    def __init__(self, rows: Sequence[AttackRow], certified: dict[InputId, Known]) -> None:
        self.doubts = [r for r in rows if r.id in certified and certified[r.id].broken_by(r)]
        names = {(r.id, r.kind) for r in self.doubts}
        self.rows: dict[tuple[InputId, Attacked, float], AttackRow] = {}
        self.add(r for r in rows if (r.id, r.kind) not in names)

    def add(self, rows: Iterable[AttackRow]) -> None:
        self.rows |= {(r.id, r.kind, r.epsilon): r for r in rows}

    def doubted(self, names: Sequence[InputId], kind: Attacked, levels: Sequence[float]) -> list[AttackRow]:
        return [r for r in self.doubts if r.kind == kind and r.id in names and r.epsilon in levels]

    def lacks(self, name: InputId, kind: Attacked, levels: Sequence[float]) -> bool:
        return any((name, kind, e) not in self.rows for e in levels)

    def reached(self, items: Sequence[Item], kind: Attacked) -> list[float]:
        """The distance at which each item is known to be broken, ∞ if it is not."""
        wanted = {item.id: np.inf for item in items}
        for (name, k, _), row in self.rows.items():
            if k == kind and name in wanted and row.success and row.distance is not None:
                wanted[name] = min(wanted[name], row.distance)
        return [wanted[item.id] for item in items]


def known_certificates(folder: Path) -> dict[InputId, Known]:
    """What the run certifies at its own α and procedure, by input; failed inputs are left out."""
    run = open_run(folder)
    if not run.rows:
        return {}
    found, result = run.certificates(), {}
    for row, k, r in zip(run.rows, found.prediction, found.radius, strict=True):
        if row.failure is None:
            own = None if row.soft is None else row.soft.map
            result[row.id] = Known(int(k) == row.label, float(r), own)
    return result


@contextmanager
def _opened(target: Target) -> Iterator[Store | None]:
    """The store of the run, held for the whole attack; made if the run is new."""
    if target.folder is None or target.manifest is None:
        yield None
        return
    make_folder(target.folder)
    with locked(target.folder):
        if target.new:
            target.manifest.write(target.folder)
        with Store.of(target.folder, target.manifest, writable=True) as store:
            yield store


def _levels(epsilons: Sequence[float]) -> list[float]:
    levels = sorted({float(e) for e in epsilons})
    if not levels or not all(np.isfinite(e) and e > 0 for e in levels):
        raise InputError(f"expected positive radii to attack at, e.g. 0.25,0.5,1.0, got {list(epsilons)}")
    return levels


def _kinds(kind: str | None, target: Target) -> tuple[Attacked, ...]:
    if kind is None:
        kind = "base" if target.parameters is None else "both"
    require_one_of(KINDS, kind=kind)
    if target.parameters is None and Attacked.SMOOTHED in KINDS[kind]:
        raise InputError("a smoothed attack needs the noise level: give --sigma, or --run of a certification run")
    return KINDS[kind]
