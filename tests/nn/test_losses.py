"""Losses against their formulas written out, and certified radii against attacks on a network of known constant."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from torch.nn import functional

from equipoise.core import InputError
from equipoise.nn import CertifiedAccuracy, losses
from equipoise.smoothing import margin_radius

MARGIN = {"lmt": losses.lipschitz_margin, "gloro": losses.gloro, "emma": losses.emma, "la": losses.logit_annealing}
PLAIN = (losses.offset_cross_entropy, losses.margin_hinge, losses.hkr)
LOSSES = {loss.__name__: loss for loss in PLAIN} | MARGIN

Z = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.3, 4.0], [1.0, 1.0, -2.0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 0])


def cross_entropy(z, y):
    return float(torch.stack([torch.logsumexp(row, 0) - row[k] for row, k in zip(z, y, strict=True)]).mean())


def test_offset_cross_entropy_is_the_formula():
    t, u = 0.25, 1.5 * math.sqrt(2) * 3.0
    shifted = Z.clone()
    shifted[range(3), Y] -= u
    assert float(losses.offset_cross_entropy(Z, Y, lipschitz=3.0)) == pytest.approx(t * cross_entropy(shifted / t, Y))


def test_margin_hinge_is_zero_exactly_where_all_are_certified():
    z = torch.tensor([[3.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0])
    edge = float(margin_radius(z, y, 1.5)[0])
    assert float(losses.margin_hinge(z, y, edge * 0.999, 1.5)) == 0
    assert float(losses.margin_hinge(z, y, edge * 1.001, 1.5)) > 0
    assert losses.margin(Z, Y).tolist() == pytest.approx([1.5, -3.7, 0.0])


def test_lipschitz_margin_lifts_the_other_logits():
    lifted = Z + 0.3 * math.sqrt(2) * 2
    lifted[range(3), Y] = Z[range(3), Y]
    assert float(losses.lipschitz_margin(Z, Y, 0.3, 2.0)) == pytest.approx(cross_entropy(lifted, Y))


def test_gloro_bottom_wins_exactly_where_the_radius_is_not_certified():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    for weight in (None, torch.randn(5, 7, generator=generator, dtype=torch.float64)):
        bottom = losses.gloro_logits(z, 0.2, 0.7, weight).argmax(1) == 5
        certified = margin_radius(z, z.argmax(1), 0.7, weight=weight) >= 0.2
        assert bool((bottom ^ certified).all())
        assert 0 < int(bottom.sum()) < 200
    plain = functional.cross_entropy(z, z.argmax(1))
    assert losses.gloro(z, z.argmax(1), 0.2) > plain


def test_emma_lifts_to_the_margin_reached_at_most_to_epsilon():
    K = 2 * math.sqrt(2)
    expected = Z.clone()
    for i, y in enumerate(Y):
        for k in range(3):
            if k != y:
                expected[i, k] += K * min(max(float(Z[i, y] - Z[i, k]) / K, 0), 0.3)
    assert float(losses.emma(Z, Y, 0.3, 2.0)) == pytest.approx(cross_entropy(expected, Y))
    z = Z.clone().requires_grad_()
    losses.emma(z, Y, 0.3, 2.0).backward()  # the lift carries no gradient: that of a cross-entropy at the lifted logits
    softmax = expected.softmax(1)
    softmax[range(3), Y] -= 1
    assert torch.allclose(z.grad, softmax / 3)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_a_gradient_also_for_the_constant(name):
    arguments = (0.5,) if name in MARGIN else ()
    largest = torch.tensor([[3e38, -3e38, 1.0], [3e38, 2.9e38, 0.0]])  # near the end of float32
    for start, labels in ((Z, Y), (largest, Y[::2])):
        z = start.clone().requires_grad_()
        loss = LOSSES[name](z, labels, *arguments)
        loss.backward()
        assert math.isfinite(loss.item())
        assert bool(torch.isfinite(z.grad).all())
        assert float(z.grad.abs().sum()) > 0 or start is largest
    if name in MARGIN:
        W = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
        L = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        LOSSES[name](Z, Y, 0.5, L, W).backward()
        assert bool(torch.isfinite(W.grad).all())
        assert float(L.grad.abs()) > 0


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), st.floats(1e-3, 1e3))
@settings(max_examples=200, deadline=None)
def test_radii_are_rounded_down(row, lipschitz):
    z = torch.tensor([row], dtype=torch.float64)
    found = float(margin_radius(z, torch.tensor([0]), lipschitz)[0])
    gap = min(Fraction(row[0]) - Fraction(v) for v in row[1:])
    exact = Fraction(found) ** 2 * 2 * Fraction(lipschitz) ** 2
    assert found == 0 if gap <= 0 else exact <= gap**2
    assert gap <= 1e-9 or found >= float(gap) / (math.sqrt(2) * lipschitz) * (1 - 1e-9)


def test_counts_add_up_over_batches():
    z = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (50,), generator=torch.Generator().manual_seed(1))
    whole, parts = CertifiedAccuracy((0.1, 0.5)), CertifiedAccuracy((0.1, 0.5))
    whole.update(z, y)
    for part in (slice(0, 20), slice(20, 50)):
        parts.update(z[part], y[part])
    assert parts.compute() == whole.compute()
    with pytest.raises(InputError, match="no sample"):
        CertifiedAccuracy().compute()


def test_bad_input():
    for z, y in [(Z[0], Y), (Z, Y[:2]), (Z, Y.double()), (Z[:, :1], Y)]:
        with pytest.raises(InputError, match="expected logits"):
            losses.offset_cross_entropy(z, y)
    with pytest.raises(InputError, match="temperature"):
        losses.offset_cross_entropy(Z, Y, temperature=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pair_constants_are_float64_and_never_below_the_truth(dtype):
    """√2·L and ‖w_i − w_j‖ of the stored weights, against exact rational arithmetic."""
    W = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=dtype)
    y = torch.arange(6)
    K = losses.pair_constants(y, 0.7, W)
    assert K.dtype == torch.float64
    exact = [[Fraction(v) for v in row] for row in W.double().tolist()]
    for i, j in itertools.permutations(range(6), 2):
        square = sum((a - b) ** 2 for a, b in zip(exact[i], exact[j], strict=True)) * Fraction(0.7) ** 2
        found = Fraction(K[i, j].item()) ** 2
        assert square <= found <= square * (1 + Fraction(1, 10**9))
    flat = losses.pair_constants(y, 0.7, classes=6)
    assert flat.dtype == torch.float64
    assert Fraction(flat[0, 1].item()) ** 2 >= 2 * Fraction(0.7) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gloro_is_never_sure_of_a_radius_that_is_not_certified(dtype):
    """Margins that are exactly ε·√2·L, or one step of the dtype below: ⊥ wins against all but true margins."""
    generator = torch.Generator().manual_seed(0)
    for epsilon in (0.1, 1.0, 3.0):
        other = 10 * torch.randn(500, generator=generator, dtype=dtype)
        own = (other.double() + math.sqrt(2) * epsilon).to(dtype)
        z = torch.stack([own, other], 1)
        sure = losses.gloro_logits(z, epsilon).argmax(1) == 0
        margins = own.double() - other.double()  # exact: the logits are near each other
        assert bool((margins[sure] >= math.sqrt(2) * epsilon).all())


SCORES = torch.tensor([[1.0, 0.25, -2.0], [-0.5, 0.75, 0.5], [0.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 1, 2])


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
    expected = of_classes(SCORES, LABELS, alpha, margin)
    assert losses.hkr(SCORES, LABELS, alpha, margin, "none").tolist() == pytest.approx(expected, abs=1e-6)
    assert float(losses.hkr(SCORES, LABELS, alpha, margin)) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert float(losses.hkr(SCORES, LABELS, alpha, margin, "sum")) == pytest.approx(sum(expected), abs=1e-6)


def test_two_distributions_are_told_apart_by_at_most_their_distance():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, generator=g), torch.randn(25, generator=g) + 2
    x, y = torch.cat([a, b]), torch.cat([torch.zeros(40), torch.ones(25)]).long()
    distance = wasserstein_distance(a.numpy(), b.numpy())
    for score in (x, x.abs(), x.sin(), -x):  # 1-Lipschitz
        assert float(losses.kr(score, y)) <= distance + 1e-5
        assert float(losses.kr(score[:, None], 2 * y - 1)) == float(losses.kr(score, y))
    assert float(losses.kr(x, y)) == pytest.approx(float(b.mean() - a.mean()), abs=1e-5)
    assert float(losses.kr(x, y, "none").double().mean()) == pytest.approx(float(losses.kr(x, y)), abs=1e-5)
    expected = 0.4 * float(losses.hinge(x, y)) - 0.6 * float(losses.kr(x, y))
    assert float(losses.hkr(x, y, alpha=0.4)) == pytest.approx(expected, abs=1e-6)
    assert float(losses.kr(x[:5], y[:5])) == 0  # one side only: no difference to speak of
