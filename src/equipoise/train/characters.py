"""Text character by character: stretches of a file and the characters that follow, in the same trainer as everything else."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.core.errors import InputError
from equipoise.core.files import read_bounded
from equipoise.train.task import Counts

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
        found = self.tokens[start + torch.arange(self.context + 1)]
        return found[:, :-1], found[:, 1:]

    def fingerprint(self) -> str:
        """`sha256:…` of the characters and how they are cut."""
        content = repr((self.alphabet, self.context, self.stride)).encode() + self.tokens.numpy().tobytes()
        return f"sha256:{hashlib.sha256(content).hexdigest()}"


def load_characters(where: str, split: str) -> Characters:
    """`N:FILE`: stretches of N characters of a UTF-8 text, the first nine tenths to learn from (`train`), the rest to test.

    The alphabet is that of the whole text.
    """
    count, _, name = where.partition(":")
    if not count.isdecimal() or not 1 <= int(count) <= 10**5 or not name:
        raise InputError(f"expected characters:N:FILE, N characters to a stretch, got characters:{where}")
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
        raise InputError(f"{path} has {len(part)} characters to {split}, too few for stretches of {context}")
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in part])
    return Characters(tokens, alphabet, context, 1 if split == "train" else context)


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy of every next token; counts right guesses and bits per token."""

    metrics: tuple[str, ...] = ("accuracy", "bits")

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Right guesses, and bits: `−log₂ p` of the true tokens, summed."""
        found: Counts = {"accuracy": ((output.argmax(2) == y).sum(), y.numel())}
        if not quick:
            nats = F.cross_entropy(output.flatten(0, 1).double(), y.flatten(), reduction="sum")
            found["bits"] = (nats / math.log(2), y.numel())
        return found

    def fitted(self, source: Any) -> NextToken:
        """The same; refused for data that are no text."""
        if not isinstance(source, Characters):
            raise InputError("loss next-token needs a text: data.path: characters:64:FILE")
        return self
