"""Rules of others: sound whatever they are called, refused where they say too little, found where they are installed."""

import functools

import pytest
import torch
from lipschitz_nets import Op
from torch import nn

from equipoise.core import Bound, Bracket, InputError, Kind, Refused
from equipoise.lipschitz import Step, induced_bound, lipschitz_bound, local_lipschitz, register_rule
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


@functools.cache
def captured(operation):
    """A network with the operation inside, an input, and the program of it."""
    torch.manual_seed(1)
    model = Op(lambda m, x: m.last(operation(m.first(x))), first=nn.Linear(3, 5), last=nn.Linear(5, 2))
    model = model.double().eval().requires_grad_(False)
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
        truth = torch.linalg.matrix_norm(2 * model.parts.last.weight @ model.parts.first.weight, 2)
        assert report.upper >= (float(truth) if operation is doubled else _stretched(model, x, 10.0))
        found = local_lipschitz(program, x, 0.2, steps=4)
        assert float(found.upper) >= _stretched(model, x, 0.2)
        assert label in [row.kind for row in report.layers]
        if slopes is None:
            with pytest.raises(Refused, match="no rule for"):
                induced_bound(model, x)


#: answers of a rule for `2x` that are refused, with what is said
POOR = {
    "another way to combine": (lambda x: Step(((x, 2.0),), "sum", combine="Sum"), "one of sum, root"),
    "slopes without a tensor": (lambda x: Step((), "nothing", slopes=(0.0, 1.0)), "entry by entry"),
    "an estimate": (lambda x: Step(((x, Bound(2.0, Kind.ESTIMATE)),), "linear"), "only estimate"),
    "a lower bound": (lambda x: Step(((x, Bound(2.0, Kind.LOWER)),), "linear"), "only lower"),
    "a negative gain": (lambda x: Step(((x, -2.0),), "linear"), "gives the constant -2"),
    "no number": (lambda x: Step(((x, float("nan")),), "linear"), "gives the constant nan"),
    "no input": (lambda x: Step((), "constant", offset=0.0), "names no input"),
    "no step": (lambda x: 2.0, "must return a Step, got float"),
}


@pytest.mark.parametrize("name", POOR)
def test_a_poor_answer_is_refused(name, rules):
    answer, said = POOR[name]
    register_rule("ownrules.doubled.default")(lambda call: answer(call.signal("x")))
    _, x, program = captured(doubled)
    with pytest.raises((InputError, Refused), match=said):
        lipschitz_bound(program, x)


def test_a_gain_may_be_a_bound(rules):
    _, x, program = captured(doubled)
    totals = []
    for gain in (Bound(2.0, Kind.UPPER), Bracket(1.9, 2.0), 2.0):
        register_rule("ownrules.doubled.default", override=True)(
            lambda call, gain=gain: Step(((call.signal("x"), gain),), "doubled")
        )
        totals.append(lipschitz_bound(program, x).upper)
    assert totals[0] == totals[1] == totals[2]
