"""One dataclass of settings: what callers may say, what is stored of it, and the two never apart."""

from typing import Required, get_args, get_origin, get_type_hints

import pytest

from equipoise.core import InputError, Refused
from equipoise.runs.parameters import Keywords, Parameters, Settings
from equipoise.smoothing import SimplexMap


def test_keywords_are_the_fields():
    fields, keywords = get_type_hints(Settings), get_type_hints(Keywords, include_extras=True)
    assert {k: get_args(v)[0] if get_origin(v) is Required else v for k, v in keywords.items()} == fields


#: keywords, and what stands in run.json beyond sigma, the classes and the defaults
STORED = [
    ({}, {}),
    ({"procedure": "cohen"}, {"procedure": "cohen"}),
    ({"procedure": "lvm", "map": SimplexMap("softmax", 0.5)}, {"procedure": "lvm", "map": "softmax:0.5"}),
    ({"procedure": "lvm", "calibration": 5}, {"procedure": "lvm", "map": "global", "calibration": 5}),
    ({"target_radius": 0.25}, {"target_radius": 0.25, "hopeless": 0.05}),
    ({"sigma": [0.5, 0.25]}, {"sigma": 0.25, "channels": [0.5, 0.25]}),
    ({"batch_size": 7, "limit": 3, "name": "n", "balanced": True}, {}),
]
DEFAULTS = {
    "sigma": 0.25, "num_classes": 10, "n0": 100, "n": 10_000, "alpha": 0.001, "procedure": "rivals", "seed": 3,
    "chunk_size": 100, "nonfinite": "refuse", "device": "cpu", "noise": "float", "dimension": 4, "seed_source": "user",
}  # fmt: skip


@pytest.mark.parametrize(("keywords", "stored"), STORED)
def test_what_is_stored(keywords, stored):
    found = Settings.of({"sigma": 0.25, "seed": 3, **keywords}).settled(10, 4, "float")
    assert found.to_dict() == DEFAULTS | stored
    assert Parameters.from_dict(found.to_dict()) == found


def test_who_gave_the_seed_is_stored():
    assert Settings(0.25).settled(10, 4, "float").seed_source == "system"
    assert Settings(0.25, seed=0).settled(10, 4, "float").seed_source == "user"


@pytest.mark.parametrize(
    ("keywords", "kind", "words"),
    [
        ({"sigma": 0.25, "worker": 2}, TypeError, "did you mean 'workers'"),
        ({"n": 5}, TypeError, "needs sigma"),
        ({"sigma": 0.25, "batch_size": 0}, InputError, "batch_size"),
        ({"sigma": [], "n": 5}, InputError, "empty"),
        ({"sigma": 0.25, "noise": "grid", "lipschitz": 1.0, "procedure": "lvm"}, Refused, "not Lipschitz"),
    ],
)
def test_what_is_refused(keywords, kind, words):
    with pytest.raises(kind, match=words):
        Settings.of(keywords, ("workers",))


@pytest.mark.parametrize(
    "change", [{"num_classes": None}, {"seed": None}, {"seed": 0.5}, {"sigma": [0.25]}, {"limit": 3}]
)
def test_an_edited_manifest_is_refused(change):
    with pytest.raises(InputError):
        Parameters.from_dict(DEFAULTS | change)
