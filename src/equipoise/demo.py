"""The main job in two minutes on the bundled digits: train, audit, certify, attack, report. `equipoise demo` runs it.

Two networks: a 1-Lipschitz one, certified by its margin, and one trained under noise, certified by smoothing; each is certified
both ways, attacked inside every certificate, and a success there is an error.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.attacks import AttackResult, pgd, smooth_pgd
from equipoise.checkpoints import Loaded
from equipoise.core.errors import InputError
from equipoise.data import load_dataset
from equipoise.data.dataset import Dataset
from equipoise.lipschitz import certified_radius
from equipoise.lipschitz.logs import exp_up
from equipoise.models import load
from equipoise.nn.convert import with_effective_weights
from equipoise.report.audits import audit_network, save_audit
from equipoise.report.collect import collect
from equipoise.report.data import GLOBAL, PAIRS, Audit, Margins, Picture, ReportData
from equipoise.report.gallery import data_uri, save_gallery
from equipoise.report.page import plotly_source, write_report
from equipoise.runs import Attacked, AttackRow, Row, Run, certify
from equipoise.runs.models import hash_module
from equipoise.smoothing import SmoothedClassifier
from equipoise.smoothing.procedures import DEFAULT
from equipoise.train import run_recipe

#: told what is being done, how much of it, and of how much
Say = Callable[[str, int, int], None]

INTRO = (
    "Two small networks read 8×8 handwritten digits: one is 1-Lipschitz by construction, up to its last layer, "
    "and comes with the package, one was trained under Gaussian noise. "
    "How far can an input move before their answer may change? Certified from below, attacked from above."
)
SOFT = (
    "LVM-RS is shown with a fixed soft map (sparsemax, temperature 0.2), to make the effect of the Lipschitz constant visible. "
    "Left to its calibration it may choose the majority vote instead, and its curve is then that of CPM."
)
#: share of a certified radius that is attacked: the certificate speaks of the open ball
INSIDE = 1 - 1e-6


@dataclass(frozen=True)
class Settings:
    """How much of everything; the defaults take a minute or two on two cores."""

    inputs: int = 120
    draws: int = 1000
    selection: int = 100
    sigma: float = 0.25
    alpha: float = 1e-3
    epochs: int = 20
    width: int = 16
    local_inputs: int = 3
    local_radius: float = 0.1
    attack_steps: int = 20
    attack_rounds: int = 7
    smooth_steps: int = 6
    smooth_draws: int = 8
    smooth_rounds: int = 5
    check_draws: int = 400
    reach: float = 2.0
    pictures: int = 10
    seed: int = 0


#: seconds instead of minutes: every step, too little of each to look good
QUICK = Settings(
    inputs=16, draws=200, epochs=4, width=8, local_inputs=1, attack_steps=6, attack_rounds=3,
    smooth_steps=3, smooth_draws=4, smooth_rounds=2, check_draws=100, pictures=4,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Network:
    """One of the two: its short name (of folders), its full name (in the report), and the module with effective weights."""

    key: str
    title: str
    model: nn.Module

    @property
    def loaded(self) -> Loaded:
        """As `certify` takes it, with its name."""
        return Loaded(self.title, self.model, (1, 8, 8))


def showcase(out: str | Path, settings: Settings | None = None, say: Say | None = None) -> ReportData:
    """Do the main job below `out` and write `out/report.html`; run again in the same folder, it goes on where it stopped.

    Folders: `networks/` (checkpoints), `runs/` (certificates with their attacks; `equipoise report out/runs/*` makes the page
    anew). `ReportData.tested.broken` is the number of certificates an attack broke: it should be 0.
    """
    plotly_source()  # before minutes are spent
    chosen, out, tell = settings or Settings(), Path(out), say or (lambda what, done, total: None)
    _make(out)
    test = load_dataset("digits", "test")
    x, y = _batch(test, chosen.inputs)
    ids = [int(i) for i in test.ids[: chosen.inputs]]
    networks = both(out / "networks", chosen, tell)
    for network in networks:
        audit = _audit(network, x, ids, chosen, tell)
        runs = _certify(network, out / "runs", test, chosen, tell)
        folder = out / "runs" / f"{network.key}-margin"
        found, adversarial = margins(network, audit, x, y, ids, chosen, tell)
        found.save(folder)
        save_audit(audit, folder)
        for run in runs:
            attack_run(network, run, x, y, chosen, tell)
        save_gallery(_pictures(network, found, adversarial, x, y, chosen), folder)
    tell("write the report", 0, 1)
    folders: list[str | Path] = [out / "runs" / f"{n.key}-{w}" for n in networks for w in ("margin", *SAMPLED)]
    notes = [SOFT, f"The network under noise is trained with seed {chosen.seed}; other seeds give other networks."]
    data = collect(folders, title="How stable are these two networks?", intro=INTRO, notes=notes)
    write_report(data, out / "report.html")
    tell("write the report", 1, 1)
    return data


def _make(folder: Path) -> None:
    """Make a folder that can be written to, or say why not, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error


def _batch(data: Dataset, count: int) -> tuple[Tensor, Tensor]:
    pairs = [data[i] for i in range(min(count, len(data)))]
    return torch.stack([p[0] for p in pairs]), torch.tensor([int(p[1]) for p in pairs])


# ---- train --------------------------------------------------------------------------------------------------------------


def recipe(s: Settings) -> dict[str, Any]:
    """The network under noise."""
    return {
        "name": "demo-noise", "data": {"path": "digits"}, "batch_size": 64, "seed": s.seed, "epochs": s.epochs,
        "metrics": {"bound": False, "epsilons": []}, "noise": {"kind": "gaussian", "sigma": s.sigma},
        "model": {
            "factory": "equipoise.nn.models:cnn", "arguments": {"channels": [s.width, 2 * s.width], "hidden": 4 * s.width}
        },
        "optimizer": {"lr": 0.05, "weight_decay": 5e-4, "nesterov": True}, "schedule": {"kind": "cosine", "warmup": 0.1},
    }  # fmt: skip


def both(folder: Path, s: Settings, tell: Say) -> list[Network]:
    """The 1-Lipschitz network of the package, and one trained under noise (or opened), with their effective weights."""
    title = f"CNN trained under noise (σ = {s.sigma:g})"
    tell(f"train the {title}", 0, 1)
    result = run_recipe(
        recipe(s), folder / "noise", cpu=True, progress=lambda p: tell(f"train the {title}", p.step, p.steps)
    )
    digits = load("digits")
    example = torch.zeros(1, *(digits.input_shape or ()))
    found = {"lipschitz": ("1-Lipschitz network (BCOP)", digits.model), "noise": (title, result.model)}
    models = {key: with_effective_weights(model, example).eval() for key, (_, model) in found.items()}
    return [Network(key, title, models[key].requires_grad_(False)) for key, (title, _) in found.items()]


# ---- audit and certify ----------------------------------------------------------------------------------------------------


def _audit(network: Network, x: Tensor, ids: Sequence[int], s: Settings, tell: Say) -> Audit:
    what = f"audit the {network.title}"
    tell(what, 0, 1)
    near = slice(0, s.local_inputs)
    found = audit_network(
        network.title, network.model, x[:1], inputs=x[near], ids=ids[near], radius=s.local_radius, steps=s.attack_steps
    )
    tell(what, 1, 1)
    return found


#: what is sampled for each network: the folder, and the settings of `certify`. Cohen's bound is derived from the draws of
#: "votes", LVM-RS without the Lipschitz constant from those of "lvm".
SAMPLED: Mapping[str, Mapping[str, Any]] = {
    "votes": {"procedure": DEFAULT},
    "lvm": {"procedure": "lvm", "map": "sparsemax:0.2", "lipschitz": "auto"},
}


def _certify(network: Network, folder: Path, test: Dataset, s: Settings, tell: Say) -> list[Run]:
    runs = []
    for name, options in SAMPLED.items():
        what = f"certify the {network.title}: {name}"
        tell(what, 0, s.inputs)

        def progress(row: Row, done: int, total: int, what: str = what) -> None:
            tell(what, done, total)

        runs.append(
            certify(
                network.loaded, test, run_dir=folder / f"{network.key}-{name}", sigma=s.sigma, n0=s.selection, n=s.draws,
                alpha=s.alpha, limit=s.inputs, seed=s.seed, name="digits", progress=progress, **options,
            )
        )  # fmt: skip
    return runs


def margins(
    network: Network, audit: Audit, x: Tensor, y: Tensor, ids: Sequence[int], s: Settings, tell: Say
) -> tuple[Margins, AttackResult]:
    """Deterministic certificates of the real function, attacked inside, and the closest adversaries found."""
    what = f"attack the {network.title}"
    tell(what, 0, s.attack_rounds + 1)
    upper = exp_up(float(audit.bound["log_upper"]))
    with torch.no_grad():
        logits = network.model(x)
    prediction = logits.argmax(dim=1)
    certified = certified_radius(network.model, x, prediction, effort="fast")
    radius = certified.radius.numpy()

    def attack(x: Tensor, y: Tensor, epsilon: Tensor, seed: int) -> AttackResult:
        return pgd(network.model, x, y, epsilon, s.attack_steps, seed=seed)

    rows = inside(attack, Attacked.BASE, x, y, prediction.numpy(), radius, ids, (s.attack_steps, s.seed))
    tell(what, 1, s.attack_rounds + 1)
    found = closest_adversarial(
        attack, x, y, s.reach, s.attack_rounds, s.seed, lambda i: tell(what, i + 1, s.attack_rounds + 1)
    )
    rows += _rows(found, Attacked.BASE, ids, s.reach, (s.attack_steps, s.seed))
    model = {"source": network.title, "hash": hash_module(network.model)}
    return Margins(
        model, "digits", upper, tuple(str(i) for i in ids), y.numpy().astype(np.int64), prediction.numpy().astype(np.int64),
        radius, tuple(rows), PAIRS if "pairs" in certified.methods else GLOBAL,
    ), found  # fmt: skip


# ---- attack ---------------------------------------------------------------------------------------------------------------

Attack = Callable[[Tensor, Tensor, Tensor, int], AttackResult]


def attack_run(network: Network, run: Run, x: Tensor, y: Tensor, s: Settings, tell: Say) -> None:
    """Attack the smoothed classifier of a run inside its largest certificates, then look for close adversarial examples."""
    what = f"attack the smoothed {network.title}: {run.folder.name.partition('-')[2]}"
    tell(what, 0, 1)
    ids = [int(i) for i in run.ids]
    found = [run.certificates(), *([run.certificates(procedure="cohen")] if run.manifest.map is None else [])]
    radius = np.max([c.radius * (c.prediction == run.labels) for c in found], axis=0)
    classifier = SmoothedClassifier(network.model, s.sigma, 10, map=run.map, seed=s.seed + 1)
    risk = s.alpha / (8 * s.inputs)  # of calling a harmless point a success, over all attacks of the demonstration

    def attack(x: Tensor, y: Tensor, epsilon: Tensor, seed: int) -> AttackResult:
        return smooth_pgd(
            classifier,
            x,
            y,
            epsilon,
            s.smooth_steps,
            draws=s.smooth_draws,
            check_draws=s.check_draws,
            alpha=risk,
            seed=seed,
        )

    rows = inside(attack, Attacked.SMOOTHED, x, y, run.labels, radius, ids, (s.smooth_steps, s.seed))
    if run.manifest.map is None:
        close = closest_adversarial(
            attack, x, y, s.reach, s.smooth_rounds, s.seed, lambda i: tell(what, i, s.smooth_rounds)
        )
        rows += _rows(close, Attacked.SMOOTHED, ids, s.reach, (s.smooth_steps, s.seed))
    run.add_attacks(rows)
    tell(what, 1, 1)


def inside(
    attack: Attack,
    kind: Attacked,
    x: Tensor,
    y: Tensor,
    prediction: Any,
    radius: Any,
    ids: Sequence[int],
    used: tuple[int, int],
) -> list[AttackRow]:
    """Attack every certificate of a right answer just inside its radius."""
    at = np.flatnonzero((np.asarray(prediction) == y.numpy()) & (np.asarray(radius) > 0))
    if not len(at):
        return []
    epsilon = torch.from_numpy(np.asarray(radius, dtype=np.float64)[at] * INSIDE)
    found = attack(x[at], y[at], epsilon, used[1])
    return [
        AttackRow(ids[int(i)], kind, float(e), bool(hit), float(d) if hit else None, used[0], 1, used[1])
        for i, e, hit, d in zip(at, epsilon, found.success, found.distance, strict=True)
    ]


def closest_adversarial(
    attack: Attack,
    x: Tensor,
    y: Tensor,
    reach: float,
    rounds: int,
    seed: int = 0,
    done: Callable[[int], None] | None = None,
) -> AttackResult:
    """Bisect the attack's radius for each input: the closest success within `rounds` attacks; distance ∞ where there is none.

    Inputs that are misclassified as they are have distance 0.
    The distance is an upper bound of that to the nearest adversarial example; a failed attack proves nothing.
    """
    low = torch.zeros(len(x), dtype=torch.float64)
    clean = attack(x, y, low, seed)
    best = torch.where(clean.success, low, torch.inf)
    points = x.clone()
    epsilon = torch.full_like(low, reach)
    for i in range(rounds):
        found = attack(x, y, epsilon, seed + i)
        closer = found.success & (found.distance < best)
        points[closer], best = found.adversarial[closer], torch.where(closer, found.distance, best)
        low = torch.where(found.success, low, torch.maximum(low, epsilon)).minimum(best)
        epsilon = (low + best.clamp(max=reach)) / 2
        if done is not None:
            done(i + 1)
    return AttackResult(points, best < torch.inf, best)


def _rows(
    found: AttackResult, kind: Attacked, ids: Sequence[int], reach: float, used: tuple[int, int]
) -> list[AttackRow]:
    return [
        AttackRow(i, kind, reach, bool(hit), float(d) if hit else None, used[0], 1, used[1])
        for i, hit, d in zip(ids, found.success, found.distance, strict=True)
    ]


def _pictures(
    network: Network, found: Margins, adversarial: AttackResult, x: Tensor, y: Tensor, s: Settings
) -> list[Picture]:
    """One input of every class that is answered right, then the next ones and a mistake: certified by the margin, attacked."""
    right = torch.from_numpy(found.prediction) == y
    first = [int(((y == c) & right).nonzero()[0]) for c in y[right].unique()]
    wrong = [int(i) for i in (~right).nonzero()[:1]]
    others = [i for i in range(len(y)) if i not in (*first, *wrong)]
    chosen = [*[*first, *others][: s.pictures - len(wrong)], *wrong]
    with torch.no_grad():
        answers = network.model(adversarial.adversarial).argmax(dim=1)
    return [
        Picture(
            network.title, str(found.ids[i]), str(int(y[i])), str(int(found.prediction[i])), float(found.radius[i]),
            "deterministic", data_uri(x[i].numpy()),
            data_uri(adversarial.adversarial[i].numpy()) if bool(adversarial.success[i]) else None,
            float(adversarial.distance[i]) if bool(adversarial.success[i]) else None, str(int(answers[i])),
        )
        for i in chosen
    ]  # fmt: skip
