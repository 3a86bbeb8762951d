"""Optimised slopes, branch and bound, and properties in VNN-LIB: every verdict is attacked or checked against dense samples."""

import copy
import math

import pytest
import torch
from lipschitz_nets import Op, picture
from torch import nn

import equipoise as eq
from equipoise.core import InputError
from equipoise.lipschitz.local import Certifier
from equipoise.lipschitz.local.backward import enclose_ball, lower_bounds
from equipoise.lipschitz.local.slopes import optimise, relaxed_bounds, usual_slopes
from equipoise.lipschitz.vnnlib import read_vnnlib, verify_property


def _two_hinges(m, x):
    """Two hinges read the same node, and rows meet there."""
    z = m.first(x)
    return m.last(torch.relu(z) + 0.5 * torch.relu(-z) + z)


NETWORKS = {
    "relu": lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)),
    "leaky": lambda: nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.3), nn.Linear(12, 9), nn.LeakyReLU(), nn.Linear(9, 3)),
    "mixed": lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)),
    "pooled": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    ),
    "picture": lambda: nn.Sequential(nn.Linear(6, 16), nn.Unflatten(1, (1, 4, 4)), picture(nn.ReLU(), nn.AvgPool2d(2))),
    "two hinges": lambda: Op(_two_hinges, first=nn.Linear(6, 8), last=nn.Linear(8, 3)),
}  # fmt: skip
ORDER = {"l2": 2, "linf": float("inf"), "l1": 1}


def ball(x, radius, norm, count=20_000):
    """Points of a ball, most of them near its surface, and in ℓ1 and ℓ∞ near its corners."""
    d = torch.randn(count, x.numel(), dtype=torch.float64)
    if norm == "linf":
        d = torch.where(torch.rand_like(d) < 0.7, d.sign(), 2 * torch.rand_like(d) - 1)
    elif norm == "l1":
        corner = nn.functional.one_hot(d.abs().argmax(1), x.numel()) * d
        d = torch.where(torch.rand(count, 1) < 0.5, corner, d)
    d = d / d.norm(ORDER[norm], dim=1, keepdim=True) * torch.rand(count, 1, dtype=torch.float64).pow(0.1)
    return x.double().flatten() + radius * d


def verdicts(name, norm, seed, factors=(1.02, 1.3, 1.8)):
    """Verdicts just above and far above the radius that is proved without branching; the number of each."""
    torch.manual_seed(seed)
    model, x = NETWORKS[name]().eval(), torch.randn(1, 6)
    plain = eq.certified_radius(model, x, norm=norm)
    counts = {"proved": 0, "broken": 0, "undecided": 0}
    for epsilon in (float(plain.radius) * factor for factor in factors):
        found = eq.certified_radius(model, x, norm=norm, epsilon=epsilon, complete=True, seconds=2)
        counts[found.verdicts[0]] += 1
        doubled, label = copy.deepcopy(model).double(), int(found.labels)
        with torch.no_grad():
            if found.broken:
                point = found.broken[0]
                assert point.dtype == x.dtype
                assert float((point.double() - x[0].double()).norm(ORDER[norm])) <= epsilon
                assert int(doubled(point[None].double()).argmax()) != label
            elif found.verdicts[0] == "proved":
                values = doubled(ball(x, epsilon, norm))
                assert bool((values.argmax(1) == label).all()), (name, norm, seed)
            assert not (found.broken and float(found.radius) >= epsilon)
    return counts


@pytest.mark.medium
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("norm", ORDER)
def test_verdicts_are_right(name, norm):
    counts = verdicts(name, norm, len(name))
    assert counts["proved"] + counts["broken"] >= (1 if name in ("mixed", "picture", "two hinges") else 2)


@pytest.mark.medium
@pytest.mark.parametrize("norm", ORDER)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_for_any_slopes_and_penalties(name, norm, seed):
    torch.manual_seed(seed)
    model, x, radius = NETWORKS[name]().eval(), torch.randn(1, 6), 0.3 + 0.4 * seed
    network = Certifier.of(model, x, norm=norm).network
    rows = torch.randn(6, 3, dtype=torch.float64)
    values = model.double()(ball(x, radius, norm, 4000)) @ rows.T
    last = len(network.nodes) - 1
    with torch.no_grad():
        enclosed = enclose_ball(network, x, radius, norm)
        plain = lower_bounds(enclosed, last, rows)
        best, _ = optimise(enclosed, last, rows, steps=25)
        wild = usual_slopes(enclosed, last, len(rows))
        for tensor in (*wild.lower.values(), *wild.upper.values(), *wild.log_penalty.values()):
            tensor.add_(torch.randn_like(tensor))
        arbitrary = relaxed_bounds(enclosed, last, rows, wild)
    least = values.amin(0)
    assert bool((best >= plain - 1e-9).all())
    assert bool((best <= least).all())
    assert bool((arbitrary <= least).all())


@pytest.mark.medium
def test_a_single_radius_is_proved_or_not():
    """`epsilon=` agrees with the largest radius, and no attack breaks what it proves."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    x = torch.randn(12, 20)
    largest = eq.certified_radius(model, x)
    epsilon = float(largest.radius.median())
    asked = eq.certified_radius(model, x, epsilon=epsilon)
    proved = asked.radius >= epsilon
    assert bool(proved[largest.radius >= 1.05 * epsilon].all())
    inside = eq.attacks.pgd(model, x, asked.labels, epsilon=0.999 * asked.radius, steps=40, restarts=2)
    assert not bool((inside.success & (asked.radius > 0)).any())
    assert math.isfinite(float(asked.radius.max()))


HEAD = "".join(f"(declare-const {v} Real)\n" for v in ("X_0", "X_1", "Y_0", "Y_1"))
BOX = "; a box\n(assert (and (>= X_0 -1) (<= X_0 0.5)))\n(assert (<= X_1 1e-1))(assert (>= X_1 -.75))\n"


def test_properties_of_boxes_and_balls(tmp_path):
    """Thresholds just beyond and just within the least difference of outputs, by a dense grid."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    line = lambda low, high: torch.linspace(low, high, 400, dtype=torch.float64)  # noqa: E731 - one side of the grid
    grid = torch.cartesian_prod(line(-1, 0.5), line(-0.75, 0.1))
    near = grid[(grid - torch.tensor([-0.25, -0.325])).norm(dim=1) <= 0.4]
    file, example = tmp_path / "p.vnnlib", torch.zeros(1, 2, dtype=torch.float64)
    for points, radius in ((grid, None), (near, 0.4)):
        with torch.no_grad():
            first, second = model(points).T
        least = float(torch.minimum(first, second).min())
        for share, verdict in ((0.02, "violated"), (-0.02, "holds")):
            limit = least + share * float(first.max() - first.min())
            file.write_text(HEAD + BOX + f"(assert (or (<= Y_0 {limit!r}) (and (<= Y_1 {limit!r}))))")
            answer = verify_property(model, example, read_vnnlib(file), ball=radius, seconds=20)
            assert answer.verdict == verdict
            if verdict == "violated":
                with torch.no_grad():
                    assert float(model(answer.input[None]).min()) <= limit
                assert bool((answer.input >= torch.tensor([-1.0, -0.75])).all())
    # a case with two rows: the second output is nowhere the smaller one by this much, whatever the first is
    gap = float((second - first).min()) - 1.0
    file.write_text(HEAD + BOX + f"(assert (<= Y_0 1e6))(assert (<= Y_1 {least - 1!r}))(assert (>= Y_0 Y_1))")
    assert gap < 0
    assert verify_property(model, example, read_vnnlib(file), seconds=20).verdict == "holds"


#: files that are refused, and a word of the sentence
REFUSED = {
    "no bound": (HEAD + "(assert (<= Y_0 1))", "bounds of all inputs"),
    "no output": (HEAD + BOX, "inequality of outputs"),
    "empty box": (HEAD + BOX + "(assert (>= X_0 2))(assert (<= Y_0 1))", "bounds of all inputs"),
    "product": (HEAD + BOX + "(assert (<= (* Y_0 Y_1) 1))", "expected <="),
    "inputs and outputs": (HEAD + BOX + "(assert (<= X_0 Y_1))", "declared variable"),
    "undeclared": (HEAD + BOX + "(assert (<= Y_9 1))", "declared variable"),
    "not a number": (HEAD + BOX + "(assert (<= Y_0 nan))", "number"),
    "open parenthesis": (HEAD + "(assert (<= Y_0 1)", "not closed"),
    "deep": ("(" * 100_000, "nested"),
    "many cases": (HEAD + BOX + "(assert (or (<= Y_0 1) (<= Y_1 1)))" * 20, "alternatives"),
    "long cases": (HEAD + BOX * 999 + "(assert (or (<= Y_0 1) (<= Y_1 1)))" * 13, "inequalities"),
    "no case": (HEAD + BOX + "(assert (or))", "no alternatives"),
    "another command": ("(check-sat)", "declare-const"),
    "gap": ("(declare-const X_1 Real)", "declared once"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_are_refused_in_a_sentence(name, tmp_path):
    text, word = REFUSED[name]
    file = tmp_path / "p.vnnlib"
    file.write_text(text)
    with pytest.raises(InputError, match=word):
        read_vnnlib(file)
