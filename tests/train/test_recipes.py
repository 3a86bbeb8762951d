"""Recipes: what is wrong with one is said in a sentence with the key, and the bundled ones are right."""

import numpy as np
import pytest

from equipoise.core import EquipoiseError, InputError
from equipoise.train import build_data, bundled, read_recipe, run_recipe

GOOD = """
model:
  factory: equipoise.nn.models:mlp
data: {path: digits}
optimizer:
  lr: 1e-2
epochs: 2
"""

#: what is changed in the good recipe, and what must be said
BAD = {
    "unknown key": ("epochs: 2", "epoch: 2", r"unknown key 'epoch'; did you mean 'epochs'\?|'epochs' is missing"),
    "unknown inner key": ("  lr: 1e-2", "  learning_rate: 1", r"unknown key 'optimizer\.learning_rate'"),
    "wrong type": ("epochs: 2", "epochs: many", r"'epochs' must be a valid integer.*got 'many'"),
    "a tag": ("epochs: 2", "epochs: !!python/object/apply:os.system ['touch ran']", r"is not YAML"),
    "an unknown base": ("epochs: 2", "epochs: 2\nextends: ../recipe.yaml", r"the name of a bundled recipe"),
    "missing": ("epochs: 2", "", r"'epochs' is missing"),
    "no factory": ("equipoise.nn.models:mlp", "mlp", r"'model\.factory' must match pattern"),
    "not YAML": ("epochs: 2", "epochs: [2", r"line \d+ is not YAML"),
    "list": (GOOD, "- 1\n- 2\n", r"must hold `key: value` pairs, got list"),
    "nested": ("  lr: 1e-2", "  nesterov: true\n  momentum: 0", r"nesterov needs a momentum above 0"),
    "schedule": ("epochs: 2", "epochs: 2\nschedule: {kind: piecewise}", r"at least two points"),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(text, *overrides)`: the recipe of a file in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text, *overrides, **options):
        (tmp_path / "my recipe.yaml").write_text(text)
        return read_recipe("my recipe.yaml", overrides, **options)

    return write


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_the_key(written, case):
    old, new, said = BAD[case]
    assert old in GOOD
    with pytest.raises(InputError, match=said) as caught:
        written(GOOD.replace(old, new))
    assert "\n" not in str(caught.value)


#: an override, and what it reads as or what is said
OVERRIDES = {
    "optimizer.lr=1e-3": lambda r: r.optimizer.lr == 1e-3,
    "optimizer.nesterov=true": lambda r: r.optimizer.nesterov is True,
    "model.arguments.widths=[4, 8]": lambda r: r.model.arguments["widths"] == [4, 8],
    "regularizers=[spectral, {kind: frobenius, weight: 1}]": lambda r: r.regularizers[1].arguments == {"weight": 1},
    "noise={kind: gaussian, sigma: 0.25}": lambda r: r.noise.arguments == {"sigma": 0.25},
    "noise=null": lambda r: r.noise is None,
    "loss=margin": lambda r: r.loss.kind == "margin",
    "loss.label_smoothing=0.1": lambda r: (r.loss.kind, r.loss.arguments) == ("ce", {"label_smoothing": 0.1}),
    "data.test=null": lambda r: r.data.test is None,
    "model.factory=my_nets:net": lambda r: r.model.factory == "my_nets:net",  # typed, so it may be any code
    "optimizer.lr": "takes key=value",
    "=3": "takes key=value",
    "optimizer.lt=3": "did you mean 'optimizer.lr'",
    "epochs=[1": "is not YAML",
    "projections.0.weight=1": "inside a list",
}


@pytest.mark.parametrize("change", OVERRIDES)
def test_overrides_are_typed(written, change):
    text, wanted = GOOD + "projections: [norm]\nloss: ce\n", OVERRIDES[change]
    if isinstance(wanted, str):
        with pytest.raises(InputError, match=wanted):
            written(text, change)
    else:
        assert wanted(written(text, change))


def test_recipes_are_the_same_as_plain_data(written):
    recipe = written(GOOD)
    assert (recipe.name, recipe.optimizer.lr, recipe.epochs) == ("my-recipe", 0.01, 2)
    for one in (recipe, *map(read_recipe, bundled())):
        assert read_recipe(one.to_dict()) == read_recipe(one) == one
        assert one.name in bundled() or one is recipe
    with pytest.raises(InputError, match=r"no bundled recipe 'sll-sr-digit'; did you mean 'sll-sr-digits'\?"):
        read_recipe("sll-sr-digit")


MLP = "equipoise.nn.models:mlp"
#: what is wrong only when the parts are built
UNBUILT = [
    ({"loss": "cex"}, "no kind 'cex'; did you mean 'ce'"),
    ({"loss": {"kind": "lmt", "temperature": [1]}}, r"temperature.*valid number"),
    ({"loss": {"kind": "ce", "nonsense": 1}}, "nonsense"),
    ({"regularizers": [{"kind": "spectral", "only": "Conv2"}]}, "no layer type 'Conv2'"),
    ({"projections": [{"kind": "clip", "limit": 1, "nonsense": 1}]}, "nonsense"),
    ({"noise": "gaussian"}, r"noise \(gaussian\): 'sigma' is missing"),
    ({"noise": {"kind": "gaussian", "sigma": "loud"}}, r"sigma.*valid number"),
    ({"noise": {"kind": "soft-vote", "sigma": 0.1, "copies": 10**9}}, r"copies.*less than or equal to 100"),
    ({"data": {"path": "digits", "augment": [{"kind": "pad-crop", "padding": 10**6}]}}, "padding from 0 to"),
    ({"data": {"path": "digits", "validation": 1e-5}}, "leaves one part empty"),
    ({"data": {"path": "${NO_SUCH_VARIABLE}/a.npz"}}, "NO_SUCH_VARIABLE is not set"),
    ({"data": {"path": "one.npz"}}, "one class only"),
    ({"data": {"path": "sizes.npz"}}, "one network cannot take both"),
    ({"metrics": {"epsilons": ["a"]}}, r"metrics\.epsilons\.0.*valid number"),
    ({"model": {"factory": MLP, "arguments": {"width": 3}}}, "unexpected keyword argument 'width'"),
    ({"model": {"factory": MLP, "arguments": {"in_features": 3}}}, r"inputs of shape \(1, 8, 8\)"),
    ({"model": {"factory": MLP, "arguments": {"num_classes": 3}}}, "has 3 outputs, but the data 10 classes"),
    ({"model": {"factory": MLP, "arguments": {"widths": [10**12]}}}, "memory"),
]


@pytest.mark.parametrize(("parts", "said"), UNBUILT, ids=str)
def test_what_does_not_fit_together_is_one_sentence(small, tmp_path, monkeypatch, parts, said):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8) % 2
    np.savez("one.npz", x_train=x, y_train=0 * y, x_test=x, y_test=0 * y)
    np.savez("sizes.npz", x_train=x, y_train=y, x_test=np.zeros((8, 1, 9, 9), np.float32), y_test=y)
    with pytest.raises(InputError, match=said):
        run_recipe(small("epochs=1", **parts))


HOSTILE = {
    "a command": ("model: {factory: 'os:system', arguments: {command: ls}}\ndata: {path: digits}\nepochs: 1\n", "os:system"),
    "data that runs": ("model: {factory: 'equipoise.nn.models:mlp'}\ndata: {path: 'sys:exit#train'}\nepochs: 1\n", "sys:exit"),
    "data that runs by a variable": ("extends: sll-sr-digits\ndata: {path: '${A_WORD}:exit#train'}\n", "sys:exit"),
    "code that extends": ("extends: sll-sr-digits\nmodel: {factory: 'os:system'}\n", "code that would be run"),
    "a bomb": ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases"),
    "bottomless": ("[" * 5000 + "]" * 5000, "not YAML"),
    "a strange date": ("name: 2024-99-99\n", "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_names_no_code(written, monkeypatch, case):
    monkeypatch.setenv("A_WORD", "sys")
    text, said = HOSTILE[case]
    with pytest.raises(EquipoiseError, match=said):
        written(text)
    own = GOOD.replace("equipoise.nn.models:mlp", "my_nets:net")
    assert written(own, allow_code=True).model.factory == "my_nets:net"


def test_a_recipe_extends_a_bundled_one(written):
    text = "extends: sll-sr-small-cifar10\nepochs: 3\noptimizer: {lr: 0.5}\nmodel: {arguments: {hidden: 8}}\n"
    base, mine = read_recipe("sll-sr-small-cifar10"), written(text + "schedule: {kind: cosine}\ndata: {augment: []}\n")
    assert (mine.name, mine.epochs, mine.optimizer.lr) == ("my-recipe", 3, 0.5)
    assert mine.optimizer.betas == base.optimizer.betas
    assert mine.model.arguments == {**base.model.arguments, "hidden": 8}
    # a part of another kind keeps nothing of the old one; published figures are those of another network
    assert (mine.schedule.kind, mine.schedule.points, mine.data.augment) == ("cosine", [], [])
    assert base.published
    assert not mine.published
    assert not mine.description


def test_every_epoch_draws_other_extra_examples_in_the_ratio_asked_for(tmp_path, small):
    x = np.full((40, 8, 8), 255, np.uint8)
    np.savez(tmp_path / "white.npz", x_train=x, y_train=np.arange(40) % 10)
    extra = {"extra": str(tmp_path / "white.npz"), "extra_ratio": 0.5}
    parts = build_data(small(data={"path": "digits", "limit": 60, **extra}).data)
    plain = build_data(small(data={"path": "digits", "limit": 60}).data)
    assert len(parts.train) == 90
    assert parts.fingerprint() != plain.fingerprint()
    drawn = []
    for epoch in range(2):
        order = parts.train.order(0, epoch)
        x, y = parts.train.batch(order)
        white = (x == 1).flatten(1).all(1)
        assert (int(white.sum()), len(x), len(y)) == (30, 90, 90)
        assert sorted(order[order < 60].tolist()) == list(range(60))
        drawn.append(order[order >= 60].tolist())
    assert sorted(drawn[0]) != sorted(drawn[1])
    np.savez(tmp_path / "wide.npz", x_train=np.zeros((40, 9, 9), np.uint8), y_train=np.arange(40) % 10)
    with pytest.raises(InputError, match="one network cannot take both"):
        build_data(small(data={"path": "digits", "extra": str(tmp_path / "wide.npz")}).data)
