import torch

from equipoise.smoothing import SmoothedClassifier
from equipoise_lab.bench import smoothing as bench


def test_rows_have_the_common_form():
    for row in (bench.quantile_row(repeats=1, values=20_000), bench.adaptive_row(inputs=6, n_max=1000)):
        assert set(row) == {"name", "ours", "baseline", "ratio", "goal"}
        assert row["ratio"] > 0


def test_the_plain_loop_agrees_with_ours():
    """The baseline of the benchmark is a certificate too: same class, radius within the statistical spread."""
    torch.manual_seed(0)
    model, x = bench.small_cnn(), torch.rand(1, 28, 28)
    plain = bench.plain_certify(model, x, 0.25, 10, 100, 2000, 1e-3, 100)
    ours = SmoothedClassifier(model, 0.25, 10).certify(x[None], n=2000, procedure="cohen")
    assert plain[0] == ours.prediction[0]
    assert abs(plain[1] - ours.radius[0]) < 0.1


def test_interleaved_measures_both():
    ours, baseline, ratio = bench.interleaved(lambda: sum(range(20_000)), lambda: sum(range(2000)), 3)
    assert ours > baseline
    assert ratio > 1
