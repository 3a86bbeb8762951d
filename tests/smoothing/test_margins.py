import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from equipoise.core import InputError
from equipoise.smoothing import average_certified_radius, certified_accuracy, margin_radius
from equipoise.smoothing.margins import margins


def test_linear_classifier_where_the_truth_is_known():
    """f(x) = Wx: the distance to class k's boundary is margin_k/‖W_y − W_k‖, which the last-layer radius attains."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    z = torch.randn(100, 8, generator=generator, dtype=torch.float64) @ w.T
    y = z.argmax(dim=1)
    gaps = z.gather(1, y[:, None]) - z
    norms = (w[y][:, None] - w[None]).norm(dim=2)
    truth = torch.where(norms > 0, gaps / norms, torch.inf).min(dim=1).values
    pair = margin_radius(z, y, weight=w)
    assert (pair <= truth).all()
    np.testing.assert_allclose(pair, truth, rtol=1e-12)
    assert (margin_radius(z, y, float(torch.linalg.matrix_norm(w, 2)) * (1 + 1e-12)) <= pair).all()
    rows = margin_radius(z, y, (w.norm(dim=1) * (1 + 1e-12)).tolist())
    assert (rows <= pair).all()
    assert (rows > 0).any()


def test_a_wrong_prediction_or_an_infinite_constant_has_no_radius():
    z, y = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]]), torch.zeros(3, dtype=torch.long)
    assert (margin_radius(z, y, 1.0) > 0).tolist() == [False, True, False]
    assert margin_radius(z, y, 0.0)[1] == math.inf
    for constant in (math.inf, [1.0, math.inf]):
        assert margin_radius(z, y, constant).tolist() == [0.0] * 3


def test_margins_round_down():
    z = torch.tensor([[1.0, 1e-17], [0.1 + 0.2, 0.3]], dtype=torch.float64)
    gap = margins(z, torch.zeros(2, dtype=torch.long))
    assert gap[0, 1] < 1.0
    assert Fraction(gap[1, 1].item()) <= Fraction(z[1, 0].item()) - Fraction(z[1, 1].item())
    radius = float(margin_radius(z[:1], torch.zeros(1, dtype=torch.long))[0])
    assert Fraction(radius) ** 2 * 2 < (1 - Fraction(1e-17)) ** 2


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1.0, 1e170])
def test_rows_so_close_that_squares_vanish(size):
    w = torch.tensor([[size, 0.0], [-size, 0.0]], dtype=torch.float64)
    z, y = w[:, 0][None], torch.tensor([0])  # the logits of x = (1, 0), at distance 1 from the boundary
    assert 1 - 1e-9 <= float(margin_radius(z, y, weight=w)[0]) <= 1


def test_curves():
    radius, right = [0.1, 0.5, 0.5, 0.9], [True, True, False, True]
    assert certified_accuracy(radius, right, [0.0, 0.1, 0.5, 0.51, 1.0]).tolist() == [0.75, 0.75, 0.5, 0.25, 0.0]
    assert average_certified_radius(radius, right) == pytest.approx(1.5 / 4)
    area = np.mean([certified_accuracy(radius, right, e) for e in (np.arange(20_000) + 0.5) / 20_000])
    assert area == pytest.approx(average_certified_radius(radius, right), rel=1e-3)


def test_the_error_of_the_logits_is_covered():
    """Float32 logits of a wide layer against exact rational arithmetic: covered with the bound, not without it."""
    torch.manual_seed(0)
    g, W = 100 * torch.randn(20, 400), torch.randn(3, 400)
    exact = [[sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, w, strict=True)) for w in W] for x in g]
    logits, labels = g @ W.T, (g @ W.T).argmax(1)
    error = 401 * 2.0**-23 * (g.double().abs() @ W.double().abs().T)  # γ₄₀₁·|W||g|, any order of the sum
    for z, row, e in zip(logits, exact, error, strict=True):
        assert all(abs(Fraction(float(v)) - t) <= Fraction(float(d)) for v, t, d in zip(z, row, e, strict=True))
    plain, covered = margins(logits, labels), margins(logits, labels, error)
    true = [[float(r[y] - v) for v in r] for r, y in zip(exact, labels.tolist(), strict=True)]
    true = torch.tensor(true, dtype=torch.float64)
    rivals = torch.isfinite(plain)
    assert (covered[rivals] <= true[rivals]).all()
    assert (plain[rivals] > true[rivals]).any(), "without the error the margin is not a bound"
    assert (margin_radius(logits, labels, 20.0, error=error) <= margin_radius(logits, labels, 20.0)).all()
    assert (margin_radius(logits, labels, weight=W, error=error) < margin_radius(logits, labels, weight=W)).all()
    with pytest.raises(InputError, match="non-negative"):
        margins(logits, labels, -1.0)
