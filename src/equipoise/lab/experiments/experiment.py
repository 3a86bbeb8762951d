"""What an experiment is: a claim of the thesis, settings at two scales, how to run it and how to judge it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
T = TypeVar("T")


class Label(enum.StrEnum):
    """How a claim fared."""

    REPRODUCED = "reproduced"
    DIRECTION = "reproduced in direction"
    NOT = "not reproduced"
    CORRECTED = "corrected"
    DRY = "dry run"


@dataclass(frozen=True)
class Verdict:
    """A label, the measured number with its interval in words, and the published one beside it."""

    label: Label
    measured: str
    published: str

    def __str__(self) -> str:
        return f"{self.label}: measured {self.measured}; published {self.published}"


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

    def steps(self, items: Iterable[T]) -> Iterator[T]:
        """The items of a loop; the first two of them in a dry run."""
        for k, item in enumerate(items):
            if self.dry and k == 2:
                return
            yield item

    def steps_of(self, n: int) -> int:
        """A number of repetitions; at most two in a dry run."""
        return min(n, 2) if self.dry else n

    def file(self, name: str) -> Path:
        """A file of the data folder, or one sentence on where it was expected."""
        if self.data is None:
            raise InputError(f"this experiment needs {name}: pass --data FOLDER or set EQUIPOISE_DATA")
        path = self.data / name
        if not path.exists():
            raise InputError(f"this experiment needs {name}, which {self.data} does not hold")
        return path


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the thesis.

    `run(settings, context)` yields rows (flat dicts of numbers and strings); `judge(rows)` and `draw(rows)` see the rows
    only, so that a stored result can be judged and drawn again without running anything. `settings` are frozen dataclasses.
    """

    id: str
    chapter: str
    title: str
    claim: str
    published: str
    laptop: Any
    paper: Any
    run: Callable[[Any, Context], Iterable[Row]]
    judge: Callable[[Sequence[Row]], Verdict]
    draw: Callable[[Sequence[Row]], Figure]
    needs: tuple[str, ...] = ()  # data files, none if bundled data are enough

    def settings(self, scale: str) -> Any:
        """The settings of a scale."""
        if scale not in ("laptop", "paper"):
            raise InputError(f"--scale is 'laptop' or 'paper', got {scale!r}")
        return self.laptop if scale == "laptop" else self.paper

    def describe(self, scale: str) -> Mapping[str, Any]:
        """The settings as JSON, which say whether a stored result is still the one asked for."""
        return {"id": self.id, "scale": scale, "settings": asdict(self.settings(scale))}
