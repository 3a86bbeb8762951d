"""What a report is about, as plain data: curves, attacks, audits, pictures; and margin certificates in a folder."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.digests import sealed, unsealed
from equipoise.core.errors import InputError
from equipoise.core.files import as_input_error, atomic_write, make_folder, read_json
from equipoise.runs import Attacked, AttackRow
from equipoise.smoothing import average_certified_radius, certified_accuracy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Series:
    """Certificates of one network by one procedure: a curve of the report.

    `prediction` is −1 where nothing was certified; `radius` is 0 there. `about` says what the certificate speaks of,
    `alpha` is its risk per input (0: deterministic, NaN: not known), `assumption` what it rests on without proof. `data` names
    the data, `total` is how many inputs the run is to have, `own` whether the run was made for this procedure: other curves of
    the run are derived beside it. Where no input has a label (all −1) any certified answer counts. `rivals` and `methods`,
    where there are any, are the classes that limit the radii and what proved them.
    """

    model: str
    run: str
    procedure: str
    ids: tuple[str, ...]
    labels: Ints
    prediction: Ints
    radius: Floats
    sigma: float = 0.0
    alpha: float = 0.0
    about: str = ""
    assumption: str = ""
    failed: int = 0
    data: str = ""
    total: int | None = None
    own: bool = True
    rivals: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.labels), len(self.prediction), len(self.radius)}
        sizes |= {len(column) for column in (self.rivals, self.methods) if column}
        if len(sizes) != 1 or not len(self.ids):
            raise InputError(
                f"{self.run}: expected as many ids, labels, predictions and radii, at least one; got {sizes}"
            )
        if not bool((self.radius >= 0).all()):
            raise InputError(f"{self.run}: a radius is negative or no number")

    @property
    def labelled(self) -> bool:
        """Whether any input has a label."""
        return bool((self.labels >= 0).any())

    @property
    def inputs(self) -> str:
        """What shares are shares of.

        >>> import numpy as np
        >>> one = np.zeros(1, dtype=np.int64)
        >>> Series("net", "run", "cohen", ("0",), one, one, np.ones(1), total=20).inputs
        '1 of 20 so far'
        """
        done = len(self.ids)
        return str(done) if self.total is None or done >= self.total else f"{done} of {self.total} so far"

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Where the certified answer is the label, or there is one where no input has a label."""
        if not self.labelled:
            return np.asarray(self.prediction >= 0)
        return np.asarray((self.prediction == self.labels) & (self.prediction >= 0))

    def accuracy(self, epsilon: Any = 0.0) -> Floats:
        """Certified accuracy at each ε."""
        return certified_accuracy(self.radius, self.correct, epsilon)

    @property
    def average_radius(self) -> float:
        """Average certified radius, 0 where the answer is wrong; infinite radii count as infinite."""
        return average_certified_radius(self.radius, self.correct)


@dataclass(frozen=True, eq=False)
class Attacks:
    """The closest misclassified point an attack found for each input: `distance` is ∞ where it found none.

    Accuracy under attack is an upper bound of the true robust accuracy.
    """

    model: str
    run: str
    kind: Attacked
    ids: tuple[str, ...]
    distance: Floats
    settings: str = ""

    def accuracy(self, epsilon: Any) -> Floats:
        """The share of attacked inputs with no adversarial example found within ε."""
        found = np.sort(self.distance)
        return np.asarray(1 - np.searchsorted(found, np.asarray(epsilon, dtype=np.float64), side="right") / len(found))


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of one layer, largest first, thinned to a drawable number; an estimate in floating point."""

    layer: str
    values: tuple[float, ...]
    count: int
    note: str = ""


@dataclass(frozen=True, eq=False)
class Audit:
    """Bounds of one network: `bound` is `lipschitz_bound(...).to_dict()`, `local` brackets around some inputs."""

    model: str
    bound: Mapping[str, Any]
    spectra: tuple[Spectrum, ...] = ()
    local: tuple[Mapping[str, Any], ...] = ()
    local_radius: float | None = None


@dataclass(frozen=True)
class Picture:
    """An input of the gallery with the closest adversarial example found; images are PNG data URIs."""

    model: str
    id: str
    label: str
    predicted: str
    radius: float
    procedure: str
    image: str
    adversarial: str | None = None
    distance: float | None = None
    answer: str = ""
    kind: str = "base"


@dataclass(frozen=True)
class Checked:
    """How many inputs were attacked strictly inside a certified radius, each counted once, and how many of them broke.

    `attacked` and `hit` are their keys, by which several runs on the same data are counted together.
    """

    tried: int
    broken: int
    where: tuple[str, ...] = ()
    attacked: frozenset[tuple[str, str]] = frozenset()
    hit: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class ReportData:
    """Everything one report shows."""

    title: str
    series: tuple[Series, ...] = ()
    attacks: tuple[Attacks, ...] = ()
    audits: tuple[Audit, ...] = ()
    gallery: tuple[Picture, ...] = ()
    runs: tuple[Mapping[str, Any], ...] = ()
    tested: Checked | None = None
    intro: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The networks, in order of appearance."""
        return tuple(dict.fromkeys(p.model for group in (self.audits, self.series, self.attacks) for p in group))


MARGINS = "margins.json"
FORMAT = 1
#: how radii come from margins: by the bound of all logits, or by those of pairs of classes where they are better
GLOBAL, PAIRS = "margin/(√2·L)", "the better of margin/(√2·L) and margin_k/K_yk, by pairs of classes"


@dataclass(frozen=True, eq=False)
class Margins:
    """Margin certificates of some inputs: the constant they rest on, the rule (`GLOBAL`, `PAIRS`), attacks against them."""

    model: Mapping[str, str]
    data: str
    lipschitz: float
    ids: tuple[str, ...]
    labels: Ints
    prediction: Ints
    radius: Floats
    attacks: tuple[AttackRow, ...] = ()
    rule: str = GLOBAL

    def save(self, folder: str | Path) -> Path:
        """Write `margins.json`, whole or not at all."""
        folder = make_folder(folder)
        plain: dict[str, Any] = {
            "format": FORMAT, "model": dict(self.model), "data": self.data, "lipschitz": _plain(self.lipschitz),
            "ids": list(self.ids), "labels": self.labels.tolist(), "prediction": self.prediction.tolist(),
            "radius": [_plain(r) for r in self.radius.tolist()], "attacks": [asdict(a) for a in self.attacks],
            "rule": self.rule,
        }  # fmt: skip
        atomic_write(folder / MARGINS, json.dumps(sealed(plain), ensure_ascii=False, allow_nan=False) + "\n")
        return folder / MARGINS


def load_margins(folder: str | Path) -> Margins:
    """Read `margins.json`; what is damaged is refused with the file's name."""
    path = Path(folder) / MARGINS
    with as_input_error(path):
        plain = unsealed(read_json(path, 10**9), str(path))
        if plain["format"] != FORMAT:
            raise InputError(f"{path} has format {plain['format']!r}, this version reads {FORMAT}")
        found = Margins(
            {str(k): str(v) for k, v in plain["model"].items()}, str(plain["data"]), float(plain["lipschitz"]),
            tuple(str(i) for i in plain["ids"]), np.array(plain["labels"], dtype=np.int64),
            np.array(plain["prediction"], dtype=np.int64), np.array([float(r) for r in plain["radius"]]),
            tuple(AttackRow(**a) for a in plain["attacks"]), PAIRS if plain.get("rule") == PAIRS else GLOBAL,
        )  # fmt: skip
    if len({len(found.ids), len(found.labels), len(found.prediction), len(found.radius)}) != 1:
        raise InputError(f"{path} is damaged: its columns have different lengths")
    return found


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
