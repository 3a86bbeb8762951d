"""What an experiment is: a claim of the thesis, settings at three scales, how to run it and how to judge it."""

from __future__ import annotations

import enum
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Cells:
    """Finished parts of a long experiment, so that a run that was stopped goes on where it was.

    A cell is one training, or whatever an experiment calls one: a key, its rows, and the wall and processor seconds they
    took, one JSON document per line. The file belongs to one experiment with its settings, scale and seed; with any
    other it is begun anew. It is deleted once the result is written.
    """

    path: Path | None = None
    owner: Mapping[str, Any] = field(default_factory=dict)
    stored: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    processor: float = 0.0

    @classmethod
    def open(cls, path: Path, owner: Mapping[str, Any]) -> Cells:
        """The cells of a stopped run of the same owner, or none; a torn last line is dropped."""
        cells = cls(path, json.loads(json.dumps(owner)))
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                stored = json.loads(line)
            except ValueError:
                path.write_text("".join(f"{whole}\n" for whole in lines[:number]), encoding="utf-8")
                break
            if number == 0 and stored != cells.owner:
                break
            if number > 0:
                cells.stored[stored["key"]] = stored["rows"]
                cells.seconds += stored["seconds"]
                cells.processor += stored["processor"]
        return cells

    def rows(
        self, key: str, make: Callable[..., Iterable[dict[str, Any]]], *arguments: Any
    ) -> list[dict[str, Any]]:
        """The rows of a cell: those stored, else made now and stored."""
        if key not in self.stored:
            wall, processor = time.perf_counter(), time.process_time()
            self.stored[key] = list(make(*arguments))
            self._append(key, time.perf_counter() - wall, time.process_time() - processor)
        return self.stored[key]

    def _append(self, key: str, seconds: float, processor: float) -> None:
        if self.path is None:
            return
        stored = {"key": key, "rows": self.stored[key], "seconds": seconds, "processor": processor}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if len(self.stored) == 1:
                self.path.write_text(json.dumps(self.owner) + "\n", encoding="utf-8")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(stored) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """The result is written: nothing is left to resume."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


Row = dict[str, Any]
T = TypeVar("T")


class Label(enum.StrEnum):
    """How a claim fared.

    The last three labels of a thesis claim say nothing against it: the hardware or data differ, our network is too small
    for the question, or the interval decides nothing. Claims of our own hold or do not hold.
    """

    REPRODUCED = "reproduced"
    DIRECTION = "reproduced in direction"
    CORRECTED = "corrected"
    REFUTED = "refuted"
    NOT_COMPARABLE = "not comparable"
    TOO_SMALL = "too small to say"
    OPEN = "open"
    HOLDS = "holds"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    DRY = "dry run"


#: labels of the thesis' claims, as they read for claims of our own
OWN_LABELS = {
    Label.REPRODUCED: Label.HOLDS,
    Label.DIRECTION: Label.PARTLY,
    Label.CORRECTED: Label.HOLDS,
    Label.REFUTED: Label.FAILS,
}


#: what would make a claim about the speed of a GPU comparable
NEEDS_GPU = (
    "on a CPU; `equipoise bench norms --device cuda` measures the published comparison on a GPU"
)


def graded(full: bool, partly: bool = False) -> Label:
    """Reproduced, reproduced in direction, or refuted."""
    if full:
        return Label.REPRODUCED
    return Label.DIRECTION if partly else Label.REFUTED


@dataclass(frozen=True)
class Verdict:
    """A label, the measured number with its interval in words, and the published one beside it.

    `part` names a part of the claim; `own` says that nobody published this claim: it is ours.
    """

    label: Label
    measured: str
    published: str
    part: str = ""
    own: bool = False

    def __str__(self) -> str:
        part = f"{self.part}: " if self.part else ""
        return f"{part}{self.label}: measured {self.measured}; published {self.published}"


@dataclass(frozen=True)
class Precondition:
    """What a baseline must reach before a training experiment may say anything about a claim, in percent."""

    what: str
    measured: float
    least: float

    @property
    def met(self) -> bool:
        """Whether the baseline is good enough."""
        return self.measured >= self.least

    def __str__(self) -> str:
        return f"{self.what} {self.measured:.1f} %, at least {self.least:g} % needed"

    def apply(self, verdict: Verdict) -> Verdict:
        """The verdict, or `too small to say` where the precondition is not met."""
        if self.met or verdict.label is Label.NOT_COMPARABLE:
            return verdict
        return replace(verdict, label=Label.TOO_SMALL, measured=f"{self}; {verdict.measured}")


@dataclass(frozen=True)
class Power:
    """What a design can see: the published effect, the smallest one it detects with probability 0.8, and the seeds
    that would do.

    `detectable` is infinite and `needed` 0 where a single seed leaves the spread unknown. `over` is what the pairs
    are: seeds, inputs.
    """

    published: float
    detectable: float
    seeds: int
    needed: int
    unit: str = "points"
    over: str = "seeds"

    def __str__(self) -> str:
        if not math.isfinite(self.detectable):
            return f"published effect {self.published:g} {self.unit}; one seed or input says nothing on the spread"
        more = (
            f"{self.needed} {self.over} would do"
            if self.needed < MOST
            else f"more than {MOST} {self.over} are needed"
        )
        enough = "enough" if self.detectable <= abs(self.published) else more
        return (
            f"published effect {self.published:g} {self.unit}; {self.seeds} paired {self.over} detect {self.detectable:.2g} "
            f"with probability 0.8: {enough}"
        )


#: more pairs than this are not counted
MOST = 100_000

SCALES = ("laptop", "desk", "paper")


@dataclass(frozen=True)
class Context:
    """What a run is given besides its settings: where data lie, which seed, where to report, whether it is a rehearsal.

    In a dry run `steps` ends every loop after two turns, and `steps_of(n)` gives 2.
    """

    seed: int = 0
    data: Path | None = None
    device: str = "cpu"
    dry: bool = False
    tell: Callable[[str], None] = field(default=lambda text: None)
    cells: Cells = field(default_factory=Cells)

    def cell(self, key: str, make: Callable[..., Iterable[Row]], *arguments: Any) -> list[Row]:
        """`make(*given)`, the rows of one part of a long run, kept: a run that was stopped takes them from its file."""
        return self.cells.rows(key, make, *arguments)

    def steps(self, items: Iterable[T]) -> Iterator[T]:
        """The items of a loop; the first two of them in a dry run."""
        for k, item in enumerate(items):
            if self.dry and k == 2:
                return
            yield item

    def steps_of(self, n: int) -> int:
        """A number of repetitions; at most two in a dry run."""
        return min(n, 2) if self.dry else n

    def size_of(self, n: int) -> int:
        """A size of a matrix; at most 100 in a dry run."""
        return min(n, 100) if self.dry else n

    def file(self, name: str) -> Path:
        """A file of the data folder, or one sentence on where it was expected."""
        if self.data is None:
            raise InputError(
                f"this experiment needs {name}: pass --data FOLDER or set EQUIPOISE_DATA"
            )
        path = self.data / name
        if not path.exists():
            raise InputError(f"this experiment needs {name}, which {self.data} does not hold")
        return path


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the thesis.

    `run(settings, context)` yields rows (flat dicts of numbers and strings); `judge(rows)` and `draw(rows)` see the
    rows only, so that a stored result can be judged and drawn again without running anything. `settings` are frozen
    dataclasses.
    """

    id: str
    chapter: str
    title: str
    claim: str
    published: str
    laptop: Any
    paper: Any
    run: Callable[[Any, Context], Iterable[Row]]
    judge: Callable[[Sequence[Row]], Verdict | Sequence[Verdict]]
    draw: Callable[[Sequence[Row]], Figure]
    needs: tuple[str, ...] = ()  # data files, none if bundled data are enough
    place: str = ""  # figures and tables of the thesis
    desk: Any = (
        None  # at most forty minutes of two cores; the laptop's settings where they are enough
    )
    notes: tuple[str, ...] = ()  # deviations that no setting shows
    power: Callable[[Sequence[Row]], Power] | None = None
    precondition: Callable[[Sequence[Row]], Precondition] | None = (
        None  # of every part of the claim
    )
    own: bool = False  # the claim is ours, not the thesis'
    lacking: str = ""  # what nobody can be given and a comparison would need

    def settings(self, scale: str) -> Any:
        """The settings of a scale."""
        if scale not in SCALES:
            raise InputError(f"--scale is {', '.join(map(repr, SCALES))}; got {scale!r}")
        return {"laptop": self.laptop, "desk": self.desk or self.laptop, "paper": self.paper}[scale]

    def verdicts(self, rows: Sequence[Row], scale: str = "paper") -> tuple[Verdict, ...]:
        """One verdict per part of the claim; only the thesis' own settings can refute a claim of it.

        Args:
            rows: what was measured.
            scale: at which it was.
        """
        judged = self.judge(rows)
        verdicts = (judged,) if isinstance(judged, Verdict) else tuple(judged)
        if self.precondition is not None:
            precondition = self.precondition(rows)
            verdicts = tuple(precondition.apply(verdict) for verdict in verdicts)
        return tuple(self._in_setting(self._as_own(verdict), scale) for verdict in verdicts)

    def _in_setting(self, verdict: Verdict, scale: str) -> Verdict:
        changed = len(self.deviations(scale))
        if verdict.label is not Label.REFUTED or not changed:
            return verdict
        why = f"{changed} settings differ from paper scale, so nothing is refuted"
        return replace(verdict, label=Label.OPEN, measured=f"{verdict.measured}; {why}")

    def _as_own(self, verdict: Verdict) -> Verdict:
        if not (self.own or verdict.own):
            return verdict
        return replace(verdict, label=OWN_LABELS.get(verdict.label, verdict.label), own=True)

    def deviations(self, scale: str) -> list[tuple[str, Any, Any]]:
        """(setting, the thesis', the one used) wherever a scale differs from the paper's."""
        here, there = (flattened(asdict(self.settings(s))) for s in (scale, "paper"))
        return [
            (k, there.get(k, ""), here.get(k, ""))
            for k in {**there, **here}
            if here.get(k) != there.get(k)
        ]

    def describe(self, scale: str) -> Mapping[str, Any]:
        """The settings as JSON, which say whether a stored result is still the one asked for."""
        return {"id": self.id, "scale": scale, "settings": asdict(self.settings(scale))}


#: the folders of experiments in the order of the thesis, and the titles of their chapters
CHAPTERS = {
    "norms": "Spectral norms",
    "networks": "Lipschitz networks",
    "certified": "Certified robustness",
    "generalisation": "Generalisation",
}


def of_module(module: str, **described: Any) -> Experiment:
    """The experiment of one of our modules: named as it is, in the chapter of its folder, with its `run`, `judge` and `draw`."""
    *_, folder, name = module.split(".")
    home = sys.modules[module]
    functions = {
        part: getattr(home, part) for part in ("run", "judge", "draw") if hasattr(home, part)
    }
    fields = {"id": name.replace("_", "-"), "chapter": CHAPTERS[folder], **functions}
    return Experiment(**{**fields, **described})


def flattened(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as `a.b.c` → value.

    >>> flattened({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat
