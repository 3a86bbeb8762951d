"""Substituted tokens: every certificate is checked by trying all substitutions."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli import app
from equipoise.lipschitz import proved_substitutions
from equipoise.smoothing import AblatedClassifier, ablation_substitutions, certified_substitutions, certify_counts

VOCABULARY, LENGTH = 4, 4


def all_within(tokens, k):
    """Every sequence that differs in at most k places."""
    every = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    return every[(every != tokens).sum(1) <= k]


@pytest.mark.parametrize("seed", range(4))
def test_no_certified_number_of_substitutions_changes_the_decision(seed):
    torch.manual_seed(seed)
    table = torch.randn(VOCABULARY, 2)
    body = nn.Sequential(nn.Flatten(), nn.Linear(2 * LENGTH, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    body[-1].bias.data = torch.tensor([6.0, 0.0, 0.0]) * (1 + seed)
    bound = eq.lipschitz_bound(body, torch.zeros(1, LENGTH, 2)).upper
    tokens = torch.randint(VOCABULARY, (20, LENGTH))
    with torch.no_grad():
        logits = body(table[tokens])
        certified = certified_substitutions(logits, logits.argmax(1), tokens, table, bound)
        for row, label, k in zip(tokens, logits.argmax(1), certified.tolist(), strict=True):
            assert (body(table[all_within(row, k)]).argmax(1) == label).all()
    model = nn.Sequential(nn.Embedding.from_pretrained(table), *body).eval()
    proved, radii = proved_substitutions(model, tokens, effort="fast")
    assert torch.equal(proved, proved_substitutions(model, tokens.byte(), effort="fast")[0])
    for row, label, k in zip(tokens, radii.predictions, proved.tolist(), strict=True):
        assert (model(all_within(row, k)).argmax(1) == label).all()
    assert (proved >= certified).all()
    assert certified.max() >= 1
    assert certified_substitutions(logits, (logits.argmax(1) + 1) % 3, tokens, table, bound).max() == 0


def test_a_swap_moves_by_the_rows_and_not_by_twice_their_radius():
    z, y, tokens = torch.tensor([[10.0, 0.0]]), torch.tensor([0]), torch.zeros(1, 9, dtype=torch.long)
    near = torch.tensor([[2.0, 0.0], [2.0, 1.0]])
    assert certified_substitutions(z, y, tokens, near, 5.0).tolist() == [1]  # 10/√2/5 = 1.414: √2 is not below it
    assert certified_substitutions(z, y, tokens, -near[:1].repeat(2, 1), 5.0).tolist() == [9]  # equal rows
    assert certified_substitutions(z, y, tokens, near, 5.0, error=2.0).tolist() == [0]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_ablated_votes_of_every_substitution_keep_their_class(kept):
    """Exact shares of a classifier of four tokens against all that r substitutions make of them."""
    generator = np.random.default_rng(kept)
    places = list(itertools.combinations(range(LENGTH), kept))
    answers = {}

    def shares(tokens):
        votes = [answers.setdefault((p, *(int(tokens[i]) for i in p)), int(generator.random() < 0.1)) for p in places]
        return np.bincount(votes, minlength=2) / len(votes)

    for tokens in torch.randint(VOCABULARY, (10, LENGTH), generator=torch.Generator().manual_seed(kept)):
        p = shares(tokens)
        votes = certify_counts([1, 0], [1, 0], sigma=1.0, procedure="cohen")
        exact = replace(votes, p_lower=np.array(p.max()), p_upper=np.array(p.min()))
        r = int(ablation_substitutions(exact, LENGTH, kept))
        if r >= 0:
            assert all(shares(other).argmax() == p.argmax() for other in all_within(tokens, r))


def test_procedures_and_what_they_show():
    first, second = [[90, 6, 4], [40, 35, 25]], [[9000, 600, 400], [4000, 3500, 2500]]
    by = {name: certify_counts(first, second, 1.0, procedure=name) for name in ("cohen", "cpm")}
    found = {name: ablation_substitutions(votes, 50, 4).tolist() for name, votes in by.items()}
    assert found["cpm"][0] >= found["cohen"][0] > 0
    assert found["cohen"][1] == -1
    with pytest.raises(eq.InputError, match="kept"):
        ablation_substitutions(by["cohen"], 5, 6)


class Lookup(nn.Module):
    """Any function of the entries that are left: one stored answer for every ablated input."""

    def __init__(self, base, entries, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = base ** torch.arange(entries)
        self.answers = (torch.rand(base**entries, generator=generator) < 0.06).long()

    def forward(self, x):
        return nn.functional.one_hot(self.answers[(x.flatten(1).long() * self.weights).sum(1)], 2).double()


@pytest.mark.parametrize(("kept", "shape"), [(1, (LENGTH,)), (2, (LENGTH,)), (1, (1, 2, 2)), (2, (1, 2, 2))])
def test_an_ablated_classifier_survives_every_substitution_it_certifies(kept, shape):
    """The exact majority over all ablations, at every input within the certified number of substitutions."""
    hidden = VOCABULARY
    model = Lookup(VOCABULARY + 1, LENGTH, kept).eval()
    left = [list(p) for p in itertools.combinations(range(LENGTH), kept)]

    def majority(tokens):
        every = torch.full((len(left), LENGTH), hidden)
        for row, places in zip(every, left, strict=True):
            row[places] = tokens[places]
        return int(model(every).argmax(1).bincount(minlength=2).argmax())

    x = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(kept))
    classifier = AblatedClassifier(model, kept, 2, hidden=hidden, seed=3)
    found = classifier.certify(x.reshape(12, *shape).double() if len(shape) > 1 else x, n=4000)
    for tokens, answer, r in zip(x, found.prediction, found.substitutions.tolist(), strict=True):
        if r >= 0:
            assert all(majority(other) == answer for other in all_within(tokens, r))
    assert found.substitutions.max() >= (1 if kept == 1 else 0)


def test_which_entries_are_left_is_uniform_and_channels_go_together():
    sampler = AblatedClassifier(nn.Flatten().eval(), 2, 4, hidden=-1.0, seed=0, chunk_size=6000).sampler
    image = torch.arange(1.0, 9).reshape(2, 2, 2)
    left = sampler.fill(torch.empty(6000, 2, 2, 2), image, 5) > 0
    assert torch.equal(left[:, 0], left[:, 1])
    assert (left[:, 0].flatten(1).sum(1) == 2).all()
    shares = torch.unique(left[:, 0].flatten(1), dim=0, return_counts=True)[1] / 6000
    assert len(shares) == 6
    assert (shares - 1 / 6).abs().max() < 5 * (1 / 6 / 6000) ** 0.5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: AblatedClassifier(nn.Flatten().eval(), 5, 4).certify(torch.zeros(1, 4)), "kept"),
        (lambda: AblatedClassifier(nn.Flatten().eval(), 1, 4).certify(torch.zeros(4)), "expected sequences"),
        (lambda: AblatedClassifier(nn.Flatten().train(), 1, 4).certify(torch.zeros(1, 4)), "training mode"),
        (lambda: proved_substitutions(nn.Linear(2, 2).eval(), torch.zeros(1, 2).long()), "nn.Embedding"),
        (lambda: proved_substitutions(nn.Sequential(nn.Embedding(2, 2), nn.Flatten()).eval(),
            torch.full((1, 3), 2)), "0 … 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(call, said):
    with pytest.raises(eq.EquipoiseError, match=said):
        call()


def test_the_command_says_how_many_tokens_may_be_exchanged(tmp_path, monkeypatch):
    (tmp_path / "words_of_two.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Embedding(2, 1), torch.nn.Flatten(), torch.nn.Linear(3, 2))\n"
        "    net.load_state_dict({'0.weight': torch.tensor([[0.5], [-0.5]]), '2.bias': torch.tensor([1.0, 0.0]),\n"
        "                         '2.weight': torch.tensor([[1.0] * 3, [0.0] * 3])})\n"
        "    return net.eval()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.save(tmp_path / "ids.npy", np.array([[0, 0, 0], [1, 1, 0]]))
    call = ["prove", "words_of_two:make", "--tokens", str(tmp_path / "ids.npy")]
    ran = CliRunner().invoke(app.build(wanted="prove"), [*call, "--json"])
    assert json.loads(ran.stdout)["substitutions"] == [2, 0]
    assert "any 2 tokens may be exchanged in 1 of 2" in CliRunner().invoke(app.build(wanted="prove"), call).output
