"""Rules of others: sound whatever they are called, refused where they say too little, found where they are installed."""

from __future__ import annotations

import functools
import importlib.metadata

import pytest
import torch
from torch import nn

from equipoise.core import Bound, Bracket, InputError, Kind, Refused
from equipoise.lipschitz import Step, induced_bound, known_operations, lipschitz_bound, local_lipschitz, register_rule
from equipoise.lipschitz.operations import Copy
from equipoise.lipschitz.rules import registry

#: what our own rules call things: a label must never be taken for the thing
LABELS = (
    "identity", "relu", "leaky_relu", "view", "selection", "piece", "split", "shift", "sum", "difference", "scaling", "linear",
    "convolution", "matmul", "batch norm", "concatenation", "constant", "mean", "average pooling", "max pooling", "sort", "tanh",
    "softsign", "layer norm", "RMS norm", "constant padding", "maximum", "inside a block", "",
)  # fmt: skip


@torch.library.custom_op("ownrules::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("ownrules::doubled_relu", mutates_args=())
def doubled_relu(x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.relu(x)


for _operation in (doubled, doubled_relu):
    _operation.register_fake(torch.empty_like)


class Own(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.first = nn.Linear(3, 5).double()
        self.last = nn.Linear(5, 2).double()

    def forward(self, x):
        return self.last(self.operation(self.first(x)))


@functools.cache
def captured(operation):
    """A network with the operation inside, an input, and the program of it."""
    torch.manual_seed(1)
    model = Own(operation).eval().requires_grad_(False)
    x = torch.randn(1, 3, dtype=torch.float64)
    return model, x, torch.export.export(model, (x,))


def _stretched(model, x, radius):
    g = torch.Generator().manual_seed(0)
    a, b = (x + radius * torch.randn(200, 3, generator=g, dtype=torch.float64) / 3 for _ in range(2))
    return float(((model(a) - model(b)).norm(dim=1) / (a - b).norm(dim=1)).max())


@pytest.fixture
def rules():
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


@pytest.mark.medium
@pytest.mark.parametrize("slopes", [None, (0.0, 2.0)])
@pytest.mark.parametrize("label", LABELS)
def test_a_label_is_only_shown(label, slopes, rules):
    for operation in (doubled, doubled_relu):
        name = f"{operation._qualname.replace('::', '.')}.default"

        @register_rule(name)
        def bound(call):
            return Step(((call.signal("x"), 2.0),), label, offset=0.0, slopes=slopes)

        model, x, program = captured(operation)
        report = lipschitz_bound(program, x)
        truth = torch.linalg.matrix_norm(2 * model.last.weight @ model.first.weight, 2)
        assert report.upper >= (float(truth) if operation is doubled else _stretched(model, x, 10.0))
        found = local_lipschitz(program, x, 0.2, steps=4)
        assert float(found.upper) >= _stretched(model, x, 0.2)
        assert label in [row.kind for row in report.layers]
        if slopes is None:
            with pytest.raises(Refused, match="no rule for"):
                induced_bound(model, x)


def test_slopes_are_of_one_tensor():
    with pytest.raises(InputError, match="entry by entry"):
        Step((), "nothing", slopes=(0.0, 1.0))


#: answers of a rule for `2x` that are refused, with what is said
POOR = {
    "another way to combine": (lambda x: Step(((x, 2.0),), "sum", combine="Sum"), "'sum' or 'root'"),
    "an estimate": (lambda x: Step(((x, Bound(2.0, Kind.ESTIMATE)),), "linear"), "only estimate"),
    "a lower bound": (lambda x: Step(((x, Bound(2.0, Kind.LOWER)),), "linear"), "only lower"),
    "a negative gain": (lambda x: Step(((x, -2.0),), "linear"), "gives the constant -2"),
    "no number": (lambda x: Step(((x, float("nan")),), "linear"), "gives the constant nan"),
    "no input": (lambda x: Step((), "constant", offset=0.0), "names no input"),
    "a stretched identity": (lambda x: Step(((x, 2.0),), "doubled", map=Copy(same=True)), "have the gain 1"),
    "no step": (lambda x: 2.0, "must return a Step, got float"),
}


@pytest.mark.parametrize("name", POOR)
def test_a_poor_answer_is_refused(name, rules):
    answer, said = POOR[name]
    register_rule("ownrules.doubled.default")(lambda call: answer(call.signal("x")))
    _, x, program = captured(doubled)
    with pytest.raises((InputError, Refused), match=said):
        lipschitz_bound(program, x)


@pytest.mark.parametrize("gain", [Bound(2.0, Kind.UPPER), Bracket(1.9, 2.0)])
def test_a_gain_may_be_a_bound(gain, rules):
    _, x, program = captured(doubled)
    found = []
    for value in (gain, 2.0):
        register_rule("ownrules.doubled.default", override=True)(
            lambda call, value=value: Step(((call.signal("x"), value),), "doubled")
        )
        found.append(lipschitz_bound(program, x).upper)
    assert found[0] == found[1]


class _Entry:
    """An entry point of the group `equipoise.rules`."""

    def __init__(self, value, found):
        self.value, self.found = value, found

    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def _installed(monkeypatch, *entries):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == "equipoise.rules" else ())
    registry._load_installed.cache_clear()
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def test_installed_rules_are_found(monkeypatch):
    rule = {"ownrules.doubled.default": lambda call: Step(((call.signal("x"), 2.0),), "doubled")}
    _installed(monkeypatch, _Entry("package:RULES", rule))
    assert "ownrules.doubled.default" in known_operations()
    assert lipschitz_bound(Own(doubled).eval(), torch.zeros(1, 3, dtype=torch.float64)).upper > 0
    registry._load_installed.cache_clear()


def test_installed_rules_that_cannot_be_loaded_are_named(monkeypatch):
    _installed(monkeypatch, _Entry("package:RULES", ImportError("no such thing")))
    with pytest.raises(InputError, match="package:RULES"):
        known_operations()
    registry._load_installed.cache_clear()
