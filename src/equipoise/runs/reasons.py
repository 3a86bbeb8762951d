"""What a run says: certified accuracy at each ε, what it rests on, and why nothing is certified at some radius."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from equipoise.core import EquipoiseError, InputError, format_down
from equipoise.runs.derive import derive
from equipoise.runs.manifest import Manifest
from equipoise.runs.rows import Row, counts_matrix
from equipoise.smoothing import Certificates
from equipoise.smoothing.moments import Ints

#: certified accuracy below which the reason is given, if that is not below half as much again as chance
LOW = 0.05


def explain(
    manifest: Manifest, rows: list[Row], certificates: Certificates, accuracy: dict[float, float], labelled: bool
) -> list[str]:
    """Sentences for figures near 0: at the smallest radius shown, and at radii that no draw could certify.

    Shares are of the stored votes: estimates, not certificates.
    """
    if not accuracy or not rows:
        return []
    good = [row for row in rows if row.failure is None]
    if not good:
        return ["nothing is certified because every input failed"]
    said = []
    lowest = min(accuracy)
    if accuracy[lowest] < max(LOW, 1.5 / manifest.parameters.num_classes) and lowest < certificates.sigma:
        said.append(_votes(manifest, good, labelled))
    elif any(share == 0 for share in accuracy.values()):
        said.append(_reach(manifest, rows, certificates, accuracy, labelled))
    return said


def _votes(manifest: Manifest, rows: list[Row], labelled: bool) -> str:
    """What the votes say about a run that certifies next to nothing."""
    p = manifest.parameters
    votes = counts_matrix([r.selection for r in rows], p.num_classes)
    votes = votes + counts_matrix([r.estimation for r in rows], p.num_classes)
    top, share = votes.argmax(axis=1), votes.max(axis=1) / np.maximum(votes.sum(axis=1), 1)
    labels = np.array([r.label for r in rows])
    right = float((top == labels).mean())
    favourite = np.bincount(top, minlength=p.num_classes)
    common, names = int(favourite.argmax()), manifest.data.get("classes")
    word = names[common] if isinstance(names, list) and common < len(names) else f"class {common}"
    if not labelled or right >= 0.2:
        return (
            f"little is certified because the votes are divided: the commonest answer has {float(np.median(share)):.0%} of them "
            f"at the median; train under the noise, or take a smaller --sigma or more draws (--n)"
        )
    if favourite[common] >= 0.6 * len(rows) and len(rows) > 3:
        return (
            f"little is certified because under noise of sigma {p.sigma:g} the network answers {word!r} for "
            f"{favourite[common] / len(rows):.0%} of the inputs: it was not trained, or not under such "
            f"noise (eq.regularizers.add_noise(x, {p.sigma:g})), or sigma is too large for it"
        )
    return (
        f"little is certified because the commonest answer under the noise is the label for {right:.0%} of the inputs: are the "
        "weights trained, the classes in the order of the data (--classes) and the inputs scaled as in training?"
    )


def _reach(
    manifest: Manifest, rows: list[Row], certificates: Certificates, accuracy: dict[float, float], labelled: bool
) -> str:
    """What limits the radius: the number of draws, where no votes could reach that far, or the votes that were cast."""
    zero = min(e for e, share in accuracy.items() if share == 0)
    most = _most(manifest, certificates)
    if most is not None and zero > most:
        return (
            f"0 % from ε = {zero:g} on: even if all {manifest.parameters.n:,} draws agree, no radius beyond "
            f"{format_down(most, 4)} can be certified at alpha {certificates.alpha:g}; more draws or a larger sigma reach further"
        )
    labels = np.array([row.label for row in rows])
    counted = (certificates.prediction == labels) & (labels >= 0) if labelled else certificates.prediction >= 0
    largest = float(certificates.radius[counted].max(initial=0.0))
    who = " of a right answer" if labelled else ""
    return f"0 % from ε = {zero:g} on: the largest certified radius{who} is {format_down(largest, 4)}"


def _most(manifest: Manifest, certificates: Certificates) -> float | None:
    """The radius of unanimous votes, None where no votes are counted in one go."""
    p = manifest.parameters
    if p.soft or p.adaptive:
        return None
    one = np.eye(p.num_classes, dtype=np.int64)[0]
    unanimous = Row(0, "unanimous", 0, p.n0, p.n, one * p.n0, one * p.n)
    try:
        found = derive(manifest, [unanimous], alpha=certificates.alpha, procedure=certificates.procedure)
    except EquipoiseError:
        return None
    return float(found.radius[0])


@dataclass(frozen=True)
class Summary:
    """Figures over the finished inputs; failed ones count as not certified.

    Without labels `accuracy` is the share of inputs with a certificate of that radius, whatever the answer.
    """

    total: int
    done: int
    failed: int
    abstained: int
    accuracy: dict[float, float]
    average_radius: float
    draws: int
    seconds: float
    sigma: float
    alpha: float
    procedure: str
    about: str
    notes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    labelled: bool = True
    reasons: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether every input of the run was worked off."""
        return self.done == self.total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = asdict(self) | {"finished": self.finished, "notes": list(self.notes), "reasons": list(self.reasons)}
        key = "certified_accuracy" if self.labelled else "certified_share"
        plain["accuracy"] = [{"epsilon": e, key: a} for e, a in self.accuracy.items()]
        return plain

    def lines(self) -> list[str]:
        """The figures as sentences; radii rounded down."""
        head = f"{self.done} of {self.total} inputs"
        if not self.finished:
            head += ", not finished: run the same command to continue"
        lines = [
            f"{head}; sigma {self.sigma:g}, {self.procedure} at alpha {self.alpha:g}",
            f"{self.abstained} abstained, {self.failed} failed; average certified radius "
            f"{format_down(self.average_radius, 4)}; {self.draws:,} draws, {self.seconds:.1f} s of sampling",
        ]
        if self.failures:
            name, reason = next(iter(self.failures.items()))
            lines.append(f"first failure, input {name}: {reason}")
        return [*lines, *self.reasons, self.about, *self.notes]


def summarise(
    certificates: Certificates,
    labels: Ints,
    epsilons: Sequence[float] | None,
    *,
    total: int,
    draws: int,
    seconds: float,
    notes: Sequence[str] = (),
) -> Summary:
    """Figures of derived certificates."""
    levels = default_epsilons(certificates.sigma) if epsilons is None else [float(e) for e in epsilons]
    if any(not e >= 0 for e in levels):
        raise InputError(f"epsilon must be non-negative, got {levels}")
    failures: dict[str, str] = certificates.details.get("failures", {})
    labelled = bool((np.asarray(labels) >= 0).any())
    if not labelled:
        labels = certificates.prediction
    accuracy = np.atleast_1d(certificates.accuracy(labels, levels)) if levels else np.array([])
    return Summary(
        total, len(certificates), len(failures), int(certificates.abstain.sum()) - len(failures),
        dict(zip(levels, (float(a) for a in accuracy), strict=True)), certificates.average_radius(labels), draws, seconds,
        certificates.sigma, certificates.alpha, certificates.procedure, certificates.about, tuple(notes), failures, labelled,
    )  # fmt: skip


def default_epsilons(sigma: float) -> list[float]:
    """0, ½σ, σ … 3σ.

    >>> default_epsilons(0.5)
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    """
    return [k * sigma / 2 for k in range(7)]
