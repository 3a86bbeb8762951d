"""Losses of optimal transport: against sums written out, and against the Wasserstein distance they bound."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import wasserstein_distance

from equipoise.core import InputError
from equipoise.nn.losses import hinge, hkr, kr, soft_hkr, tau_bce

Z = torch.tensor([[1.0, 0.25, -2.0], [-0.5, 0.75, 0.5], [0.0, 0.0, 0.0]])
Y = torch.tensor([0, 1, 2])


def of_classes(z, y, alpha, margin):
    """hkr, one example after the other."""
    found = []
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        rivals = [v for k, v in enumerate(row) if k != label]
        parts = [max(0, margin / 2 - row[label]), *(max(0, margin / 2 + v) for v in rivals)]
        found.append(alpha * sum(parts) / len(row) - (1 - alpha) * (row[label] - sum(rivals) / len(rivals)))
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("margin", [0.5, 2.0])
def test_hkr_of_classes(alpha, margin):
    expected = of_classes(Z, Y, alpha, margin)
    assert hkr(Z, Y, alpha, margin, "none").tolist() == pytest.approx(expected, abs=1e-6)
    assert float(hkr(Z, Y, alpha, margin)) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert float(hkr(Z, Y, alpha, margin, "sum")) == pytest.approx(sum(expected), abs=1e-6)


def test_two_distributions_are_told_apart_by_at_most_their_distance():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, generator=g), torch.randn(25, generator=g) + 2
    x, y = torch.cat([a, b]), torch.cat([torch.zeros(40), torch.ones(25)]).long()
    distance = wasserstein_distance(a.numpy(), b.numpy())
    for score in (x, x.abs(), x.sin(), -x):  # 1-Lipschitz
        assert float(kr(score, y)) <= distance + 1e-5
        assert float(kr(score[:, None], 2 * y - 1)) == float(kr(score, y))
    assert float(kr(x, y)) == pytest.approx(float(b.mean() - a.mean()), abs=1e-5)
    assert float(kr(x, y, "none").double().mean()) == pytest.approx(float(kr(x, y)), abs=1e-5)
    assert float(hkr(x, y, alpha=0.4)) == pytest.approx(0.4 * float(hinge(x, y)) - 0.6 * float(kr(x, y)), abs=1e-6)
    assert float(kr(x[:5], y[:5])) == 0  # one side only: no difference to speak of


def test_soft_rivals_lie_between_the_mean_and_the_closest():
    rival = float(soft_hkr(Z, Y, 0.0, temperature=1e-3))
    mean = float(soft_hkr(Z, Y, 0.0, temperature=1e6))
    assert mean == pytest.approx(-float(kr(Z, Y)), abs=1e-5)
    assert rival == pytest.approx(-((1 - 0.25) + (0.75 - 0.5) + 0) / 3, abs=1e-5)
    assert mean < float(soft_hkr(Z, Y, 0.0)) < rival
    z = Z.clone().requires_grad_()
    soft_hkr(z, Y, 1.0, margin=10.0).backward()  # all hinges open: weights of rivals are constants, summing to 1
    assert z.grad is not None
    assert z.grad.sum(1).tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_tau_bce_is_cross_entropy_at_a_scale():
    z, y = torch.tensor([0.3, -1.0]), torch.tensor([1, 0])
    plain = torch.nn.functional.binary_cross_entropy_with_logits(5 * z, y.float(), reduction="none") / 5
    torch.testing.assert_close(tau_bce(z, y, 5.0, "none"), plain)
    assert float(tau_bce(torch.tensor([-1e30]), torch.tensor([1]))) == pytest.approx(1e30)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kr(torch.zeros(2), torch.tensor([1, 2])),
        lambda: kr(torch.zeros(3), torch.tensor([1, 0, -1])),
        lambda: kr(torch.zeros(0), torch.zeros(0)),
        lambda: hkr(Z, Y.float()),
        lambda: hkr(Z, Y, alpha=math.nan),
        lambda: hkr(Z, Y, margin=0),
        lambda: hkr(Z, Y, reduction="most"),  # type: ignore[arg-type]
        lambda: soft_hkr(Z, Y, temperature=0),
        lambda: tau_bce(Z, Y),
        lambda: tau_bce(torch.zeros(1), torch.ones(1), tau=-1),
    ],
)
def test_what_makes_no_sense_is_refused(call):
    with pytest.raises(InputError):
        call()
