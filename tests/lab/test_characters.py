"""The character recipe on a short text: the same trainer, the same promises, and a constant that is proved."""

import math

import pytest
import torch
from torch import nn

from equipoise.core import InputError
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import L2Attention
from equipoise.norms import spectral_norm
from equipoise.optim import SpectralGuard
from equipoise.train import run_recipe
from equipoise_lab.models import lipschitz_gpt
from equipoise_lab.text import load_characters

ARGUMENTS = {"width": 8, "depth": 1, "heads": 2, "constant": 2.0}
TINY = ["data.limit=8", "data.test_limit=4", "batch_size=4", "optimizer.lr=0.3", "epochs=2"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text("to be or not to be, that is the question; " * 6, encoding="utf-8")
    return path


@pytest.fixture
def small(text, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(text.parent))
    path = f"data.path=6:{text}"
    return [path, *TINY, *(f"model.arguments.{key}={value}" for key, value in ARGUMENTS.items())]


def test_stretches_and_what_follows(text):
    whole = text.read_text()
    train, test = (load_characters(f"5:{text}", split) for split in ("train", "test"))
    cut = len(whole) * 9 // 10
    assert train.alphabet == test.alphabet == "".join(sorted(set(whole)))
    assert len(train) == cut - 5
    x, y = train.batch([0, len(train) - 1])
    for row, start in enumerate((0, cut - 6)):
        assert "".join(train.alphabet[i] for i in x[row]) == whole[start : start + 5]
        assert "".join(train.alphabet[i] for i in y[row]) == whole[start + 1 : start + 6]
    assert test.batch([1])[0].tolist() == [[test.alphabet.index(c) for c in whole[cut + 5 : cut + 10]]]
    assert len({train.fingerprint(), test.fingerprint(), load_characters(f"4:{text}", "train").fingerprint()}) == 3


def test_a_guard_needs_a_radius_or_a_model_that_has_one():
    plain = {"model": {"factory": "equipoise.nn.models:mlp"}, "data": {"path": "digits", "limit": 128}, "epochs": 1}
    with pytest.raises(InputError, match="say the radius"):
        run_recipe({**plain, "projections": ["guard"]})


def test_trained_it_is_held_and_proved(small):
    model = run_recipe("gpt-shakespeare", overrides=small, cpu=True).model
    report = lipschitz_bound(model.body, torch.zeros(1, 6, 8))
    assert 1.8 <= report.upper <= model.constant == 2.0  # held at it, and not above


def test_the_bound_of_the_graph_is_the_product_of_the_blocks():
    torch.manual_seed(0)
    model = lipschitz_gpt(vocabulary=11, context=6, width=8, depth=2, heads=2, constant=20.0).eval()
    guard = SpectralGuard(model, model.radii(), only=nn.Linear)
    report = lipschitz_bound(model.body, torch.zeros(1, 6, 8))
    product = 1.0
    for block in model.body[1:-1]:
        inner = block.module
        own = (
            float(inner.lipschitz_upper((6, 8)))
            if isinstance(inner, L2Attention)
            else float(spectral_norm(inner[1]).upper) * float(spectral_norm(inner[3]).upper)
        )
        product *= block.alpha + (1 - block.alpha) * own
    product *= float(spectral_norm(model.body[-1]).upper)
    assert report.product == pytest.approx(product, rel=1e-2)
    assert report.upper <= 20.0
    assert guard.bounds()
    onehot = lipschitz_bound(model, nn.functional.one_hot(torch.arange(6), 11)[None].float())
    rows = float(spectral_norm(model.embedding.rows().detach()).upper)
    assert onehot.upper <= report.upper * rows * (1 + 1e-3)


def test_tokens_and_their_one_hot_rows_are_the_same():
    model = lipschitz_gpt(vocabulary=5, context=4, width=8, depth=1, heads=2).eval()
    tokens, other = torch.tensor([[0, 4, 2, 2]]), torch.tensor([[0, 4, 2, 3]])
    assert torch.equal(model(tokens)[:, :3], model(other)[:, :3])  # the past only
    assert torch.allclose(model(tokens), model(nn.functional.one_hot(tokens, 5).float()), atol=1e-6)
    assert float(model.embedding(tokens).detach().norm(dim=-1).max()) <= math.sqrt(8) * (1 + 1e-5)
