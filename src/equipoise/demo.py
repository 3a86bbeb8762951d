"""The main job in two minutes on the bundled digits: train, audit, certify, prove, attack, report. `equipoise demo` runs it.

Two networks: a 1-Lipschitz one and one trained under noise; each is certified by smoothing and by proof, and attacked inside
every certificate: a success there is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import certificates
from equipoise.checkpoints import Loaded
from equipoise.core.files import make_folder
from equipoise.data import load_dataset
from equipoise.lipschitz import lipschitz_bound
from equipoise.models import load
from equipoise.nn.convert import with_effective_weights
from equipoise.report import ReportData, collect, write_report
from equipoise.runs import Run, attack_run, certify, prove
from equipoise.train import run_recipe

#: called with what is being done, how much of it is done, and how much there is
Report = Callable[[str, int, int], None]

INTRO = (
    "Two small networks read 8×8 handwritten digits: one is 1-Lipschitz by construction, up to its last layer, "
    "and comes with the package, one was trained under Gaussian noise. "
    "How far can an input move before their answer may change? Certified from below, attacked from above."
)
SOFT = (
    "LVM-RS is shown with a fixed soft map (sparsemax, temperature 0.2), to make the effect of the Lipschitz constant visible. "
    "Left to its calibration it may choose the majority vote instead, and its curve is then that of the votes."
)
#: what is sampled for each network: the folder, and the settings of `certify`. Cohen's bound is derived from the draws of
#: "votes", LVM-RS without the Lipschitz constant from those of "lvm".
SAMPLED: dict[str, dict[str, Any]] = {
    "votes": {},
    "lvm": {"procedure": "lvm", "map": "sparsemax:0.2", "lipschitz": "auto"},
}
EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0)
SIGMA = 0.25
SEED = 0


@dataclass(frozen=True)
class Settings:
    """How much of everything; the defaults take a minute or two on two cores."""

    inputs: int = 120
    draws: int = 1000
    epochs: int = 20
    steps: int = 20


#: seconds instead of minutes: every step, too little of each to look good
QUICK = Settings(16, 200, 4, 6)


def showcase(
    out: str | Path, settings: Settings | None = None, report: Report | None = None
) -> ReportData:
    """Do the main job below `out` and write `out/report.html`; run again in the same folder, it goes on where it stopped.

    Folders: `networks/` (checkpoints), `runs/` (certificates with their attacks; `equipoise report out/runs/*` shows them
    again). `ReportData.tested.broken` is the number of certificates an attack broke: it should be 0.

    Args:
        out: the folder.
        settings: how much of everything.
        report: called with the progress.
    """
    s = settings or Settings()
    show = report or (lambda what, done, total: None)
    out = make_folder(out)
    title = f"CNN trained under noise (σ = {SIGMA:g})"
    noisy = run_recipe(
        "soft-vote-digits",
        out / "networks" / "noise",
        overrides=[
            "name=demo-noise",
            f"noise={{kind: gaussian, sigma: {SIGMA}}}",
            "model.arguments={channels: [16, 32], hidden: 64}",
            "metrics.epsilons=[]",
            f"epochs={s.epochs}",
            f"seed={SEED}",
        ],
        cpu=True,
        progress=lambda event: show(f"train the {title}", event.step, event.steps),
    )
    networks = {
        "lipschitz": ("1-Lipschitz network (BCOP)", load("digits").model),
        "noise": (title, noisy.model),
    }
    folders: list[Path] = []
    audits = {}
    example = torch.zeros(1, 1, 8, 8)
    for key, (name, model) in networks.items():
        plain = with_effective_weights(model, example).eval().requires_grad_(False)
        runs = _certify(Loaded(name, plain, (1, 8, 8)), out / "runs" / key, s, show)
        folders += [run.folder for run in runs]
        show(f"audit the {name}", 0, 1)
        audits[name] = lipschitz_bound(plain, example)
    show("check the proofs", 0, 1)
    notes = [
        SOFT,
        f"The network under noise is trained with seed {SEED}; other seeds give other networks.",
        _check(networks["lipschitz"][1], out / "bundle", s),
    ]
    show("write the report", 0, 1)
    title = "How stable are these two networks?"
    data = collect(folders, title=title, intro=INTRO, audits=audits, notes=notes)
    write_report(data, out / "report.html")
    show("write the report", 1, 1)
    return data


def _check(model: nn.Module, folder: Path, s: Settings) -> str:
    """Certificates of the 1-Lipschitz network as plain files, checked by the program that shares no code with the library."""
    test = load_dataset("digits", "test")
    certificates.write(model, *test.batch(range(s.inputs)), folder, epsilons=EPSILONS)
    proved = certificates.check(folder)
    return (
        f"Checked by an independent program (`equipoise check {folder.name}`): {'; '.join(proved)}."
    )


def _certify(network: Loaded, prefix: Path, s: Settings, show: Report) -> list[Run]:
    """The proved run of a network and its sampled ones, attacked."""
    test = load_dataset("digits", "test")
    noise: dict[str, Any] = {"sigma": SIGMA, "n": s.draws, "seed": SEED}

    def progress(row: Any, done: int, total: int) -> None:
        verb = "certify" if row.draws else "prove"
        show(f"{verb} the {network.source}", done, total)

    common: dict[str, Any] = {"limit": s.inputs, "name": "digits", "progress": progress}
    runs = [prove(network, test, run_dir=f"{prefix}-proved", effort="fast", **common)]
    runs += [
        certify(network, test, run_dir=f"{prefix}-{name}", **options, **noise, **common)
        for name, options in SAMPLED.items()
    ]
    for run in runs:
        attack_run(
            run,
            network,
            test,
            epsilons=EPSILONS,
            steps=s.steps if run.kind == "proved" else s.steps // 3,
            votes=s.draws // 2,
            seed=SEED,
            progress=partial(show, f"attack the {network.source}: {run.folder.name}"),
        )
    return runs
