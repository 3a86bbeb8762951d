"""The text recipe on a handful of sentences: the same trainer, the same promises."""

import pytest
import torch

from equipoise.train import read_recipe, run_recipe
from equipoise_lab.text import IntentSlots, load_snips, spans

TINY = ["data.limit=8", "data.test_limit=4", "epochs=2", "batch_size=4"]


def write(folder, split, rows):
    (folder / split).mkdir(parents=True)
    for name, column in zip(("seq.in", "seq.out", "label"), zip(*rows, strict=True), strict=True):
        (folder / split / name).write_text("\n".join(column) + "\n")


@pytest.fixture
def sentences(tmp_path):
    rows = [
        ("play some jazz", "O O B-genre", "PlayMusic"),
        ("book a table in new york", "O O O O B-city I-city", "Book"),
    ]
    for split in ("train", "valid", "test"):
        write(tmp_path / "snips", split, rows * 4)
    return tmp_path / "snips"


TAGS = ["O", "B-city", "I-city", "B-genre", "I-genre"]


@pytest.mark.parametrize(("tags", "found"), [
    ([0, 0], set()), ([1, 2, 2], {(0, 3, "city")}), ([1, 1], {(0, 1, "city"), (1, 2, "city")}),
    ([2, 4], {(0, 1, "city"), (1, 2, "genre")}), ([1, 4], {(0, 1, "city"), (1, 2, "genre")}),
])  # fmt: skip
def test_spans_are_read_as_conlleval_reads_them(tags, found):
    assert spans(tags, TAGS) == found


def test_counts_and_f1():
    y = torch.tensor([[1, -100, 1, 2, 0], [0, -100, 3, -100, 0]])
    slots = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 0], [4, 1, 2, 0]]), 5).float()
    intent = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    task = IntentSlots(tags=tuple(TAGS))
    counts = {name: tuple(int(v) for v in pair) for name, pair in task.counts((intent, slots), y).items()}
    assert counts == {"accuracy": (1, 2), "slot_accuracy": (4, 5), "sentence_accuracy": (1, 2), "slot_f1": (2, 4)}
    assert "slot_f1" not in task.counts((intent, slots), y, quick=True)


@pytest.mark.text
def test_sentences_are_encoded_with_the_slot_of_each_words_first_piece(sentences):
    data = load_snips(sentences, "test")
    assert data.intents == ("Book", "PlayMusic")
    assert data.slots == ("O", "B-city", "B-genre", "I-city")
    x, y = data.batch([0])
    assert int((y[0, 1:] != -100).sum()) == 3
    assert y[0, 0] == 1
    assert x.shape[1:] == (2, int(x[0, 1].sum()))  # cut to the longest sentence
    assert data.fingerprint() == load_snips(sentences, "valid").fingerprint()


@pytest.mark.medium
@pytest.mark.text
@pytest.mark.parametrize("variant", [[], ["regularizers=[]", "optimizer.kind=sam", "model.arguments.dropout=0.1"]])
def test_the_text_recipe_trains(sentences, monkeypatch, variant):
    monkeypatch.setenv("EQUIPOISE_DATA", str(sentences.parent))
    result = run_recipe(read_recipe("text-snips", [*TINY, *variant]))
    assert {"accuracy", "slot_f1", "slot_accuracy", "sentence_accuracy"} <= set(result.final)
