"""Estimates before a run: exact in what can be counted, positive in what is measured."""

import pytest
import runs_nets

from equipoise.core import InputError
from equipoise.runs import describe
from equipoise.runs.plan import estimate
from equipoise.runs.progress import clock


def test_counts_are_exact_and_times_scale(net, xy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = estimate(describe(net, xy, sigma=0.3, n=10_050, n0=100), workers=(1, 4))
    assert found.inputs == 12
    assert found.draws_per_input == 10_150
    assert found.forward_passes == 12 * (1 + 101)
    assert found.seconds[1] == pytest.approx(4 * found.seconds[4])
    assert found.seconds[1] == pytest.approx(found.forward_passes * found.seconds_per_batch)
    assert found.model_bytes == (16 * 4 + 4) * 4
    assert found.buffer_bytes == 100 * 16 * 4
    assert list(tmp_path.iterdir()) == []


def test_the_forward_passes_are_those_of_the_run(net, xy, tmp_path):
    from equipoise.runs import start

    class Counted(runs_nets.Net):
        def forward(self, x):
            self._calls = getattr(self, "_calls", 0) + 1
            return super().forward(x)

    model = Counted().eval()
    job = describe(model, xy, sigma=0.3, n=350)
    planned, before = estimate(job).forward_passes, model._calls
    start(job, tmp_path / "a")
    assert model._calls - before == planned + 1  # one more beside the first: does a row depend on the others?


def test_adaptive_sampling_is_cheaper_for_sure_inputs_and_never_dearer(net, xy):
    sure = estimate(describe(runs_nets.net(), (xy[0] * 50, xy[1]), sigma=0.3, n=10_000, procedure="cohen"))
    assert sure.adaptive_draws <= 1000
    found = estimate(describe(net, xy, sigma=0.3, n=2000, target_radius=0.3, procedure="cohen"))
    assert 100 <= found.adaptive_draws <= 2000
    assert found.target_radius == 0.3
    assert found.adaptive_seconds[1] <= found.seconds[1] * (1 + 1e-9)


@pytest.mark.parametrize("settings", [{"batches": 0}, {"pilot": 0}, {"workers": ()}, {"workers": (0,)}])
def test_bad_requests(net, xy, settings):
    with pytest.raises(InputError):
        estimate(describe(net, xy, sigma=0.3, n=200), **settings)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (12, "12 s"),
        (119.4, "119 s"),
        (150, "2 min"),
        (3599, "1 h 00 min"),
        (86_400 * 3, "3 d 00 h"),
        (7260, "2 h 01 min"),
    ],
)
def test_clock(seconds, text):
    assert clock(seconds) == text
