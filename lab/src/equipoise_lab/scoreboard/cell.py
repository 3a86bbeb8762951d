"""One cell of the scoreboard: a family, a loss and a seed, trained for a budget of processor time, certified and attacked.

The scoreboard's network with layers of other libraries, where they are installed: orthogonium and deel-torchlip.

Their weights are made by `torch.nn.utils.parametrize`; the builders here return networks whose bound is proved from the weights
that the forward pass uses, as for ours. They are no registered models: their checkpoints are weights alone.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from equipoise.attacks import pgd
from equipoise.core.errors import EquipoiseError, InputError
from equipoise.core.files import atomic_write, make_folder, read_json, sealed, unsealed
from equipoise.nn.models.lipschitz import families
from equipoise.nn.models.plain import Size
from equipoise.train import Recipe, read_recipe, run_recipe
from equipoise.train.build import Part, Parts, build_data
from equipoise.train.loop import step_seconds
from equipoise.train.losses import LOSSES as TASKS
from equipoise.train.metrics import certified_bound, evaluate
from equipoise_lab.scoreboard.autoattack import autoattack
from equipoise_lab.scoreboard.networks import board_network

#: rows of the lab's own networks: name → builder
NETWORKS = {
    "lipnext": "equipoise_lab.scoreboard.networks:lipnext",
    "lot": "equipoise_lab.scoreboard.networks:lot",
}
#: rows of other libraries' layers: name → builder
PEERS = {
    "orthogonium-aoc": f"{__name__}:orthogonium_aoc",
    "torchlip-spectral": f"{__name__}:torchlip_spectral",
}


def baked(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode with the weights that `parametrize` computes now, as plain weights: one fixed map.

    Layers with a power iteration of their own change a buffer with every call; what is certified must not.
    """
    fixed = copy.deepcopy(model).eval()
    with torch.no_grad():
        for module in list(fixed.modules()):
            for name in list(getattr(module, "parametrizations", {})):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return fixed


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"this row needs {package}: pip install {package}") from error


def orthogonium_aoc(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """AOC convolutions and orthogonal dense layers of orthogonium."""
    layers = _module("orthogonium.layers", "orthogonium")
    return board_network(
        lambda i, o: layers.AdaptiveOrthoConv2d(i, o, 3, padding="same", padding_mode="zeros"),
        layers.OrthoLinear, num_classes, in_channels, input_size, channels, depths, hidden,
    )  # fmt: skip


def torchlip_spectral(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """Spectral convolutions (Björck on the flattened kernel) and dense layers of deel-torchlip."""
    lip = _module("deel.torchlip", "deel-torchlip")
    return board_network(
        lambda i, o: lip.SpectralConv2d(i, o, 3, padding=1),
        lip.SpectralLinear, num_classes, in_channels, input_size, channels, depths, hidden,
    )  # fmt: skip


#: radii of the table, over 255, as in the literature; all are multiples of the first one, the budget's ε
RADII = (36, 72, 108, 255)
#: radii of the curve of certified accuracy, over 255
CURVE = tuple(sorted({*range(9, 307, 9), *RADII}))
#: how many inputs are attacked by PGD, and with how many steps
ATTACKED, STEPS = 500, 20

#: losses by name: arguments of a recipe's `loss`, ε being the radius that certificates are wanted at
LOSSES: dict[str, Callable[[float], dict[str, Any]]] = {
    "lmt": lambda e: {"kind": "lmt", "epsilon": 2.5 * e, "start": 0.1 * e, "temperature": 0.125},
    "emma": lambda e: {"kind": "emma", "epsilon": 3 * e, "start": 0.1 * e, "temperature": 0.125},
    "la": lambda e: {
        "kind": "la",
        "epsilon": 0.0,
        "offset": 3 * e,
        "temperature": 0.125,
        "gamma": 5.0,
    },
    "hkr": lambda e: {"kind": "hkr", "alpha": 0.98, "margin": 4 * e},
    "offset-ce": lambda e: {"kind": "lipschitz-ce", "offset": 3.5 * e, "temperature": 0.125},
    "ce": lambda e: {"kind": "ce"},
}


#: Muon keeps orthogonal matrices orthogonal, so that their layers need no decomposition; products in bfloat16
_MUON = ("optimizer={kind: muon, lr: 1.2e-2}", "precision=bf16")
#: rows that train the same network in another way: changes of the recipe
VARIANTS = {
    "bcop-muon": ("model.arguments.family=bcop", "model.arguments.dense=bcop", *_MUON),
    "lipnext-muon": (f"model.factory={NETWORKS['lipnext']}", *_MUON),
    # as the packaged network is trained: for images that may be mirrored
    "bcop-desk": (
        "model.arguments.family=bcop",
        "model.arguments.dense=bcop",
        "model.arguments.mirrored=true",
        "schedule.points=[[0, 0.1], [0.03, 1], [0.4, 1], [1, 0]]",
        "ema=0.995",
        *_MUON,
    ),
}


@dataclass(frozen=True, order=True)
class Cell:
    """What is trained."""

    family: str
    loss: str = "lmt"
    seed: int = 0

    @property
    def name(self) -> str:
        """As a folder."""
        return f"{self.family}.{self.loss}.{self.seed}"

    def check(self) -> Cell:
        """Refuse a family or a loss that is not there."""
        names = (*families(), *NETWORKS, *PEERS, *VARIANTS)
        if self.family not in names:
            raise InputError(f"there is no family {self.family!r}; there are {', '.join(names)}")
        if self.loss not in LOSSES:
            raise InputError(
                f"the scoreboard has no loss {self.loss!r}; it has {', '.join(LOSSES)}"
            )
        return self


@dataclass(frozen=True)
class Budget:
    """What every cell gets: minutes of one core (processor time), on `limit` of the data; the network of every family."""

    data: str
    minutes: float
    channels: tuple[int, ...] = (40, 80, 128)
    depths: tuple[int, ...] = (2, 2, 1)
    hidden: int = 256
    batch_size: int = 256
    lr: float = 2e-3
    epsilon: float = 36 / 255
    test_limit: int | None = None
    flip: bool = True

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InputError(f"the budget must be a positive number of minutes, got {self.minutes}")

    def radius(self, over: int) -> float:
        """The radius that stands for `over`/255 in the table: ε for 36."""
        return over * self.epsilon / RADII[0]


def located(data: str) -> str:
    """The data as named where that can be read from here; else the file of that name in the folder `EQUIPOISE_DATA`.

    >>> located("digits")
    'digits'
    """
    folder = os.environ.get("EQUIPOISE_DATA")
    beside = folder and not Path(data).exists() and (Path(folder) / data).exists()
    return f"${{EQUIPOISE_DATA}}/{data}" if beside else data


def recipe(cell: Cell, budget: Budget, epochs: int = 1, limit: int | None = None) -> Recipe:
    """The training of a cell; only family, loss and seed differ between cells of one board, and what `VARIANTS` say."""
    factory = {**NETWORKS, **PEERS}.get(cell.family, "equipoise.nn.models:lipschitz_cnn")
    model: dict[str, Any] = {
        "factory": factory,
        "arguments": {
            "channels": list(budget.channels),
            "depths": list(budget.depths),
            "hidden": budget.hidden,
        },
    }
    if cell.family in families():
        model["arguments"]["family"] = cell.family
    loss = LOSSES[cell.loss](budget.epsilon)
    if cell.family in PEERS and cell.loss in ("lmt", "gloro", "emma", "la"):
        loss["lipschitz"] = (
            1.0  # what their layers are held at; the certificate rests on the proved bound
        )
    augment = [{"kind": "pad-crop", "padding": 3}, "flip"] if budget.flip else []
    document = {
        "name": cell.name, "model": model, "loss": loss, "seed": cell.seed,
        "data": {"path": located(budget.data), "augment": augment, "limit": limit, "test_limit": budget.test_limit},
        "optimizer": {"kind": "nadam", "lr": budget.lr, "clip": 3.0},
        "schedule": {"kind": "piecewise", "points": [[0, 0.05], [0.05, 1], [0.5, 1], [1, 0]]},
        "epochs": epochs, "batch_size": budget.batch_size, "checkpoint_steps": 50,
        "metrics": {"epsilons": [budget.radius(r) for r in CURVE], "every": max(1, epochs)},
    }  # fmt: skip
    return read_recipe(document, VARIANTS.get(cell.family, ()))


def _step_seconds(recipe: Recipe, parts: Parts) -> float:
    """Processor seconds of a training step of a recipe."""
    return step_seconds(recipe, parts, steps=4)


def fitting(seconds: float, budget: Budget, count: int) -> tuple[int, int]:
    """Epochs, and how many of `count` examples, that take the budget at so many seconds a step.

    >>> fitting(1.0, Budget("digits", 1.0, batch_size=100), 1000)
    (6, 1000)
    """
    steps = max(1, int(60 * budget.minutes / seconds))
    whole = max(1, count // budget.batch_size)
    epochs = -(-steps // whole)
    return epochs, min(count, max(1, steps // epochs) * budget.batch_size)


def play_cell(cell: Cell, budget: Budget, folder: Path, autoattack: int = 0) -> dict[str, Any]:
    """Train, certify and attack; a cell that was played is read, one that was stopped goes on.

    `autoattack`: how many inputs AutoAttack gets too; a cell that was played without it is attacked again.
    """
    result = folder / "result.json"
    request = json.loads(json.dumps({"cell": asdict(cell), "budget": asdict(budget)}))
    if result.exists():
        stored: dict[str, Any] = unsealed(read_json(result), str(result), needed=True)
        if stored.get("asked") != request:
            raise InputError(
                f"{folder} was played with another budget: choose another folder, or remove this one"
            )
        if stored.get("autoattack_samples", 0) >= min(autoattack, stored["attacked_samples"]):
            return stored
    make_folder(folder)
    try:
        figures = _measured(cell, budget, folder, autoattack)
    except (
        EquipoiseError
    ) as error:  # a row with the reason, the others go on; the next time it is tried again
        return {"asked": request, "refused": str(error)}
    atomic_write(
        result, json.dumps(sealed({"asked": request, **figures}), indent=1, allow_nan=False) + "\n"
    )
    return {"asked": request, **figures}


def _measured(cell: Cell, budget: Budget, folder: Path, autoattack: int) -> dict[str, Any]:
    first = recipe(cell, budget)
    whole = build_data(first.data)
    speed = folder / "step.json"
    if speed.exists():  # the plan of a cell that was stopped stays what it was
        seconds = float(read_json(speed)["seconds"])
    else:
        seconds = _step_seconds(first, whole)
        atomic_write(speed, json.dumps({"seconds": seconds}) + "\n")
    epochs, limit = fitting(seconds, budget, len(whole.train))
    began = time.process_time()
    done = run_recipe(
        recipe(cell, budget, epochs, limit), folder / "run", cpu=True, allow_code=True
    )
    test = tested(whole)
    model, final = done.model, done.final
    if cell.family in PEERS:  # measured again as the fixed network that is certified
        model = baked(model)
        bounded = certified_bound(model, whole.train.source.input_shape, first.metrics.rtol)
        figures = evaluate(model, test, TASKS["ce"](), torch.device("cpu"), first.metrics, bounded)
        final = {**final, **figures, "bound": bounded.upper, "bound_reason": bounded.reason}
    certified = final.get("certified_accuracy")
    if final.get("bound") is None or certified is None:
        raise EquipoiseError(
            f"no certificate: {final.get('bound_reason') or 'the bound was refused'}"
        )
    return {
        "accuracy": final["accuracy"], "bound": final["bound"], "samples": len(test), "curve": certified,
        "certified": {str(budget.radius(r)): certified[str(budget.radius(r))] for r in RADII},
        **attacks(model, test, budget.epsilon, autoattack),
        "parameters": sum(p.numel() for p in done.model.parameters()), "step_seconds": seconds, "steps": final["step"],
        "epochs": epochs, "examples": limit, "processor_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def tested(data: Parts) -> Part:
    """The test split; data without one are refused."""
    if data.test is None:
        raise InputError("the scoreboard certifies test inputs, and these data have no test split")
    return data.test


def attacks(model: nn.Module, test: Part, epsilon: float, auto: int = 0) -> dict[str, Any]:
    """The share of the first test inputs that stay right under PGD, and of the first `auto` of them under AutoAttack too.

    AutoAttack goes at those that PGD left standing: 5 to 30 seconds of processor time each.
    """
    x, y = test.batch(torch.arange(min(ATTACKED, len(test))))
    broken = pgd(model, x, y, epsilon, steps=STEPS).success
    figures = {"attacked": 1 - float(broken.double().mean()), "attacked_samples": len(x)}
    if auto < 1:
        return figures
    broken = broken[:auto].clone()
    standing = (~broken).nonzero().flatten()
    if len(standing):
        broken[standing] = autoattack(model, x[standing], y[standing], epsilon).success
    return {
        **figures,
        "autoattack": 1 - float(broken.double().mean()),
        "autoattack_samples": len(broken),
    }
