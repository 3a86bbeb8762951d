import numpy as np
import pytest
import torch
from smoothing_laws import HalfSpace
from torch import nn

from equipoise.core import Refused
from equipoise.smoothing import PROCEDURES, SimplexMap, SmoothedClassifier, Stream, certify_counts, certify_scores
from equipoise.smoothing.classifier import predict_counts
from equipoise.smoothing.simplex import apply_map

NORMAL = (0.6, 0.8, 0.0)


def _points(*distances: float) -> torch.Tensor:
    return torch.tensor(distances)[:, None] * torch.tensor(NORMAL)


@pytest.fixture
def classifier() -> SmoothedClassifier:
    return SmoothedClassifier(HalfSpace(*NORMAL, scale=10.0).eval(), 0.5, 2)


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_half_space(classifier, procedure):
    """Certified radii lie below the distance to the plane, and not far below."""
    result = classifier.certify(_points(0.3, -0.6, 0.0), n=4000, procedure=procedure)
    assert result.prediction[:2].tolist() == [0, 1]
    assert (result.radius <= [0.3, 0.6, 0.0]).all()
    assert (result.radius[:2] > [0.22, 0.48]).all()
    assert "Not covered" in result.about


def test_draws_do_not_depend_on_anything_but_their_key():
    x = torch.rand(4, 3)
    one, other = (SmoothedClassifier(HalfSpace(*NORMAL, scale=10.0).eval(), 0.5, 2, seed=3) for _ in range(2))
    whole = one.certify(x, n=1000, procedure="cpm", ids=["a", "b", "c", "d"])
    for i, name in enumerate("dcba"):
        k = 3 - i
        single = other.certify(x[k : k + 1], n=1000, procedure="cpm", ids=[name])
        assert single.radius[0] == whole.radius[k]
    long = torch.cat(list(one.logits(x[0], 950, input_id="a", stream=Stream.ESTIMATION)))
    short = torch.cat(list(one.logits(x[0], 130, input_id="a", stream=Stream.ESTIMATION)))
    assert torch.equal(long[:130], short)
    assert len(long) == 950
    reseeded = SmoothedClassifier(HalfSpace(*NORMAL, scale=10.0).eval(), 0.5, 2, seed=4)
    again = reseeded.certify(x, n=1000, procedure="cpm")
    assert not np.array_equal(again.p_lower, whole.p_lower)


def test_streams_and_chunks_are_independent(classifier):
    x = torch.full((3,), 0.1)  # off the 8-bit grid: continuous draws
    draws = {}
    for stream in Stream:
        for out in classifier.logits(x, 300, input_id=0, stream=stream):
            draws[len(draws)] = out[:, 0]
    values = torch.stack(list(draws.values()))
    assert len(torch.unique(values)) == values.numel(), "no draw occurs twice"
    correlation = torch.corrcoef(values) - torch.eye(len(values))
    assert correlation.abs().max() < 0.45  # 100 draws each: 4.5 standard errors


def test_memory_and_batches_are_constant_in_n():
    model = HalfSpace(*NORMAL, scale=10.0).eval()
    sizes = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    smooth = SmoothedClassifier(model, 0.5, 2, chunk_size=64)
    smooth.certify(_points(0.3), n0=64, n=6400, procedure="cohen")
    assert max(sizes) == 64
    assert len(sizes) == 103  # two more before the first: does a row depend on the others?


def test_hard_procedures_equal_certify_counts(classifier):
    x = _points(0.3)[0]
    first = classifier.counts(x, 100, input_id=0, stream=Stream.SELECTION)
    second = classifier.counts(x, 2000, input_id=0, stream=Stream.ESTIMATION)
    assert second.sum() == 2000
    for procedure in ("cohen", "bonferroni", "cpm"):
        by_hand = certify_counts(first, second, 0.5, 0.01, procedure)
        whole = classifier.certify(x[None], n=2000, alpha=0.01, procedure=procedure)
        assert whole.radius[0] == float(by_hand.radius)


@pytest.mark.parametrize("interval", ["bernstein", "betting"])
@pytest.mark.parametrize("procedure", ["lvm", "direct"])
def test_soft_procedures_equal_certify_scores(interval, procedure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    chosen = SimplexMap("softmax", 0.3)
    smooth = SmoothedClassifier(model, 0.5, 4, map=chosen)
    x = torch.rand(3)
    scores = [
        apply_map(chosen, torch.cat(list(smooth.logits(x, n, input_id=0, stream=s))).double().numpy())
        for n, s in ((100, Stream.SELECTION), (1500, Stream.ESTIMATION))
    ]
    constant, pair = chosen.component_lipschitz(5.0, 4), chosen.pair_lipschitz(5.0)
    by_hand = certify_scores(*scores, 0.5, 0.01, procedure, lipschitz=constant, pair_lipschitz=pair, interval=interval)
    whole = smooth.certify(x[None], n=1500, alpha=0.01, procedure=procedure, lipschitz=5.0, interval=interval)
    assert whole.radius[0] == pytest.approx(float(by_hand.radius), rel=1e-9)
    assert whole.selected[0] == int(by_hand.selected)


def test_about_says_what_is_certified():
    smooth = SmoothedClassifier(HalfSpace(*NORMAL, scale=2.0).eval(), 0.5, 2)
    x = _points(0.3, 0.5, -0.4)
    grid = [SimplexMap("hardmax"), SimplexMap("softmax", 1.0), SimplexMap("sparsemax", 2.0)]
    for inputs, choice, words in (
        (x, "global", "pooled"),
        (x, "per-input", "nothing is certified about it"),
        (x[:1], "global", "nothing is certified about it"),
        (x, grid[1], "given by the caller"),
    ):
        found = smooth.certify(inputs, n=1000, map=choice, grid=grid)
        assert words in found.about
        assert choice == "per-input" or len(set(found.details["maps"])) == 1
    chosen = smooth.calibrate(x, grid=grid, n=1000)
    assert chosen in grid
    fixed = smooth.certify(x, n=1000)
    assert "fixed beforehand" in fixed.about
    assert set(fixed.details["maps"]) == {str(chosen)}


def test_lipschitz_aware_radii_of_a_linear_network_stay_below_the_exact_distance():
    """Ten classes, W of norm 1: the distance to the boundary is known, and far away the aware radius beats any vote."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 10, bias=False)
    layer.weight.data /= torch.linalg.matrix_norm(layer.weight.data, 2) * (1 + 1e-5)
    x = 6 * torch.randn(6, 32)
    w, z = layer.weight.detach().double(), (x.double() @ layer.weight.detach().double().T)
    top = z.argmax(1)
    gaps = (z.gather(1, top[:, None]) - z) / (w[top][:, None] - w[None]).norm(dim=2).clamp(min=1e-12)
    distance = gaps.scatter(1, top[:, None], torch.inf).min(dim=1).values.numpy()
    smooth = SmoothedClassifier(layer.eval(), 0.25, 10)
    smooth.calibrate(x, n=4000, lipschitz=1.0)
    for procedure in ("lvm", "direct"):
        aware = smooth.certify(x, n=4000, procedure=procedure, lipschitz=1.0)
        votes = smooth.certify(x, n=4000, procedure="cohen")
        assert (aware.radius <= distance).all()
        assert aware.radius.mean() > votes.radius.mean()
        assert (aware.radius > 0.2 * distance)[distance > 0.2].all()


def test_predict(classifier):
    assert classifier.predict(_points(0.5, -0.5, 0.0)).tolist() == [0, 1, -1]
    assert predict_counts([[0, 0], [1000, 0], [10, 10]], 0.001).tolist() == [-1, 0, -1]
    votes = np.random.default_rng(0).multinomial(100, [0.5, 0.5], 20_000)
    assert (predict_counts(votes, 0.05) >= 0).mean() <= 0.05
    assert predict_counts([[60, 40]], 0.06).tolist() == [0]  # its p-value is 0.0569
    assert predict_counts([[60, 40], [100, 0]], 0.06, variation=0.004).tolist() == [-1, 0]
    assert predict_counts([[100, 0]], 0.06, variation=0.06).tolist() == [-1]


class Broken(HalfSpace):
    def forward(self, x):
        out = super().forward(x)
        out[x[:, 2] > 1.0] = torch.nan
        return out


@pytest.mark.parametrize("procedure", ["cohen", "bonferroni", "lvm"])
def test_nan_is_refused(procedure):
    x = _points(1.0)
    with pytest.raises(Refused, match="NaN"):
        SmoothedClassifier(Broken(*NORMAL, scale=10.0).eval(), 0.5, 2).certify(x, n=1000, procedure=procedure)


class _Mixing(nn.Module):
    """A network whose rows see each other, in a way that a table names."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.plane = mix, HalfSpace(*NORMAL)
        self.register_buffer("calls", torch.zeros(1))
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x):
        return self.plane(self.mix(self, x))


def _counted(net, x):
    net.calls += 1
    return x * net.calls


MIXING = {
    "batch norm without statistics": (lambda net, x: net.norm(x), "other rows"),
    "mean over the batch": (lambda net, x: x.mean(0, keepdim=True).expand_as(x), "other rows"),
    "running sum over the batch": (lambda net, x: x.cumsum(0), "other rows"),
    "sum that runs back": (lambda net, x: x.flip(0).cumsum(0).flip(0), "other rows"),
    "a counter in a buffer": (_counted, "buffer 'calls'"),
}


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_see_each_other_are_refused(name):
    """Votes of such a network are not independent: a mean over the batch had all of them for one class, and a radius."""
    mix, words = MIXING[name]
    smooth = SmoothedClassifier(_Mixing(mix).eval(), 0.5, 2)
    with pytest.raises(Refused, match=words):
        smooth.certify(_points(0.01), n=1000)
    with pytest.raises(Refused, match=words):
        smooth.predict(_points(0.01), n=1000)
