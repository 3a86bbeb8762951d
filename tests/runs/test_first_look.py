"""What a run says before and after it: accuracy without and under noise, what is likely wrong, why nothing is certified."""

import json
import re
import sys

import numpy as np
import pytest
import runs_nets
import torch
from PIL import Image
from torch import nn

from equipoise.runs import certify, describe, open_run
from equipoise.runs.glance import glance


class Fixed(nn.Module):
    """Answers by the mean of each quarter of the picture; `order` exchanges the answers."""

    def __init__(self, order=(0, 1, 2, 3), scale=1.0):
        super().__init__()
        self.register_buffer("order", torch.tensor(order))
        self.scale = scale
        self.eval()

    def forward(self, x):
        quarters = nn.functional.avg_pool2d(x[:, :1], x.shape[-1] // 2).flatten(1)
        return self.scale * quarters[:, self.order]


def quarters(each=6, noise=0.02):
    """Pictures with one bright quarter, sorted by class."""
    x = torch.zeros(4 * each, 1, 4, 4)
    for i in range(len(x)):
        k = i // each
        x[i, 0, 2 * (k // 2) : 2 * (k // 2) + 2, 2 * (k % 2) : 2 * (k % 2) + 2] = 1
    x += noise * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return x.clamp(0, 1), torch.arange(4).repeat_interleave(each)


class Random(Fixed):
    """Answers that have nothing to do with the input."""

    def forward(self, x):
        return torch.sin(1e4 * x.flatten(1)[:, :4])


class Scaled(Fixed):
    """Answers class 0 unless its pictures are centred, as they were in training."""

    def forward(self, x):
        centred = (x.flatten(1).amin(1, keepdim=True) < -0.2).to(x.dtype)
        return centred * super().forward(x) + (1 - centred) * x.new_tensor([1.0, 0, 0, 0])


def named(x, y, classes):
    data = runs_nets.Known(x, y)
    data.classes = classes
    return data


CASES = {
    "fine": (Fixed(), quarters(), 0.05, ("100.0% are answered right without noise",), ("warning",)),
    "class names": (Fixed(), named(*quarters(), ("a", "b", "c", "d")), 0.05, ("classes: a 6, b 6, c 6, d 6",), ("warning",)),
    "another order": (Fixed((1, 2, 0, 3)), named(*quarters(), ("a", "b", "c", "d")), 0.05,
                      ("another order", "'b' as 'a'", "100.0% would be right instead of 25.0%", "--classes"), ()),
    "untrained": (Random(), quarters(), 0.05, ("about chance (25.0%)", "trained weights"), ("another order",)),
    "scaled pictures": (Scaled(), quarters(), 0.05, ("trained on scaled pictures", "--mean 0.1307 --std 0.3081 100.0%",
                                                     "instead of 25.0%"), ("chance", "another order")),
    "too much noise": (Fixed(), quarters(), 8.0, ("does not withstand noise of sigma 8", "stay the same up to about sigma",
                                                  "add_noise(x, 8)"), ("chance",)),
    "no labels": (Fixed(), quarters()[0], 0.05, ("no labels", "100.0% keep their answer"), ("right",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_first_look_says_what_is_likely_wrong(case):
    model, data, sigma, said, unsaid = CASES[case]
    found = glance(describe(model, data, sigma=sigma, n=100, seed=0))
    text = "\n".join(found.lines())
    for phrase in said:
        assert phrase in text
    for phrase in unsaid:
        assert phrase not in text


def test_the_suggested_level_keeps_the_answers():
    """Tested on noise of another seed: fewer answers change than at the level asked for."""
    x, y = quarters(20)
    found = glance(describe(Fixed(), (x, y), sigma=8.0, n=100, seed=0))
    assert found.sigma is not None
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    kept = [float((Fixed()(x + s * noise).argmax(1) == y).double().mean()) for s in (found.sigma, 8.0)]
    assert kept[0] > 0.7 > kept[1]


def test_looking_leaves_the_draws_alone(tmp_path):
    job = {"sigma": 0.3, "n": 200, "seed": 3}
    first = certify(Fixed(), quarters(2), run_dir=tmp_path / "a", **job)
    glance(describe(Fixed(), quarters(2), **job))
    again = certify(Fixed(), quarters(2), run_dir=tmp_path / "b", **job)
    assert np.array_equal(first.certificates().p_lower, again.certificates().p_lower)


REASONS = {
    "noise": (Fixed(), quarters(3), {"sigma": 30.0, "n": 100}, "votes are divided|little is certified"),
    "one answer": (Fixed((0, 0, 0, 0)), quarters(3), {"sigma": 0.2, "n": 100}, "answers 'class 0'|votes are divided"),
    "draws": (Fixed(), quarters(3), {"sigma": 0.1, "n": 100}, "even if all 100 draws agree, no radius beyond"),
    "votes": (
        Fixed(),
        quarters(3),
        {"sigma": 0.3, "n": 2000},
        "largest certified radius of a right answer|even if all",
    ),
    "failed": (runs_nets.Sometimes(-9e9), quarters(1), {"sigma": 0.3, "n": 100}, "every input failed"),
    "no labels": (Fixed(), quarters(3)[0], {"sigma": 0.1, "n": 100}, "even if all 100 draws"),
}


@pytest.mark.parametrize("case", REASONS)
def test_no_figure_is_zero_without_its_reason(tmp_path, case):
    model, data, settings, reason = REASONS[case]
    run = certify(model.eval(), data, run_dir=tmp_path / "a", seed=1, **settings)
    summary = run.summary()
    assert 0.0 in summary.accuracy.values()
    assert any(re.search(reason, line) for line in summary.reasons), summary.reasons
    assert summary.to_dict()["reasons"] == list(summary.reasons)


# ---- the command -----------------------------------------------------------------------------------------------------


def pictures(folder, names, size=4):
    """A folder per class, with the pictures of `quarters`."""
    x, y = quarters(4, noise=0.0)
    for i, (image, k) in enumerate(zip(x, y, strict=True)):
        path = folder / names[int(k)] / f"{i:02d}.png" if names else folder / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[0] * 255).byte().numpy()).resize((size, size)).save(path)
    return folder


SMALL = ("--sigma", 0.1, "--n", 100, "--run", "a")
MODEL = "test_first_look:Fixed"


def test_folders_in_another_order_are_noticed_and_mended(equipoise, tmp_path):
    pictures(tmp_path / "d", ["red car", "bird", "cat", "dog"])  # sorted: bird, cat, dog, red car
    ran = equipoise(MODEL, "--data", "d", *SMALL)
    assert ran.exit_code == 0, ran.stderr
    assert "another order" in ran.stderr and "'red car' as 'bird'" in ran.stderr  # noqa: PT018
    (tmp_path / "names.txt").write_text("red car\nbird\ncat\ndog\n")
    fixed = equipoise(
        MODEL, "--data", "d", "--classes", "names.txt", "--sigma", 0.1, "--n", 100, "--run", "b", "--json"
    )
    document = json.loads(fixed.stdout)
    assert document["glance"]["clean"] == 1.0
    assert list(document["glance"]["classes"]) == ["red car", "bird", "cat", "dog"]
    assert document["manifest"]["data"]["classes"] == ["red car", "bird", "cat", "dog"]
    assert document["accuracy"][0]["certified_accuracy"] == 1.0


def test_pictures_without_labels_get_answers_and_radii(equipoise, tmp_path):
    pictures(tmp_path / "d", None, size=8)
    ran = equipoise(MODEL, "--data", "d", "--size", 4, *SMALL)
    assert ran.exit_code == 0, ran.stderr
    assert "any answer" in ran.stdout
    assert "100.00 %" in ran.stdout
    document = json.loads(equipoise("a", "--json").stdout)
    assert document["labelled"] is False
    assert document["accuracy"][0]["certified_share"] == 1.0
    assert set(open_run("a").certificates().prediction) == {0, 1, 2, 3}


def test_a_limit_takes_every_class_in_turn(equipoise, tmp_path):
    x, y = quarters(6)
    np.savez("d.npz", x=x.numpy(), y=y.numpy())
    ran = equipoise(MODEL, "--data", "d.npz", "--limit", 6, *SMALL)
    assert "first of every class in turn" in ran.stderr
    assert open_run("a").ids == [0, 1, 6, 7, 12, 18]
    assert equipoise(MODEL, "--data", "d.npz", "--limit", 6, *SMALL).exit_code == 0  # the same run again
    asked = equipoise(MODEL, "--data", "d.npz", "--limit", 6, "--first", *SMALL)
    assert "another run" in asked.stderr
    equipoise(MODEL, "--data", "d.npz", "--limit", 6, "--first", "--sigma", 0.1, "--n", 100, "--run", "b")
    assert open_run("b").ids == list(range(6))


def test_a_factory_in_this_folder_with_random_weights(equipoise, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "my_network.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))\n"
        "def data():\n    import torch\n    return [{'img': torch.rand(1, 4, 4), 'label': i % 4} for i in range(8)]\n"
    )
    ran = equipoise("my_network:make", "--data", "my_network:data", *SMALL)
    assert ran.exit_code == 0, ran.stderr
    assert "gives other weights every time" in ran.stderr


def test_the_scale_that_the_model_was_trained_with(equipoise, tmp_path):
    x, y = quarters(3)
    np.savez("d.npz", x=(x * 10 + 3).numpy(), y=y.numpy())
    ran = equipoise(MODEL, "--data", "d.npz", "--mean", "3", "--std", "10", "--sigma", "1", "--n", "100", "--run", "a")
    assert ran.exit_code == 0, ran.stderr
    assert "inputs (x − (3))/(10)" in open_run("a").manifest.model["source"]


BAD = {
    "layout": (("--layout", "HWC"), "NHWC or NCHW"),
    "size": (("--size", "4;4"), "one or two whole numbers"),
    "columns": (("--columns", "image"), "two names"),
    "mean": (("--mean", "a"), "numbers like"),
    "std": (("--std", "0"), "std > 0"),
    "means": (("--mean", "1,2", "--std", "1,2,3"), "one finite number per channel"),
    "no classes": (("--classes", "nowhere.txt"), "nowhere.txt"),
    "too few classes": (("--classes", "few.txt"), "4 classes without names"),
    "no text": (("--classes", "bytes.txt"), "no text of class names"),
    "no names": (("--classes", "object.json"), "no list of class names"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_sentence(equipoise, tmp_path, case):
    x, y = quarters(2)
    np.savez("d.npz", x=x.numpy(), y=y.numpy())
    (tmp_path / "few.txt").write_text("a\nb\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "object.json").write_text('{"a": "b"}')
    options, message = BAD[case]
    ran = equipoise(MODEL, "--data", "d.npz", *options, *SMALL)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
