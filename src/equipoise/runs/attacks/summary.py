"""What attacks say about a run: accuracy at each radius, certified beneath attacked, and broken certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core.accuracy import certified_at
from equipoise.runs.attacks.search import Known, Searcher, Violation
from equipoise.runs.attacks.target import Target
from equipoise.runs.rows import InputId
from equipoise.runs.store import Attacked, AttackRow


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
