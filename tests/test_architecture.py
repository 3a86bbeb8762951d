"""`docs/architecture.md` is kept true: its walks are followed call by call, its floors are those that are enforced."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walks() -> dict[str, list[str]]:
    """Heading of each walk → the functions it names, in order: `` `module.function` `` at the start of a numbered line."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        found[heading.strip()] = re.findall(r"^\d+\. `([\w.]+)`", body, flags=re.MULTILINE)
    return found


class Calls:
    """Names of the package's own functions in the order in which they were first called."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seen: set[str] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("equipoise."):
            name = f"{module.removeprefix('equipoise.')}.{frame.f_code.co_qualname}"
            if name not in self.seen:
                self.seen.add(name)
                self.names.append(name)


def follow(action: Callable[[], object]) -> list[str]:
    calls = Calls()
    sys.setprofile(calls)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls.names


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).eval()


def bound() -> object:
    return eq.lipschitz_bound(network(), torch.zeros(1, 1, 4, 4))


def norm() -> object:
    return eq.spectral_norm(nn.Conv2d(2, 3, 3, padding=1), input_size=(8, 8))


def certify(folder: Path) -> object:
    data = torch.utils.data.TensorDataset(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    run = eq.certify(network(), data, run_dir=folder / "run", sigma=0.25, num_classes=3, n0=8, n=16)
    return run.certificates()


def step(folder: Path) -> object:
    overrides = ["epochs=1", "data.limit=32", "data.test_limit=16", "batch_size=16", "metrics.bound=false"]
    return eq.train.run_recipe("sll-sr-digits", folder / "train", overrides=overrides)


def export() -> object:
    return eq.export(eq.nn.SRLinear(4, 3).eval())


ACTIONS: dict[str, Callable[[Path], object]] = {
    "lipschitz_bound": lambda _: bound(),
    "spectral_norm": lambda _: norm(),
    "certify": certify,
    "a training step": step,
    "export": lambda _: export(),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_walk_visits_the_functions_that_the_page_names_in_that_order(name: str, tmp_path: Path) -> None:
    named = walks()[name]
    assert 4 <= len(named) <= 10
    called = follow(lambda: ACTIONS[name](tmp_path))
    missing = [n for n in named if n not in called]
    assert not missing, f"never called: {missing}"
    places = [called.index(n) for n in named]
    assert places == sorted(places), f"the order is {[called[p] for p in sorted(places)]}"


def test_the_page_draws_the_floors_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    enforced = [sorted(re.findall(r"equipoise\.(\w+)", layer)) for layer in layers]
    picture = re.search(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert picture is not None
    drawn = [sorted(re.findall(r"\b(\w+)/", line)) for line in picture[1].splitlines() if "/" in line]
    assert drawn == enforced


def test_every_room_of_the_package_is_on_the_page() -> None:
    rooms = {p.name for p in (ROOT / "src" / "equipoise").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    missing = [room for room in rooms if f"{room}/" not in PAGE]
    assert not missing, missing
