"""One digest: sha256 over parts that are length-prefixed, so that no two lists of parts read the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import InputError


class Digest:
    """A sha256 that is fed named values: tensors and arrays by dtype, shape and content, anything else by its text.

    >>> Digest("example").add("a", 1).hex() == Digest("example").add("a1", "").hex()
    False
    """

    def __init__(self, kind: str) -> None:
        self.sha = hashlib.sha256(kind.encode())

    def add(self, name: str, value: Any) -> Digest:
        """Take in one named value.

        Args:
            name: of the value.
            value: the value.
        """
        if isinstance(value, Tensor):
            kind = "" if value.layout is torch.strided else str(value.layout)
            value = (value.to_dense() if kind else value).detach().cpu().contiguous()
            head = f"{kind}{value.dtype}{tuple(value.shape)}"
            body = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray):
            head, body = f"{value.dtype}{value.shape}", np.ascontiguousarray(value).tobytes()
        elif isinstance(value, bytes):
            head, body = "bytes", value
        else:
            head, body = "text", str(value).encode()
        for part in (name.encode(), head.encode(), body):
            self.sha.update(len(part).to_bytes(8, "little"))
            self.sha.update(part)
        return self

    def feed(self, content: bytes | memoryview) -> Digest:
        """Take in bytes as they are: for contents whose lengths are told beforehand."""
        self.sha.update(content)
        return self

    def hex(self) -> str:
        """The digest in hexadecimal."""
        return self.sha.hexdigest()

    def __str__(self) -> str:
        return f"sha256:{self.hex()}"


def digest_bytes(content: bytes) -> str:
    """`sha256:…` of a file's content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def digest_document(document: Any) -> str:
    """`sha256:…` of plain data, whatever the order of its keys.

    >>> digest_document({"a": 1, "b": [2]}) == digest_document({"b": [2], "a": 1})
    True
    """
    text = json.dumps(document, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return digest_bytes(text.encode())


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, as JSON gives it back, with its digest: evidence against accidents and naive edits, not a signature.

    >>> unsealed(sealed({"a": (1, 2)}), "x.json")
    {'a': [1, 2]}
    """
    plain = json.loads(json.dumps(document))
    return plain | {"digest": digest_document(plain)}


def unsealed(document: Any, where: str, needed: bool = False) -> Any:
    """The document without its digest; refused where the two do not fit. One without a digest is believed, unless `needed`.

    Args:
        document: the parsed JSON.
        where: what it is, for the message.
        needed: whether a document without a digest is refused.
    """
    if not isinstance(document, dict) or "digest" not in document:
        if needed:
            raise InputError(
                f"{where} has lost its digest, so its figures may be anybody's: restore it, or remove the file"
            )
        return document
    plain = {key: value for key, value in document.items() if key != "digest"}
    if document["digest"] != digest_document(plain):
        raise InputError(
            f"{where} was changed after it was written (its digest does not fit): restore it, or remove the line "
            '"digest" if the change is yours'
        )
    return plain
