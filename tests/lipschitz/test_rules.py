"""Every rule against every attack: a row is an operation, its input shape, whether the constant is attained, and a ball."""

import math

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import attack
from lipschitz_nets import Op
from rule_rows import CASES
from torch import nn

from equipoise.core import Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_the_rule_holds_under_attack(name):
    op, shape, fraction, ball = CASES[name]
    module = (op if isinstance(op, nn.Module) else Op(op)).eval()
    report = lipschitz_bound(module, torch.zeros(1, *shape), ball=ball)
    found = attack(module, shape, ball, steps=60)
    assert report.upper <= report.product
    assert found <= report.upper * (1 + 1e-7)
    assert found >= fraction * report.upper, f"attack reaches {found}, bound {report.upper}"


#: rows that are always tried in a ball, too; all of them with the slow tests
LOCALLY = ("max min of groups", "max min interleaved", "mean in a named type", "nothing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in LOCALLY else pytest.mark.slow) for n in CASES])
def test_the_rule_holds_in_a_ball(name):
    """`local_lipschitz` fails by itself where its own attack exceeds the bound."""
    op, shape, _, _ = CASES[name]
    module = (op if isinstance(op, nn.Module) else Op(op)).eval()
    try:
        found = local_lipschitz(module, torch.linspace(0.5, 1.5, math.prod(shape)).reshape(1, *shape), 0.1, steps=6)
    except Refused:
        return
    assert found.lower <= found.upper


@pytest.mark.parametrize(
    ("k", "s", "d", "n"), [(3, 2, 1, 9), (3, 1, 1, 9), (5, 2, 1, 11), (3, 2, 2, 13), (4, 6, 4, 40)]
)
def test_max_pooling_constant_is_attained_by_a_spike(k, s, d, n):
    pool = nn.MaxPool1d(k, s, dilation=d)
    bound = lipschitz_bound(pool, torch.zeros(1, 1, n)).upper
    assert float(pool(torch.eye(n).reshape(n, 1, n)).norm(dim=(1, 2)).max()) == pytest.approx(bound)


@pytest.mark.parametrize("name", ["softmax component", "no rms norm", "quick gelu", "normalize", "max min of groups"])
def test_arguments_by_name_are_those_by_place(name):
    op, shape, _, ball = CASES[name]
    program = torch.export.export((op if isinstance(op, nn.Module) else Op(op)).eval(), (torch.zeros(1, *shape),))
    bound = lipschitz_bound(program, ball=ball).upper
    for node in program.graph.nodes:
        names = [a.name for a in getattr(getattr(node.target, "_schema", None), "arguments", ())]
        if names:
            node.kwargs, node.args = {**dict(zip(names, node.args, strict=False)), **node.kwargs}, ()
    assert lipschitz_bound(program, ball=ball).upper == bound


def test_a_factor_along_a_new_dimension_does_not_scale_channels():
    kernel = torch.diag(torch.tensor([1.0, 0.0, 0.0])).reshape(3, 3, 1, 1)
    factor = torch.tensor([0.01, 1.0, 1.0]).reshape(1, 3, 1, 1, 1)
    module = Op(lambda x: F.conv2d(x.view(3, 3, 2, 2), kernel) * factor).eval()
    assert lipschitz_bound(module, torch.zeros(1, 36)).upper >= 1


def _written_out(q, k, v):
    return torch.bmm(F.softmax(torch.bmm(q[0], k[0].mT) / 2, -1), v[0])


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, _written_out])
def test_attention_counts_the_rows_of_its_values(attend):
    """With τ = 1/√d and rows of length √d: 2·√n for the queries, as much for the keys, √n for the values."""

    def heads(x):
        rows = F.rms_norm(x.view(1, 16, 2, 4).transpose(1, 2), (4,), eps=1.0)
        return attend(rows, rows, rows)

    assert lipschitz_bound(Op(heads).eval(), torch.zeros(1, 16, 8)).upper <= 5 * 4 * (1 + 1e-9)


def test_factors_whose_product_vanishes_count():
    module = Op(lambda x: x * 1e-200 * 1e-200 * 1e200 * 1e199).eval()
    assert lipschitz_bound(module, torch.zeros(1, 2, dtype=torch.float64)).upper == pytest.approx(0.1)
    assert lipschitz_bound(Op(lambda x: x * 1e-200 * 1e-200).eval(), torch.zeros(1, 2, dtype=torch.float64)).upper > 0
