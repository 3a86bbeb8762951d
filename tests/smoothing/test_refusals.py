"""Numbers and networks that no certificate can be made of: one sentence each."""

import functools
import math

import numpy as np
import pytest
import torch
from smoothing_laws import HalfSpace
from torch import nn

from equipoise import smoothing as sm
from equipoise.core import Bound, InputError, Kind, Refused

MODEL = HalfSpace(1.0, 0.0, 0.0).eval()
X, Z, Y = torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
HALVES = np.full((5, 2), 0.5)


def smooth(model=MODEL, sigma=0.5, classes=2, **options):
    return sm.SmoothedClassifier(model, sigma, classes, **options)


class Answering(nn.Module):
    """A model that answers with a function of the batch."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.training = answer, False

    def forward(self, x):
        return self.answer(x)


NO_LOGITS = (
    lambda x: (x[:, :2],), lambda x: x[:, :2].long(), lambda x: x[:, :2] + 1j, lambda x: x[:, 0], lambda x: x[:-1, :2],
    lambda x: None,
)  # fmt: skip
#: a function, and arguments that it refuses
BAD_ARGUMENTS = [
    (sm.clopper_pearson, (5, 4, 0.05, "lower"), (1.5, 4, 0.05, "lower"), (-1, 4, 0.05), (1, 0, 0.05), (1, 4, 0.0),
     (1, 4, 0.05, "left")),
    (sm.hoeffding, (1.2, 10, 0.05)),
    (sm.empirical_bernstein, (0.5, -1.0, 10, 0.05), (0.5, 0.1, 1, 0.05)),
    (sm.betting, ([0.5, 1.5], 0.05), (np.zeros((3, 0)), 0.05), ([0.5], 1.0)),
    (sm.radius_mono, (1.1, 0.5), (np.nan, 0.5), (0.9, 0.0), (0.99, 1e308)),
    (sm.radius_multi_lipschitz, (0.9, 0.1, 0.5, -1.0), (0.9, 0.1, 0.5, np.array([-1.0]))),
    (sm.certify_counts, ([1, 2], [3, 4], 0.5, 0.01, "voodoo"), ([1, 2], [3, 4], 0.5, 0.01, "lvm"),
     ([1, 2], [3, 4, 5], 0.5), ([1.5, 2], [3, 4], 0.5), ([1, 2], [3, -4], 0.5), ([1], [3], 0.5),
     ([1, 2], [3, 4], 0.5, 1.5), ([1, 2], [3, 4], -0.5), ([1, 2], [np.inf, 4], 0.5), ([1, 2], [10**400, 4], 0.5),
     ([1, 2], [2**53, 1], 0.5)),  # the sum is rounded to 2^53 draws, all for the class
    (sm.certified_substitutions, (Z, Y, torch.zeros(2, 0, dtype=torch.long), torch.ones(3, 2), 1.0)),
    (sm.certify_scores, (np.full((5, 2), 0.6), HALVES, 0.5), (HALVES, HALVES[:1], 0.5)),
    (sm.margin_radius, (Z[0], Y), (Z, Y + 3), (Z * math.nan, Y), (Z, Y, [1.0, 1.0]), (Z, Y, torch.ones(2, 2)),
     (Z, Y, -torch.ones(3, 3))),
    (sm.certified_accuracy, ([0.1], [True, False]), ([], []), ([math.nan], [True]), ([0.1], [True], -1.0)),
    (sm.SimplexMap, ("argmax",), ("softmax", 0.0)),
    (sm.SimplexMap("softmax").component_lipschitz, (1.0, 1)),
    (smooth().predict, (X[0],), (X.long(),)),
    (smooth(classes=3).predict, (X,)),
    *((smooth(Answering(answer)).predict, (X,)) for answer in NO_LOGITS),
]  # fmt: skip
#: the same for arguments by name
BAD_OPTIONS = [
    (functools.partial(sm.AblatedClassifier, MODEL, 1, 2), {"hidden": "[MASK]"}),
    (functools.partial(sm.certify_scores, HALVES, HALVES, 0.5), {"procedure": "cohen"}, {"interval": "guess"}),
    (functools.partial(sm.margin_radius, Z, Y), {"weight": torch.zeros(4, 2)}),
    (functools.partial(sm.SimplexMap, "softmax"), {"mass": -1.0}),
    (functools.partial(sm.certify_adaptive, smooth(), X), {"target_radius": 0.1, "alpha": 0.0}, {"target_radius": 10.0},
     {"target_radius": -1.0}, {"target_radius": "0.1"}),
    (smooth, {"sigma": 0.0}, {"sigma": [0.5, torch.ones(2)]}, {"sigma": [[0.5], [0.25]]}, {"sigma": []},
     {"sigma": [0.5, -0.1]}, {"sigma": [0.5, math.nan]}, {"sigma": "0.5x"}, {"classes": 1}, {"classes": 2.5}),
    (functools.partial(smooth().predict, X), {"ids": [1, 2]}, {"n": 0}, {"n": 1.5}, {"alpha": 2.0},
     {"alpha": math.nan}),
    (functools.partial(smooth().certify, X), {"procedure": "cohen", "lipschitz": 1.0}, {"map": "best"}),
]  # fmt: skip


def test_bad_input_is_refused():
    for call, *rows in BAD_ARGUMENTS:
        for arguments in rows:
            with pytest.raises(InputError):
                call(*arguments)
    for call, *rows in BAD_OPTIONS:
        for options in rows:
            with pytest.raises(InputError):
                call(**options)


ESTIMATE, SOFT = Bound(1.0, Kind.ESTIMATE), sm.SimplexMap("softmax")
#: what cannot be certified, and why
UNSOUND = {
    "an estimate for a margin": (lambda: sm.margin_radius(Z, Y, ESTIMATE), "estimate"),
    "an estimate for a radius": (lambda: sm.radius_multi_lipschitz(0.9, 0.1, 0.5, ESTIMATE), "estimate"),
    "a lower bound": (lambda: sm.radius_multi_lipschitz(0.9, 0.1, 0.5, Bound(1.0, Kind.LOWER)), "lower"),
    "an estimate for scores": (lambda: SOFT.component_lipschitz(ESTIMATE, 10), "estimate"),
    "scores where votes are counted": (
        lambda: sm.certify_adaptive(smooth(map=SOFT), X, target_radius=0.1), "counts votes"),
    "votes of scores": (lambda: smooth(map=SOFT).predict(X), "votes"),
    "noise that depends on the input": (lambda: smooth(sigma=lambda x: 0.5), "depends on the input"),
    "a level per pixel": (lambda: smooth(sigma=torch.full((5,), 0.5)), "one number per channel"),
    "noise that rounding absorbs": (lambda: smooth(sigma=1e-8).predict(X + 0.7), "lost in the rounding"),
    "a tensor of levels": (lambda: smooth(sigma=torch.full((1, 3, 1, 1), 0.5)), "no radius is certified"),
    "training mode": (lambda: smooth(nn.Sequential(nn.Linear(3, 2), nn.Dropout())).predict(X), "training mode"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSOUND)
def test_what_would_not_be_sound_is_refused(case):
    call, words = UNSOUND[case]
    with pytest.raises(Refused, match=words):
        call()
