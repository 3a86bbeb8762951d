"""Certification procedures, one row each: the ways to spend the risk among which the selection sample chooses.

A row decides nothing by its name: a copy under another name gives the same certificates. Installed packages add rows
through the entry point group `equipoise.procedures`, each a `Procedure` under its own name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np

from equipoise.core import InputError, Refused
from equipoise.smoothing.moments import Build, Partition, class_partition, every_class, one_against_rest
from equipoise.smoothing.ramp import Floats

#: partition → (share of α for the class's own bound, share for the bound of each other bucket), valid for any partition
Share = Callable[[Partition], tuple[Floats, Floats]]

GROUP = "equipoise.procedures"
DEFAULT = "rivals"


@dataclass(frozen=True)
class Split:
    """The class at a share of α, *every* rival at the rest: no union over the rivals.

    Let k* be the true runner-up, fixed and unknown. `max_k p̄_k ≥ p̄_{k*}`, so the largest upper bound fails only if that
    of k* (or of the bucket that holds it) does: risk `top + (1 − top) = 1` times α. With two buckets the second bound is
    1 minus the first and the class has all of α.
    """

    top: float

    def __call__(self, partition: Partition) -> tuple[Floats, Floats]:
        """Shares for the class and for each other bucket."""
        several = partition.buckets > 2
        return np.where(several, self.top, 1.0), np.where(several, 1 - self.top, 1.0)


def union(partition: Partition) -> tuple[Floats, Floats]:
    """Equal shares by the union bound: α over the number of bounds (Bonferroni, class partitioning)."""
    each = 1 / partition.intervals
    return each, each


@dataclass(frozen=True)
class Option:
    """One way to spend α: which classes share a bound, and how much each bound gets.

    `direct` bounds every margin itself instead of two scores, each at the *full* α: one of the rivals is the worst, and
    its own bound is all that must hold. `joint` tests class and rival together at the full α (votes only, see `joint`); its
    shares are those of the two bounds that stand in for it where draws were stopped by looking at them.
    """

    partition: Build
    share: Share = union
    direct: bool = False
    joint: bool = False

    def buckets(self, selection: Floats) -> Partition:
        """The partition, refused where it loses a class: a rival that no bound speaks of."""
        found = self.partition(selection)
        classes = np.arange(selection.shape[1])
        whole = found.order.shape == selection.shape and bool((np.sort(found.order, axis=1) == classes).all())
        if not whole or found.singles.min(initial=0) < 0 or found.singles.max(initial=0) >= len(classes):
            raise InputError(
                f"{self.partition} must list every class of every input once, with 0 to c − 1 of them by themselves"
            )
        return found

    def shares(self, partition: Partition) -> tuple[Floats, Floats]:
        """Shares of α for the class and for each other bucket, refused where they spend more than α.

        Two buckets have one bound; with more, that of the class and that of the true runner-up must hold.
        """
        top, rival = self.share(partition)
        spent = np.where(partition.buckets > 2, np.add(top, rival), np.maximum(top, rival))
        if not bool(((np.minimum(top, rival) >= 0) & (spent <= 1 + 2.0**-40)).all()):
            raise Refused(
                f"{self.share} spends {float(np.max(spent)):g}·α on the class and one rival: at most 1·α is sound"
            )
        return top, rival


@dataclass(frozen=True)
class Procedure:
    """One row: the options among which the selection sample chooses, and which votes it takes.

    `hard` and `soft` say whether it takes votes (counts) and scores of a simplex map; `map` is the map when none is asked
    for: None for rows that only count votes, "hardmax" for rows that count them by default, "global" to calibrate one.
    `ties` draws a uniform number per bound before sampling and breaks the ties of Clopper–Pearson with it.
    """

    name: str
    options: tuple[Option, ...]
    hard: bool
    soft: bool
    summary: str
    reference: str
    map: str | None = None
    ties: bool = False

    def stored(self, partition: Partition, direct: bool) -> tuple[Floats, Floats]:
        """Shares for buckets that were fixed when sampling: those of the first option of that kind."""
        option = next((o for o in self.options if o.direct == direct), self.options[0])
        return option.shares(partition)

    @property
    def margins(self) -> bool:
        """Whether some option bounds margins directly."""
        return any(o.direct for o in self.options)


_ONE = Option(one_against_rest)
_THESIS = (_ONE, Option(class_partition), Option(every_class))
_MARGINS = (Option(class_partition, direct=True), Option(every_class, direct=True))
_VOTES = (Option(one_against_rest, Split(0.5)), *(Option(every_class, Split(top)) for top in (0.5, 0.7, 0.9, 0.97)))

_ROWS = (
    Procedure(
        "rivals", (*_VOTES, Option(every_class, Split(0.5), joint=True), Option(every_class, direct=True)), True, True,
        "one against the rest at α, class and every rival by one test at α, or by two bounds: no union over the classes; "
        "largest on average, not on every input",
        "intersection–union; see the proof in the documentation", map="hardmax",
    ),
    Procedure(
        "randomized", _VOTES, True, False,
        "rivals with randomized Clopper–Pearson bounds, whose coverage is exact", "Stevens (1950); Voráček (2024)",
        ties=True,
    ),
    Procedure(
        "cohen", (_ONE,), True, False,
        "one Clopper–Pearson bound of the selected class at α", "Cohen et al. (2019), Certify",
    ),
    Procedure("bonferroni", (Option(every_class),), True, False, "every class at α/c", "union bound"),
    Procedure(
        "cpm", _THESIS, True, False,
        "buckets of classes, each at α/c*; one against the rest, or every class, when that promises more",
        "thesis, class partitioning",
    ),
    Procedure(
        "direct", (*_THESIS, *_MARGINS), True, True,
        "one interval for each margin itself, or two separate ones when that promises more", "thesis, open problem",
        map="global",
    ),
    Procedure(
        "lvm", _THESIS, False, True,
        "soft votes through a simplex map, empirical Bernstein or betting, Lipschitz-aware when a constant is known",
        "thesis, LVM-RS with errata 8–10 and 17", map="global",
    ),
)  # fmt: skip


#: procedures by name: `PROCEDURES["mine"] = Procedure("mine", …)` adds one
PROCEDURES = {row.name: row for row in _ROWS}


def find_procedure(name: str) -> Procedure:
    """The procedure of that name: from `PROCEDURES`, or from an installed package; an error lists the names.

    >>> find_procedure("rivals").hard
    True
    """
    if name in PROCEDURES:
        return PROCEDURES[name]
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            row = entry.load()
            if not isinstance(row, Procedure) or row.name != name:
                raise InputError(f"the entry point {name!r} of {GROUP} must be a Procedure of that name")
            return PROCEDURES.setdefault(name, row)
    raise InputError(f"unknown procedure {name!r}: expected one of {', '.join(PROCEDURES)}")
