"""A wrong call and a wrong command get one sentence that says what to do."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import equipoise as eq
from equipoise.attacks import pgd
from equipoise.checkpoints import load_factory, load_model, load_weights
from equipoise.core import InputError, Refused
from equipoise.data import load_dataset
from equipoise.report import collect, render

X, Y = torch.zeros(2, 4), torch.tensor([0, 1])


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 2).eval()


def raising(*_):
    raise KeyError("inside\nand more")


def attack(x=X, y=Y, epsilon=0.1, model=None):
    return pgd(model or net(), x, y, epsilon, 2)


def misfit(folder):
    save_file({"weight": torch.zeros(3, 5), "bias": torch.zeros(2)}, folder / "w.safetensors")
    return load_weights(net(), folder / "w.safetensors")


#: a wrong call (of a scratch folder), the kind of error, a part of its sentence
CALLS = {
    "a pickle": (lambda _: load_model("model.pth"), Refused, "pickles are never opened; export the"),
    "weights of another shape": (misfit, InputError, "size mismatch for weight: copying a param with shape"),
    "factory misspelt": (lambda _: load_factory("equipoise.nn.models:mpl"), InputError, "did you mean 'mlp'?"),
    "factory raises": (lambda _: load_factory(f"{__name__}:raising"), InputError, "failed with KeyError: 'inside"),
    "a network that raises": (lambda _: attack(model=raising), InputError, "failed with KeyError: 'inside"),
    "digit": (lambda _: load_dataset("digit"), InputError, "no 'digit'; did you mean 'digits'?"),
    "label too large": (lambda _: attack(y=Y + 4), InputError, "labels must lie in 0 … 1"),
    "no logits": (lambda _: attack(model=nn.Unflatten(1, (2, 2))), InputError, "expected logits of shape (2, classes)"),
    "keyword misspelt": (lambda f: eq.certify(net(), (X, Y), run_dir=f, sigma=0.1, sed=1), TypeError,
        "certify() got an unexpected keyword argument 'sed'; did you mean 'seed'?"),
    "data by name": (lambda f: eq.certify(net(), "digits", run_dir=f, sigma=1), InputError, "use eq.data.load_dataset("),
    "public name misspelt": (lambda _: eq.lipschitz_bond, AttributeError, "did you mean 'lipschitz_bound'?"),
    "nothing to decay": (lambda _: eq.regularizers.ActivationDecay(nn.ReLU()), InputError, "this ReLU has no nn.Linear"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_gets_its_sentence(tmp_path, case):
    call, kind, words = CALLS[case]
    with pytest.raises(kind) as caught:
        call(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


#: arguments of the command, where {f} is a folder with `model.pt2` and a weight, and a part of the sentence
COMMANDS = [
    ("audit {f}/model.pt2 --input-shape 4", "model.pt2 has its own input shape: leave out --input-sh"),
    ("audit {f}/model.pt2 --chain dense", "closed, multipliers"),
    ("certify {f}/nowhere --data digits --sigma 1", "neither a .pt2 or .onnx file, a directory"),
    ("curvature {f}/model.pt2 --data digits", "give a checkpoint directory, or package.module:f"),
    ("reproduce dense-convergence --scale huge -o {f}/results", "--scale is 'laptop', 'desk', 'paper'; got 'huge'"),
    ("reproduce bound-factor -o {f}/r --device quantum", "the device 'quantum' cannot be used here"),
    ("demo --quick --out {f}/model.pt2/x", "cannot make"),
    ("derive {f}/nowhere", "not a run directory"),
    ("attack {f}/model.pt2", "not a run directory"),
    ("certify {f}/model.pt2 --data digits --sigma 1 --shard 3/2", "such as 2/8"),
    ("certify {f}/model.pt2 --data digits --sigma 1 --set sed=1", "did you mean 'seed'"),
    ("certify {f}/model.pt2 --data digits --sigma 1 --set n0=x", "'n0' must"),
    ("certify {f}/model.pt2 --data digits --sigma 1 --n 10000000000000000000", "'n' must"),
    ("prove {f}/model.pt2 --data digits --norm l7", "norm"),
    ("report", "name at least one run"),
    ("report {f}/nowhere", "is not a run"),
    ("report --audit nonsense", "neither a .pt2"),
    ("report --audit equipoise.nn.models:mlp", "--input-shape"),
    ("report --audit equipoise.nn.models:mlp --input-shape 7", "does not"),
    ("report --audit {f}/model.pt2 -o {f}/report.pdf", "ends in .html"),
    ("report --audit {f}/model.pt2 -o {f}/no/such/folder/a.html", "cannot write"),
    ("norm {f}/w.safetensors --input-size 8,x", "input-size"),
    ("norm {f}/w.safetensors --input-size 0", "input-size"),
    ("norm {f}/w.safetensors --rtol 0", "rtol"),
    ("norm {f}/w.safetensors --rtol nan", "rtol"),
    ("selfcheck --device tpu", "cpu or cuda"),
    ("selfcheck --device cuda:99", "sees here"),
    ("selfcheck --minutes 0", "positive"),
    ("selfcheck --minutes nan", "positive"),
]


@pytest.mark.parametrize(("arguments", "words"), COMMANDS)
def test_a_wrong_command_gets_its_sentence_and_nothing_else(equipoise, tmp_path, arguments, words):
    torch.export.save(torch.export.export(net(), (torch.zeros(1, 4),)), tmp_path / "model.pt2")
    save_file({"w": torch.eye(3)}, tmp_path / "w.safetensors")
    before = sorted(tmp_path.rglob("*"))
    ran = equipoise(*(word.format(f=tmp_path) for word in arguments.split()))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("equipoise: ")
    assert words in ran.err.replace("\n", " ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("scale", "shown"), [(0.1, False), (10.0, True)])
def test_shares_are_shown_only_of_a_bound_above_one(scale, shown):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(scale * torch.eye(4))
        model[2].weight.copy_(0.9 * torch.eye(2, 4))
    report = eq.lipschitz_bound(model, torch.zeros(1, 4))
    assert bool(report.fix_first()) == shown
    page = render(collect([], audits={"net": report}), "plotly")
    assert ('id="shares-0"' in page) == ("fix first" in page) == shown
    table = page[page.index('id="layers-0"') : page.index('id="limits"')]
    for text in (str(report), table):
        assert ("%" in text) == shown
        assert ("–" in text) != shown
