"""What is attacked, and attacks of growing radius on it; a success inside a certified radius is tested again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import betainc
from torch import Tensor, nn

from equipoise.attacks import AttackResult, pgd, smooth_pgd
from equipoise.attacks.pgd import overtaken
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.runs.inputs import Inputs, Selection
from equipoise.runs.jobs import count_logits, describe, usable_device
from equipoise.runs.manifest import Manifest, differences, is_run, read_manifest
from equipoise.runs.models import Batched, Portable, portable
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import InputId, Item
from equipoise.runs.store import NAME as STORE
from equipoise.runs.store import Attacked, AttackRow
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.noise import noise_key


@dataclass(frozen=True, eq=False)
class Target:
    """A model, the positions of the inputs to attack, and the run to write into (none: nothing is kept)."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: Manifest | None
    folder: Path | None
    new: bool
    device: str

    @property
    def parameters(self) -> Parameters | None:
        """Those of the run: the smoothed classifier is its."""
        return None if self.manifest is None else self.manifest.parameters

    @property
    def map(self) -> SimplexMap | None:
        """The map that the run fixed beforehand."""
        return None if self.manifest is None else self.manifest.map

    def module(self) -> nn.Module:
        """The network, on its device, for batches of any size."""
        module = self.model.build(self.device)
        return module if self.model.batch is None else Batched(module, self.model.batch, exact=True)


def find_target(
    model: Any, dataset: Any, run_dir: str | Path | None, *, sigma: float | None, skip: int, limit: int | None, stride: int,
    device: str, name: str | None,
) -> Target:  # fmt: skip
    """Match a model and data with a run directory, an existing one or a new one; nothing is written."""
    ported, inputs, where = portable(model), Inputs.of(dataset, name), usable_device(device)
    positions, folder = (
        Selection(skip, limit, stride).positions(len(inputs)),
        None if run_dir is None else Path(run_dir),
    )
    if not inputs.labelled:
        raise InputError(f"{inputs.name} has no labels: an attack needs them")
    if folder is not None and is_run(folder):
        manifest = read_manifest(folder)
        own = _require_same(folder, manifest, ported, inputs, sigma)
        whole = Selection(skip, None, stride).positions(len(inputs))
        positions = whole[np.isin(whole, own)][:limit]
        if len(positions) == 0:
            raise InputError(f"none of the selected inputs belongs to {folder}: it certifies others of the data")
        inputs.check_labels(positions, manifest.parameters.num_classes)
        return Target(ported, inputs, positions, manifest, folder, False, where)
    if folder is not None and (folder / STORE).exists():
        raise Refused(f"{folder} holds a store but no run.json: restore it, or use another run directory")
    if sigma is None:
        if folder is not None:
            raise InputError(
                f"{folder} is not a run yet, and a run has a noise level: give --sigma, or --run of a certification run"
            )
        inputs.check_labels(positions, count_logits(ported, inputs, positions, where))
        return Target(ported, inputs, positions, None, None, False, where)
    job = describe(model, dataset, sigma=sigma, skip=skip, limit=limit, stride=stride, device=device, name=name)
    return Target(ported, inputs, positions, job.manifest, folder, folder is not None, where)


def _require_same(folder: Path, manifest: Manifest, model: Portable, inputs: Inputs, sigma: float | None) -> Ints:
    """Refuse another model, other data or another noise level than the run's; the positions that belong to the run."""
    count = manifest.data.get("inputs")
    if count is not None and count != len(inputs):
        raise Refused(
            f"{folder} holds a run on other data (inputs: {count} → {len(inputs)}): give another --run directory"
        )
    parts = [s.positions(len(inputs), inputs.labels) for s in manifest.selection]
    asked = replace(
        manifest, model={"hash": model.hash}, data={"fingerprint": inputs.fingerprint(parts[0])},
        parameters=replace(manifest.parameters, sigma=manifest.parameters.sigma if sigma is None else sigma),
    )  # fmt: skip
    found = differences(manifest, asked)
    if found:
        raise Refused(f"{folder} holds another run ({'; '.join(found)}): give another --run directory")
    own: Ints = np.unique(np.concatenate(parts))
    return own


def default_folder(model: Any, dataset: Any, **settings: Any) -> Path:
    """`runs/attack-<digest>`: the same command finds its run again."""
    digest = describe(model, dataset, **settings).manifest.digest(asked=True)
    return Path("runs") / f"attack-{digest[:12]}"


#: level of the test that turns a suspected break of a certificate into a violation
CONFIRMED = 1e-6


@dataclass(frozen=True)
class Search:
    """How to attack; see `attack_run`."""

    steps: int = 20
    restarts: int = 1
    samples: int = 16
    votes: int = 1000
    confirm: int = 10_000
    alpha: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "samples", "votes", "confirm"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.alpha < 1:
            raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {self.alpha}")

    def made(self, row: AttackRow) -> bool:
        """Whether a stored attack was made with these settings."""
        return (row.steps, row.restarts, row.seed) == (self.steps, self.restarts, self.seed)


@dataclass(frozen=True)
class Known:
    """A certificate: whether it is for the right label, its radius, and the map of the input if it has its own."""

    right: bool
    radius: float
    map: SimplexMap | None = None

    def broken_by(self, row: AttackRow) -> bool:
        """Whether an outcome contradicts it: the smoothed answer changed strictly inside the radius."""
        return (
            row.kind == Attacked.SMOOTHED
            and row.success
            and row.distance is not None
            and self.contradicts(row.distance)
        )

    def contradicts(self, distance: float) -> bool:
        """Whether a change of the answer at this distance would contradict it."""
        return self.right and distance * (1 + 1e-12) < self.radius


@dataclass(frozen=True)
class Violation:
    """A certificate that an attack broke, confirmed on fresh draws."""

    id: InputId
    epsilon: float
    distance: float
    radius: float


class Searcher:
    """Attacks blocks of inputs; collects violations, suspected and withdrawn ones, and inputs that could not be attacked."""

    def __init__(
        self, module: nn.Module, parameters: Parameters | None, map: SimplexMap | None, device: str, how: Search,
        certified: dict[InputId, Known],
    ) -> None:  # fmt: skip
        self.module, self.parameters, self.map, self.device = module, parameters, map, device
        self.how, self.certified = how, certified
        self.violations: list[Violation] = []
        self.suspected: list[Violation] = []
        self.withdrawn: set[InputId] = set()
        self.failures: dict[InputId, str] = {}

    def readable(self, inputs: Inputs, positions: Iterable[int]) -> Iterator[Item]:
        """The inputs at these positions; those that cannot be read are noted as failures."""
        for position in positions:
            classes = None if self.parameters is None else self.parameters.num_classes
            item, problem = inputs.attempt(int(position), classes)
            if problem is None:
                yield item
            else:
                self.failures[item.id] = problem

    def attack(
        self, kind: Attacked, items: Sequence[Item], levels: Sequence[float], known: Sequence[float]
    ) -> list[AttackRow]:
        """One row per item and radius; `known` are distances at which items are broken already."""
        groups: dict[SimplexMap | None, list[int]] = {}
        for i, item in enumerate(items):
            if kind == Attacked.SMOOTHED and self._mapless(item):
                self.failures[item.id] = "the run chooses a map at each input, and has not certified this one yet"
                continue
            groups.setdefault(self._map(item) if kind == Attacked.SMOOTHED else None, []).append(i)
        rows = []
        for chosen, members in groups.items():
            part, reached = [items[i] for i in members], [known[i] for i in members]
            rows += self._group(kind, part, levels, reached, chosen)
        return rows

    def keep_suspects(self, rows: list[AttackRow], doubted: Sequence[AttackRow]) -> list[AttackRow]:
        """The rows, but a doubted success that was neither found again nor withdrawn stays as it was stored."""
        again = {(r.id, r.epsilon) for r in rows if r.success}
        kept = {(r.id, r.epsilon): r for r in doubted if (r.id, r.epsilon) not in again and r.id not in self.withdrawn}
        self.suspected += [
            Violation(r.id, r.epsilon, r.distance or 0.0, self.certified[r.id].radius) for r in kept.values()
        ]
        return [kept.get((r.id, r.epsilon), r) for r in rows]

    def _map(self, item: Item) -> SimplexMap | None:
        """The map that the certificate of this input speaks of; None: the majority vote."""
        return self.certified[item.id].map if self._own_maps else self.map

    @property
    def _own_maps(self) -> bool:
        return self.map is None and self.parameters is not None and self.parameters.soft

    def _mapless(self, item: Item) -> bool:
        return self._own_maps and item.id not in self.certified

    def _group(
        self, kind: Attacked, items: list[Item], levels: Sequence[float], known: list[float], chosen: SimplexMap | None
    ) -> list[AttackRow]:
        """All at once; if the network refuses one of them (NaN logits), one by one."""
        try:
            return self._rows(kind, items, levels, known, chosen)
        except Refused as error:
            if len(items) == 1:
                self.failures[items[0].id] = str(error)
                return []
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            shape = tuple(items[0].x.shape)
            raise InputError(f"the network cannot be attacked at inputs of shape {shape}: {one_line(error)}") from error
        return [
            row for item, d in zip(items, known, strict=True) for row in self._group(kind, [item], levels, [d], chosen)
        ]

    def _rows(
        self, kind: Attacked, items: list[Item], levels: Sequence[float], known: list[float], chosen: SimplexMap | None
    ) -> list[AttackRow]:
        x = torch.stack([item.x for item in items]).to(self.device)
        y = torch.tensor([item.label for item in items], device=self.device)
        reached = torch.tensor(known, dtype=torch.float64)
        fresh = torch.nonzero(torch.isinf(reached))[:, 0]
        if len(fresh):
            wrong = self._wrong(kind, x[fresh], y[fresh], chosen)
            reached[fresh[wrong]] = 0.0
            self._examine(kind, items, fresh[wrong], x[fresh[wrong]], reached, 0.0, chosen)
        rows = []
        for epsilon in levels:
            left = torch.nonzero(reached > epsilon)[:, 0]
            if len(left):
                found = self._search(kind, x[left], y[left], epsilon, chosen)
                hit = found.success.cpu()
                reached[left[hit]] = torch.minimum(reached[left[hit]], found.distance.cpu()[hit])
                self._examine(kind, items, left[hit], found.adversarial[found.success], reached, epsilon, chosen)
            rows += [self._row(item, kind, epsilon, d) for item, d in zip(items, reached.tolist(), strict=True)]
        return rows

    def _row(self, item: Item, kind: Attacked, epsilon: float, reached: float) -> AttackRow:
        h, success = self.how, reached <= epsilon
        return AttackRow(
            item.id, kind, epsilon, success, reached if success else None, h.steps, h.restarts, h.seed
        )  # fmt: skip

    def _wrong(self, kind: Attacked, x: Tensor, y: Tensor, chosen: SimplexMap | None) -> Tensor:
        """Which inputs are misclassified as they are."""
        if kind == Attacked.BASE:
            with torch.no_grad():
                out: Tensor = self.module(x)
            if not bool(torch.isfinite(out).all()):
                raise Refused("the network returns NaN or infinity there: it gives no answer to attack")
            return (out.argmax(dim=1) != y).cpu()
        judge = self._classifier(chosen, self.how.seed + 2)
        if chosen is not None and not chosen.votes:
            return overtaken(judge, x, y, chosen, self.how.votes, self.how.alpha).cpu()
        answer = torch.from_numpy(judge.predict(x, self.how.votes, self.how.alpha))
        return (answer >= 0) & (answer != y.cpu())

    def _search(self, kind: Attacked, x: Tensor, y: Tensor, epsilon: float, chosen: SimplexMap | None) -> AttackResult:
        h = self.how
        if kind == Attacked.BASE:
            return pgd(self.module, x, y, epsilon, h.steps, restarts=h.restarts, seed=h.seed)
        classifier = self._classifier(chosen, h.seed)
        return smooth_pgd(
            classifier, x, y, epsilon, h.steps, restarts=h.restarts, draws=h.samples, check_draws=h.votes, alpha=h.alpha,
            seed=h.seed,
        )  # fmt: skip

    def _classifier(self, chosen: SimplexMap | None, seed: int) -> SmoothedClassifier:
        p = self.parameters
        if p is None:
            raise InputError("a smoothed attack needs the noise level: give --sigma, or --run of a certification run")
        made = SmoothedClassifier(
            self.module, p.channels or p.sigma, p.num_classes, seed=seed, chunk_size=p.chunk_size, map=chosen,
            nonfinite=p.nonfinite, noise=p.noise or "float",
        )  # fmt: skip
        made.cells = p.cells
        return made

    def _examine(
        self, kind: Attacked, items: list[Item], which: Tensor, points: Tensor, reached: Tensor, epsilon: float,
        chosen: SimplexMap | None,
    ) -> None:  # fmt: skip
        """Test successes inside certified radii again: note violations, withdraw the rest (distance ∞ again)."""
        if kind != Attacked.SMOOTHED:
            return
        for i, z in zip(which.tolist(), points, strict=True):
            item, distance = items[i], float(reached[i])
            known = self.certified.get(item.id)
            if known is None or not known.contradicts(distance):
                continue
            if self.confirmed(item, z, epsilon, chosen):
                self.violations.append(Violation(item.id, epsilon, distance, known.radius))
            else:
                reached[i] = torch.inf
                self.withdrawn.add(item.id)

    def confirmed(self, item: Item, z: Tensor, epsilon: float, chosen: SimplexMap | None) -> bool:
        """Whether fresh draws show, at level `CONFIRMED`, a class above the label at z."""
        fresh = noise_key(self.how.seed, f"confirm/{item.id}/{epsilon!r}", Stream.PREDICTION, 0)
        judge = self._classifier(chosen, fresh)
        if chosen is not None and not chosen.votes:
            y = torch.tensor([item.label], device=z.device)
            return bool(overtaken(judge, z[None], y, chosen, self.how.confirm, CONFIRMED)[0])
        counts = judge.counts(z, self.how.confirm, input_id=item.id, stream=Stream.PREDICTION)
        return outvoted(counts, item.label, CONFIRMED)


def outvoted(counts: Ints, label: int, level: float) -> bool:
    """Whether some class is more likely than the label, by binomial tests of each against it, together at `level`.

    With c_k votes for k and c_y for the label, `P(Bin(c_k + c_y, ½) ≥ c_k) = I_½(c_k, c_y + 1)` if the two are equally likely.

    >>> outvoted(np.array([40, 60, 0]), 0, 1e-3), outvoted(np.array([10, 45, 45]), 0, 1e-3)
    (False, True)
    """
    others = np.delete(np.asarray(counts, dtype=np.float64), label)
    tails = np.where(others > 0, betainc(np.maximum(others, 1.0), float(counts[label]) + 1.0, 0.5), 1.0)
    return bool((tails * (1 + 1e-10) * len(others) <= level).any())
