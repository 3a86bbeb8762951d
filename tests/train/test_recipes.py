"""Recipes: what is wrong with one is said in a sentence with the line, and the bundled ones are right."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.core.errors import EquipoiseError, InputError
from equipoise.train import bundled, read_recipe, run_recipe
from equipoise.train.build import build_data
from equipoise.train.config import Choice, Schedule, fill_in, from_table, parse
from equipoise.train.loop import factor
from equipoise.train.losses import LOSSES, OBJECTIVES
from equipoise.train.terms import AUGMENTATIONS, PROJECTIONS, REGULARIZERS, Context

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
    "near inner key": ("  lr: 1e-2", "  momentun: 0.5", r"did you mean 'optimizer.momentum'\?"),
    "wrong type": ("epochs: 2", "epochs: many", r"'epochs' must be a valid integer.*got 'many'"),
    "negative": ("  lr: 1e-2", "  lr: -1", r"'optimizer\.lr' must be greater than 0, got -1"),
    "beyond floats": ("  lr: 1e-2", f"  lr: 1{'0' * 400}", r"'optimizer\.lr' must be a valid number"),
    "not a number": ("  lr: 1e-2", "  lr: fast", r"'optimizer\.lr' must be a valid number.*got 'fast'"),
    "huge": ("epochs: 2", "epochs: 1000000000000000000", r"'epochs' must be less than or equal to 1000000, got 10{18}"),
    "nan": ("  lr: 1e-2", "  lr: .nan", r"'optimizer\.lr' must be greater than 0|finite"),
    "zero epochs": ("epochs: 2", "epochs: 0", r"'epochs' must be greater than or equal to 1"),
    "choice": ("  lr: 1e-2", "  kind: sdg", r"'optimizer\.kind' must be 'sgd', 'adam'"),
    "missing": ("epochs: 2", "", r"'epochs' is missing"),
    "missing part": ("data: {path: digits}", "", r"'data' is missing"),
    "twice": ("epochs: 2", "epochs: 2\nepochs: 3", r"'epochs' is given twice"),
    "no factory": ("equipoise.nn.models:mlp", "mlp", r"'model\.factory' must match pattern"),
    "not YAML": ("epochs: 2", "epochs: [2", r"line \d+ is not YAML"),
    "list": (GOOD, "- 1\n- 2\n", r"must hold `key: value` pairs, got list"),
    "empty": (GOOD, "", r"must hold `key: value` pairs, got NoneType"),
    "nested": ("  lr: 1e-2", "  nesterov: true\n  momentum: 0", r"nesterov needs a momentum above 0"),
    "schedule": ("epochs: 2", "epochs: 2\nschedule: {kind: piecewise}", r"at least two points"),
    "part is text": ("data: {path: digits}", "data: digits", r"'data' must be a valid dictionary.*got 'digits'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_the_line(tmp_path, case):
    old, new, said = BAD[case]
    assert old in GOOD
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError, match=said) as caught:
        read_recipe(path)
    assert "\n" not in str(caught.value)


def test_a_good_recipe(tmp_path):
    path = tmp_path / "my recipe.yaml"
    path.write_text(GOOD)
    recipe = read_recipe(path)
    assert (recipe.name, recipe.optimizer.lr, recipe.epochs) == ("my-recipe", 0.01, 2)
    assert read_recipe(recipe.to_dict()) == recipe
    assert read_recipe(recipe) == recipe


#: (override, path of attributes, value)
OVERRIDES = [
    ("optimizer.lr=0.5", lambda r: r.optimizer.lr, 0.5),
    ("optimizer.lr=1e-3", lambda r: r.optimizer.lr, 1e-3),
    ("optimizer.nesterov=true", lambda r: r.optimizer.nesterov, True),
    ("model.arguments.widths=[4, 8]", lambda r: r.model.arguments["widths"], [4, 8]),
    ("regularizers=[{kind: spectral, weight: 0.1}]", lambda r: r.regularizers[0].arguments, {"weight": 0.1}),
    ("noise={kind: gaussian, sigma: 0.25}", lambda r: r.noise.arguments, {"sigma": 0.25}),
    ("noise=null", lambda r: r.noise, None),
    ("loss=margin", lambda r: r.loss.kind, "margin"),
    ("data.test=null", lambda r: r.data.test, None),
]


@pytest.mark.parametrize(("change", "read", "value"), OVERRIDES, ids=[c for c, _, _ in OVERRIDES])
def test_overrides_are_typed(tmp_path, change, read, value):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    assert read(read_recipe(path, [change])) == value


def test_overrides_of_a_shorthand(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "regularizers:\n  - spectral\n  - {kind: frobenius, weight: 1.0}\nloss: ce\n")
    recipe = read_recipe(path, ["loss.label_smoothing=0.1"])
    assert [r.arguments for r in recipe.regularizers] == [{}, {"weight": 1.0}]
    assert recipe.loss.arguments == {"label_smoothing": 0.1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.lr", "takes key=value"),
        ("=3", "takes key=value"),
        ("optimizer.lt=3", "did you mean 'optimizer.lr'"),
        ("epochs=[1", "is not YAML"),
        ("regularizers.0.weight=1", "inside a list"),
    ],
)
def test_bad_overrides(tmp_path, change, said):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "regularizers: [spectral]\n")
    with pytest.raises(InputError, match=said):
        read_recipe(path, [change])


def test_files_that_are_not_there():
    with pytest.raises(InputError, match=r"cannot read nowhere\.yaml: No such file"):
        read_recipe("nowhere.yaml")
    with pytest.raises(InputError, match=r"no bundled recipe 'sll-sr-digit'; did you mean 'sll-sr-digits'\?"):
        read_recipe("sll-sr-digit")


def test_yaml_tags_are_not_executed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: !!python/object/apply:os.system ['touch ran']\n")
    with pytest.raises(InputError, match="is not YAML"):
        read_recipe(path)


@given(st.text(max_size=40))
def test_any_text_gives_a_recipe_or_a_sentence(text):
    with contextlib.suppress(InputError):
        parse(text, "it")


#: kinds and arguments that do not exist, per table
TABLES = {
    "loss": LOSSES,
    "regularizer": REGULARIZERS,
    "projection": PROJECTIONS,
    "augment": AUGMENTATIONS,
    "noise": OBJECTIVES,
}


@pytest.mark.parametrize("table", TABLES)
def test_unknown_kinds_and_arguments_get_suggestions(table, small):
    rows = TABLES[table]
    first = next(iter(rows))
    context = Context(nn.Linear(2, 2), LOSSES["ce"](), torch.zeros(1, 2))
    firsts = {"regularizer": [context], "projection": [context], "noise": [context.task]}.get(table, [])
    with pytest.raises(InputError, match=f"no kind.*{first}"):
        from_table(rows, Choice(kind=first + "x"), table, *firsts)
    for kind in rows:
        with pytest.raises(InputError, match="nonsense"):
            from_table(
                rows, Choice(kind=kind, nonsense=1, **({"radius": 1.0} if kind == "guard" else {})), table, *firsts
            )


def test_missing_and_wrong_arguments(small):
    with pytest.raises(InputError, match="noise \\(gaussian\\): 'sigma' is missing"):
        run_recipe(small(noise="gaussian"))
    with pytest.raises(InputError, match=r"unexpected keyword argument 'width'"):
        run_recipe(small("model.arguments.width=3"))
    with pytest.raises(InputError, match=r"does not take the data's inputs of shape \(1, 8, 8\)"):
        run_recipe(small("model.arguments.in_features=3"))
    with pytest.raises(InputError, match="has 3 outputs, but the data 10 classes"):
        run_recipe(small("model.arguments.num_classes=3"))
    with pytest.raises(InputError, match="no layer type 'Conv2'"):
        run_recipe(small(regularizers=[{"kind": "spectral", "only": "Conv2"}]))
    with pytest.raises(InputError, match="leaves one part empty"):
        run_recipe(small("data.validation=0.001"))


def test_variables_in_paths(monkeypatch, tmp_path):
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    with pytest.raises(InputError, match="EQUIPOISE_DATA is not set"):
        fill_in("${EQUIPOISE_DATA}/cifar10.npz")
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    assert fill_in("${EQUIPOISE_DATA}/cifar10.npz") == f"{tmp_path}/cifar10.npz"
    with pytest.raises(InputError):
        build_data(read_recipe("noise-cnn-cifar").data)


@pytest.mark.parametrize("name", bundled())
def test_bundled_recipes_are_whole(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert read_recipe(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y_train": np.zeros(8, int), "y_test": np.zeros(8, int)}, "one class only"),
        ({"x_test": np.zeros((8, 1, 9, 9), np.float32)}, "one network cannot take both"),
    ],
)
def test_data_that_no_classifier_can_learn_is_refused_before_it_is_trained(small, tmp_path, changes, said):
    x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8) % 2
    np.savez(tmp_path / "a.npz", **{"x_train": x, "y_train": y, "x_test": x, "y_test": y, **changes})
    with pytest.raises(InputError, match=said):
        build_data(small(data={"path": str(tmp_path / "a.npz")}).data)


def test_which_examples_are_held_out_does_not_depend_on_the_seed(small):
    a = build_data(small("data.validation=0.25", seed=0).data)
    b = build_data(small("data.validation=0.25", seed=1).data)
    assert a.train.indices.equal(b.train.indices)
    assert set(a.train.indices.tolist()).isdisjoint(a.validation.indices.tolist())
    assert len(a.train) + len(a.validation) == 160


SCHEDULES = [
    Schedule(kind="constant", warmup=0.1),
    Schedule(kind="cosine", warmup=0.1, final=0.01),
    Schedule(kind="linear", final=0.1),
    Schedule(kind="one-cycle"),
    Schedule(kind="piecewise", points=[(0, 0.1), (0.5, 1), (1, 0)]),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@given(steps=st.integers(1, 500), data=st.data())
def test_schedules_stay_between_zero_and_one(schedule, steps, data):
    step = data.draw(st.integers(0, steps - 1))
    assert 0 <= factor(schedule, step, steps) <= 1


def test_schedules_have_their_shape():
    values = {s.kind: [factor(s, t, 100) for t in range(100)] for s in SCHEDULES}
    assert values["constant"][:2] == [0.1, 0.2]
    assert values["constant"][10:] == [1.0] * 90
    assert max(values["one-cycle"]) == values["one-cycle"][29] == 1
    assert values["one-cycle"][30:] == sorted(values["one-cycle"][30:], reverse=True)
    assert values["piecewise"][50] == 1


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
def test_a_file_names_no_code(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_WORD", "sys")
    text, said = HOSTILE[case]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(EquipoiseError, match=said):
        read_recipe("recipe.yaml")


def test_code_of_ones_own_is_allowed_or_typed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {factory: 'my_nets:net'}\ndata: {path: digits}\nepochs: 1\n")
    assert read_recipe(path, allow_code=True).model.factory == "my_nets:net"
    path.write_text("model: {factory: 'equipoise.nn.models:mlp'}\ndata: {path: digits}\nepochs: 1\n")
    assert read_recipe(path, ["model.factory=my_nets:net"]).model.factory == "my_nets:net"


def test_a_recipe_extends_a_bundled_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: sll-sr-small-cifar10\nepochs: 3\noptimizer: {lr: 0.5}\nmodel: {arguments: {hidden: 8}}\n")
    base, mine = read_recipe("sll-sr-small-cifar10"), read_recipe(path)
    assert (mine.name, mine.epochs, mine.optimizer.lr) == ("mine", 3, 0.5)
    assert mine.optimizer.betas == base.optimizer.betas
    assert mine.model.arguments == {**base.model.arguments, "hidden": 8}
    assert base.published
    assert not mine.published  # figures of another network
    assert not mine.description


def test_a_part_of_another_kind_keeps_nothing_of_the_old_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: bcop-cifar10\nloss: {kind: ce}\nschedule: {kind: cosine}\ndata: {augment: []}\n")
    mine = read_recipe(path)
    assert mine.loss.arguments == {}
    assert (mine.schedule.kind, mine.data.augment) == ("cosine", [])


@pytest.mark.parametrize("named", ["nothing-like-it", "[a]", "../recipe.yaml", "3"])
def test_only_bundled_recipes_are_extended(tmp_path, named):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {named}\nepochs: 3\n")
    with pytest.raises(InputError, match="extends takes the name of a bundled recipe"):
        read_recipe(path)


@pytest.mark.parametrize(("parts", "said"), [
    ({"data": {"path": "digits", "augment": [{"kind": "pad-crop", "padding": 10**6}]}}, "padding from 0 to"),
    ({"noise": {"kind": "soft-vote", "sigma": 0.1, "copies": 10**9}}, r"copies.*less than or equal to 100"),
    ({"noise": {"kind": "gaussian", "sigma": "loud"}}, r"sigma.*valid number"),
    ({"loss": {"kind": "lmt", "temperature": [1]}}, r"temperature.*valid number"),
    ({"metrics": {"epsilons": ["a"]}}, r"metrics\.epsilons\.0.*valid number"),
    ({"model": {"factory": "equipoise.nn.models:mlp", "arguments": {"widths": [10**12]}}}, "memory"),
])  # fmt: skip
def test_wrong_types_and_sizes_beyond_reason_are_one_sentence(small, parts, said):
    with pytest.raises(InputError, match=said):
        run_recipe(small("epochs=1", **parts))


def test_a_recipe_without_a_test_split_trains(small, tmp_path):
    result = run_recipe(small("epochs=1", "data.test=null", "data.limit=64"), tmp_path / "run")
    assert "accuracy" not in result.final
    assert (tmp_path / "run" / "certificate.json").exists()


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
