"""Certification procedures, one row each: how classes are put into buckets, and the ways to spend the risk on their bounds.

The selection sample chooses among the options of a row. A row decides nothing by its name: a copy under another name gives
the same certificates. Installed packages add rows through the entry point group `equipoise.procedures`, each a `Procedure`
under its own name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

import numpy as np

from equipoise.core import Floats, InputError, Ints, Mask, Refused


@dataclass(frozen=True)
class Partition:
    """Buckets of classes for each of N inputs: the selected class, `singles` runners-up one by one, and the rest as one.

    `order[i]` lists the classes of input i: the selected one, then the others by falling selection score.
    """

    order: Ints
    singles: Ints

    @property
    def selected(self) -> Ints:
        """The class each certificate will be about."""
        return self.order[:, 0]

    @property
    def buckets(self) -> Ints:
        """Number of non-empty buckets, the selected class included."""
        classes = self.order.shape[1]
        return 1 + self.singles + (self.singles < classes - 1)

    @property
    def intervals(self) -> Ints:
        """Number of one-sided bounds that share the risk α: with two buckets the second is 1 minus the first."""
        return np.where(self.buckets <= 2, 1, self.buckets)

    def labels(self) -> Ints:
        """(N, c): the bucket of every class; 0 is the selected class."""
        position = np.minimum(np.arange(self.order.shape[1])[None, :], self.singles[:, None] + 1)
        result = np.empty_like(self.order)
        np.put_along_axis(result, self.order, position, axis=1)
        return result

    def gather(self, values: Floats) -> Floats:
        """(N, c) values per class → (N, B) sums per bucket, B the largest number of buckets; zeros beyond."""
        result = np.zeros((len(values), int(self.buckets.max(initial=1))), dtype=values.dtype)
        np.add.at(result, (np.arange(len(values))[:, None], self.labels()), values)
        return result

    def present(self) -> Mask:
        """(N, B): which of the padded buckets exist."""
        return np.arange(int(self.buckets.max(initial=1)))[None, :] < self.buckets[:, None]


Build = Callable[[Floats], Partition]


def ranking(selection: Floats) -> Ints:
    """Classes by falling selection score (ties: the lower index first, as torch's argmax)."""
    return np.argsort(-selection, axis=1, kind="stable")


def one_against_rest(selection: Floats) -> Partition:
    """The selected class against everything else: one interval (Cohen).

    >>> one_against_rest(np.array([[5, 3, 2]])).labels().tolist()
    [[0, 1, 1]]
    """
    return Partition(ranking(selection), np.zeros(len(selection), dtype=np.int64))


def every_class(selection: Floats) -> Partition:
    """Every class by itself (Bonferroni).

    >>> every_class(np.array([[5, 3, 2]])).labels().tolist()
    [[0, 1, 2]]
    """
    return Partition(
        ranking(selection), np.full(len(selection), selection.shape[1] - 1, dtype=np.int64)
    )


def class_partition(selection: Floats) -> Partition:
    """CPM: the runner-up by itself, the rest as one meta-class; its largest class leaves it while it outweighs the runner-up.

    Reference: thesis, class partitioning method. Written without a loop: the number of singles is the smallest s ≥ 1
    whose remaining mass is at most the runner-up's.

    >>> class_partition(np.array([[50, 3, 2, 2, 1], [60, 30, 4, 3, 3]])).labels().tolist()
    [[0, 1, 2, 3, 3], [0, 1, 2, 2, 2]]
    """
    order = ranking(selection)
    others = np.take_along_axis(selection, order, axis=1)[:, 1:]
    # mass left in M after s = 1 … c − 1 singles
    after = others.sum(axis=1, keepdims=True) - np.cumsum(others, axis=1)
    enough = after <= others[:, :1]
    enough[:, -1] = True
    return Partition(order, 1 + np.argmax(enough, axis=1))


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
        partition = self.partition(selection)
        order = partition.order
        singles = partition.singles
        classes = np.arange(selection.shape[1])
        whole = order.shape == selection.shape and bool((np.sort(order, axis=1) == classes).all())
        if not whole or not ((singles >= 0) & (singles < len(classes))).all():
            raise InputError(
                f"{self.partition} must list every class of every input once, with 0 to c − 1 of them by themselves"
            )
        return partition

    def shares(self, partition: Partition) -> tuple[Floats, Floats]:
        """Shares of α for the class and for each other bucket, refused where they spend more than α.

        Two buckets have one bound; with more, that of the class and that of the true runner-up must hold.
        """
        top, rival = self.share(partition)
        spent = np.where(partition.buckets > 2, np.add(top, rival), np.maximum(top, rival))
        if not ((np.minimum(top, rival) >= 0) & (spent <= 1 + 2.0**-40)).all():
            raise Refused(
                f"{self.share} spends {float(np.max(spent)):g}·α on the class and one rival: at most 1·α is sound"
            )
        return top, rival


@dataclass(frozen=True)
class Procedure:
    """One row: the options among which the selection sample chooses, and which votes it takes.

    Args:
        name: what users type.
        options: ways to spend the risk.
        hard: whether it takes votes (counts).
        soft: whether it takes scores of a simplex map.
        summary: one line for tables.
        reference: where it comes from.
        map: the map where the user names none: None for rows that only count votes, "hardmax" for rows that count them by
            default, "global" to calibrate one.
    """

    name: str
    options: tuple[Option, ...]
    hard: bool
    soft: bool
    summary: str
    reference: str
    map: str | None = None


_ONE = Option(one_against_rest)
_VOTES = (
    Option(one_against_rest, Split(0.5)),
    *(Option(every_class, Split(top)) for top in (0.5, 0.7, 0.9, 0.97)),
)

_ROWS = (
    Procedure(
        "rivals", (*_VOTES, Option(every_class, Split(0.5), joint=True), Option(every_class, direct=True)), True, True,
        "one against the rest at α, class and every rival by one test at α, or by two bounds: no union over the classes; "
        "largest on average, not on every input",
        "intersection–union; see the proof in the documentation", map="hardmax",
    ),
    Procedure(
        "cohen", (_ONE,), True, False,
        "one Clopper–Pearson bound of the selected class at α", "Cohen et al. (2019), Certify",
    ),
    Procedure("bonferroni", (Option(every_class),), True, False, "every class at α/c", "union bound"),
    Procedure(
        "cpm", (Option(class_partition),), True, False,
        "the runner-up, other large classes and one bucket of the rest, each at α/c*", "thesis, class partitioning",
    ),
    Procedure(
        "direct", (_ONE, Option(every_class, Split(0.5)), Option(every_class, direct=True)), True, True,
        "one interval for each margin itself, or two separate ones where that is expected to give more",
        "thesis, open problem", map="global",
    ),
    Procedure(
        "lvm", (_ONE, Option(class_partition), Option(every_class)), False, True,
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
                raise InputError(
                    f"the entry point {name!r} of {GROUP} must be a Procedure of that name"
                )
            return PROCEDURES.setdefault(name, row)
    raise InputError(f"unknown procedure {name!r}: expected one of {', '.join(PROCEDURES)}")
