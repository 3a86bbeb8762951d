"""Stored documents (JSON) read by typed models: a field that is missing, misspelt or of another type is one sentence.

Every document that the package stores and reads again is a subclass of `Document`. Reading one either gives an object whose
fields have the declared types and ranges, or raises `InputError` with the path of the offending key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equipoise.core.digests import unsealed
from equipoise.core.errors import InputError
from equipoise.core.files import LARGEST_TEXT, parse_json, read_bounded

#: a whole number ≥ 0 that every integer type of NumPy and torch holds, and a float exactly
Count = Annotated[int, Field(ge=0, le=2**53)]
#: a whole number > 0 of the same range
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
#: a number ≥ 0 and finite
NonNegative = Annotated[float, Field(ge=0)]


class Document(BaseModel):
    """Base of every stored document: no unknown keys, no conversions between types, no NaN or infinity, immutable.

    Lists of JSON fill fields of type `tuple` or `list`; whole numbers fill fields of type `float`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def read_document(path: str | Path, model: type[Model], *, sealed: bool = False, limit: int = LARGEST_TEXT) -> Model:
    """Read a JSON file as a typed document.

    Args:
        path: a regular file; pipes, devices and folders are refused without waiting.
        model: the class of the document, a subclass of `Document`.
        sealed: whether the document must carry its digest (`equipoise.core.digests.sealed`), which is checked and removed.
        limit: bytes beyond which the file is not read.

    Returns:
        The document; all its fields have the declared types.

    Raises:
        InputError: one sentence with the file, the path of the key, what was expected and what came.
    """
    return parse_document(read_bounded(path, limit), model, str(path), sealed=sealed)


def parse_document(text: str | bytes, model: type[Model], where: str, *, sealed: bool = False) -> Model:
    """Read JSON text (a row of a database, a header) as a typed document.

    Args:
        text: the JSON text.
        model: the class of the document.
        where: what the text is, for the error message.
        sealed: whether the document must carry its digest.

    >>> class Example(Document):
    ...     steps: Count
    >>> parse_document('{"steps": "ten"}', Example, "run.json")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: run.json: steps: expected a valid integer, got 'ten'
    """
    value = parse_json(text, where)

    if sealed:
        value = unsealed(value, where, needed=True)

    return check_document(value, model, where)


def check_document(value: Any, model: type[Model], where: str) -> Model:
    """Validate parsed JSON (dictionaries, lists, numbers, texts) against a typed document.

    Args:
        value: the parsed JSON.
        model: the class of the document.
        where: what it is, for the error message.
    """
    try:
        # pydantic lets JSON lists fill tuples only when it reads the text itself
        return model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise InputError(f"{where}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    """The first problem: the key's path, what was expected and what came."""
    problems = error.errors(include_url=False)
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"]) or "the document"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""

    if first["type"] == "missing":
        return f"the key {key!r} is missing{more}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}{more}"

    expected = " ".join(first["msg"].split()).removeprefix("Input should be ").removeprefix("Value error, ")
    got = repr(first["input"])
    return f"{key}: expected {expected}, got {got[:60]}{more}"
