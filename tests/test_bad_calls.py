"""Bad arguments end in one sentence: every public function is called with None, strings, numbers, NaN and empty tensors.

Each required argument is replaced in turn, the others being sensible. A call may succeed, or raise `EquipoiseError`,
`TypeError` or `ValueError`; an error of any other kind (AttributeError, IndexError, RuntimeError, …) comes from inside.
"""

import inspect
import math
import traceback
import warnings

import pytest
import torch
from torch import nn

import equipoise as eq

pytestmark = pytest.mark.medium

PACKAGES = ("attacks", "curvature", "lipschitz", "models", "nn", "norms", "optim", "regularizers", "smoothing")

BAD = {
    "None": None,
    "a string": "nonsense",
    "a whole number": -3,
    "NaN": math.nan,
    "an empty tensor": torch.empty(0),
    "integers": torch.randint(0, 255, (2, 1, 8, 8)),
    "a tensor with NaN": torch.full((2, 1, 8, 8), math.nan),
}

#: what is not called here, with the reason
LEFT_OUT = {
    "lightning_monitor",  # need Lightning
    "Call", "tensorboard_sink",   # made by the library; writes where it is told
    "Bound", "Bracket", "Kind", "EquipoiseError", "InputError", "Refused",  # plain types
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 64, 3))
    return nn.Sequential(*body).eval().requires_grad_(False)


def sensible(name: str) -> object:
    """An argument that a parameter of that name takes."""
    x, y = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    values = {
        "model": network(), "network": network(), "module": network(), "classifier": network(), "denoiser": nn.Identity(),
        "x": x, "inputs": x, "example_input": x[:1], "example": x[:1], "sample": x[:1], "image": x, "images": x,
        "y": y, "labels": y, "targets": y, "target": 1.0, "logits": torch.rand(2, 3), "h": torch.rand(2, 3),
        "data": (x, y), "loss": "ce", "sigma": 0.5, "epsilon": 0.1, "eps": 0.1, "radius": 0.1, "alpha": 1e-3, "n": 100,
        "num_classes": 3, "classes": 3, "weight": torch.rand(3, 4), "W": torch.rand(3, 4), "A": torch.rand(3, 4),
        "in_features": 4, "out_features": 3, "in_channels": 2, "out_channels": 2, "kernel_size": 3, "channels": 2, "features": 4,
        "selection": [6, 3, 1], "estimation": [60, 30, 10], "p": 0.9, "p1": 0.9, "p2": 0.1, "k": 9, "mean": 0.5, "var": 0.1,
        "samples": [0.5, 0.7], "lipschitz": 1.0, "bound": 1.0, "path": "missing.json", "run_dir": "run", "source": "digits",
        "optimizer": torch.optim.SGD(network().requires_grad_(True).parameters(), lr=0.1), "correct": [True], "size": (8, 8),
        "input_size": (8, 8), "dim": 1, "margin": 0.5, "temperature": 1.0, "names": None, "name": "digits",
    }  # fmt: skip
    return values.get(name, 1)


def public() -> dict[str, object]:
    """Every public function and class, by its dotted name."""
    found = {f"eq.{name}": getattr(eq, name) for name in eq.__all__}
    for package in PACKAGES:
        module = getattr(eq, package)
        found |= {f"eq.{package}.{name}": getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in found.items()
        if callable(value) and not inspect.ismodule(value) and name.rpartition(".")[2] not in LEFT_OUT
    }


def required(function: object) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in kinds]


def raw_errors(function: object) -> list[str]:
    """The calls of a function that end in an error from inside, in words."""
    names = required(function)
    found = []
    for place in names:
        for label, value in BAD.items():
            arguments = {name: value if name == place else sensible(name) for name in names}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(**arguments)
            except (eq.EquipoiseError, TypeError, ValueError):
                pass
            except Exception as error:  # noqa: BLE001 – that is what is looked for
                frames = traceback.extract_tb(error.__traceback__)
                if any("torch/nn/modules" in frame.filename for frame in frames):
                    continue  # the network itself refuses its input
                found.append(f"{place} = {label}: {type(error).__name__}: {str(error)[:80]}")
    return found


@pytest.mark.parametrize("name", public())
def test_bad_arguments_end_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not raw_errors(public()[name])
