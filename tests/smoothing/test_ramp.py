import numpy as np
import pytest
import smoothing_references as slow

from equipoise.smoothing.ramp import quantile, ramp_quantile


def _cases(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = 10 ** rng.uniform(-6, 8, n)
    width[: n // 4] = 10 ** rng.uniform(-2.1, -1.9, n // 4)  # where series and direct formula meet
    p = np.where(rng.random(n) < 0.4, rng.uniform(0, 1, n), 10 ** rng.uniform(-16, -0.31, n))
    p = np.where(rng.random(n) < 0.5, 1 - p, p)
    p[:20] = 10.0 ** rng.uniform(-280, -15, 20)
    p[20:30] = 0.5 + rng.uniform(-1e-12, 1e-12, 10)
    return np.clip(p, 1e-300, 1 - 2**-53), width


def test_inverse_brackets_the_root_in_50_digits():
    p, width = _cases(700)
    low, up = ramp_quantile(p, width)
    for i in range(len(p)):
        assert slow.ramp_mean(low[i], width[i]) <= p[i] <= slow.ramp_mean(up[i], width[i]), (p[i], width[i])
    assert np.all(up - low <= 1e-9 * np.maximum(np.abs(low), 1e-3)), "the bracket must be tight, not only right"


def test_quantile_brackets_the_truth_in_50_digits():
    p, _ = _cases(700, seed=3)
    p = p[(p > 1e-40) & (p < 1 - 1e-14)]
    low, up = quantile(p)
    for i in range(len(p)):
        truth = slow.quantile(p[i]) if p[i] > 1e-12 else -slow.mp.sqrt(2) * slow.mp.erfinv(1 - 2 * slow.mp.mpf(p[i]))
        assert low[i] <= truth <= up[i]


@pytest.mark.parametrize("width", [0.0, 1e-3, 1.0, 1e6])
def test_ends(width: float):
    low, up = ramp_quantile([0.0, 0.5, 1.0], width)
    assert low[0] == up[0] == -np.inf
    assert low[1] <= 0 <= up[1]
    assert low[2] == up[2] == np.inf
    tiny_low, tiny_up = ramp_quantile(5e-324, width)
    assert tiny_low == -np.inf
    assert np.isfinite(tiny_up)
