"""Files and the names in them: atomic writes, bounded reads of regular files, JSON, typed documents, digests, factories.

Every document that the package stores and reads again is a subclass of `Document`. Reading one either gives an object whose
fields have the declared types and ranges, or raises `InputError` with the path of the offending key.

Policy for `package.module:attribute` (`resolve`): a name that the user typed (on the command line, in Python) may mean any
installed code, or a module in the current folder, because typing it is asking for it. A name read from a file may not:
checkpoints and recipes name registered builders only (`equipoise.checkpoints`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from equipoise.core.errors import InputError, Refused, did_you_mean, explained, guarded, one_line
from equipoise.core.modules import fresh_strides

#: a description (JSON, YAML) longer than this is not read
LARGEST_TEXT = 16_000_000
#: what the name of a factory looks like
SPEC = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", re.ASCII)

#: a whole number ≥ 0 that every integer type of NumPy and torch holds, and a float exactly
Count = Annotated[int, Field(ge=0, le=2**53)]
#: a whole number > 0 of the same range
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
#: a number ≥ 0 and finite
NonNegative = Annotated[float, Field(ge=0)]


# ---------------------------------------------------------------------------------------------------------- files


def make_folder(folder: str | Path) -> Path:
    """Make a folder, with those above it, where it is not there yet."""
    with explained(f"cannot make {folder}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading, if it is a plain one: a device, a pipe or a folder is refused, and never waited for."""
    with explained(f"cannot read {path}"):
        handle = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(
            f"cannot read {path}: it is not a regular file but a folder, a device or a pipe"
        )
    return os.fdopen(handle, "rb")


def read_bounded(path: str | Path, limit: int = LARGEST_TEXT) -> bytes:
    """The whole of a regular file, refused where it is longer than `limit` bytes.

    Args:
        path: the file.
        limit: most bytes.
    """
    with open_regular(path) as file, explained(f"cannot read {path}"):
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise InputError(
                f"{path} is longer than {limit:,} bytes, too long for what it should be: it was not read"
            )
        return file.read(size)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, flushed to disk, then renamed.

    Args:
        path: the file; what stood in it before is replaced.
        content: its new content; text is written as UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write(Path(folder) / "a.txt", "σ")
    ...     (Path(folder) / "a.txt").read_text(encoding="utf-8")
    'σ'
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.part")
    with explained(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: str | Path, document: Any) -> None:
    """Write plain data as JSON, completely or not at all; NaN and infinity are no JSON.

    Args:
        path: the file.
        document: its new content.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write(path, text + "\n")


@contextmanager
def locked(path: str | Path, busy: str) -> Iterator[None]:
    """Hold a lock on a file, made if need be; the system lets go of it when the process ends, however it dies.

    Args:
        path: the file.
        busy: the sentence of the refusal if the lock is held already, by another process or by this one.
    """
    with explained(f"cannot write {path}"):
        file = open(path, "ab")  # noqa: SIM115 - closed below, which lets go of the lock
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(busy) from error
        except (OSError, ImportError):  # a file system or an operating system without such locks
            pass
        yield


@contextmanager
def open_weights(path: str | Path) -> Iterator[Any]:
    """A safetensors file whose header is sound, as `safetensors.safe_open` gives it: tensors are read one at a time.

    Args:
        path: a regular file; a pickle is refused with a hint.
    """
    from safetensors import SafetensorError, safe_open

    hint = ""
    if Path(path).suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}:
        hint = (
            "; pickled checkpoints are never opened, convert them with safetensors.torch.save_file"
        )
    try:
        # opened twice: pipes and devices are refused before they are mapped
        with open_regular(path), safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, MemoryError) as error:
        raise InputError(
            f"{path} is no complete safetensors file ({one_line(error)[:160]}){hint}"
        ) from error


# ------------------------------------------------------------------------------------------------ JSON and documents


def read_json(path: str | Path, limit: int = LARGEST_TEXT) -> Any:
    """The JSON document in a file, read as `parse_json` does.

    Args:
        path: the file.
        limit: most bytes.
    """
    return parse_json(read_bounded(path, limit), str(path))


def plain_json(document: Any) -> Any:
    """A document as JSON gives it back; numbers that JSON does not have become null.

    >>> plain_json({"a": (1, float("inf"))})
    {'a': [1, None]}
    """
    return json.loads(json.dumps(document), parse_constant=lambda name: None)


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON document as the standard has it: no key twice in one object, no NaN or Infinity, no bottomless nesting.

    Args:
        text: the JSON text.
        where: what it is, for the message.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: x.json is not JSON that can be trusted: the key 'a' is given twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise InputError(f"the key {key[:60]!r} is given twice")
            members[key] = value
        return members

    def constant(name: str) -> Any:
        raise InputError(f"{name} is not valid JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        kind = "JSON that can be trusted" if isinstance(error, InputError) else "JSON"
        raise InputError(f"{where} is not {kind}: {one_line(error)}") from error


class Document(BaseModel):
    """Base of every stored document: no unknown keys, no conversions between types, no NaN or infinity, immutable.

    Lists of JSON fill fields of type `tuple` or `list`; whole numbers fill fields of type `float`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def check_document(value: Any, model: type[Model], where: str) -> Model:
    """Validate parsed JSON (dictionaries, lists, numbers, texts) against a typed document.

    Args:
        value: the parsed JSON.
        model: the class of the document.
        where: what it is, for the error message.

    Raises:
        InputError: one sentence with the path of the key, what was expected and what came.

    >>> class Example(Document):
    ...     steps: Count
    >>> check_document({"steps": "ten"}, Example, "run.json")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: run.json: 'steps' must be a valid integer, got 'ten'
    """
    try:
        # pydantic lets JSON lists fill tuples only when it reads the text itself
        return model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise InputError(explain(error, where)) from error


def explain(error: ValidationError, where: str, keys: Iterable[str] = ()) -> str:
    """The first problem as one sentence: the key's path, what was expected, what came.

    Args:
        error: of pydantic.
        where: what was read.
        keys: those to suggest in place of an unknown one.
    """
    # unknown keys come first: a misspelt key is often also a missing one
    problem = min(
        error.errors(include_url=False),
        key=lambda p: not p["type"].startswith(("extra", "unexpected")),
    )
    key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("function-"))
    kind = problem["type"]
    if kind.startswith(("extra", "unexpected")):
        return f"{where}: unknown key {key!r}{did_you_mean(key, keys, 0.5)}"
    if kind.startswith("missing"):
        return f"{where}: {key!r} is missing"
    expected = re.sub(r"^(Value error, |(Input|String|Tuple|List) should )", "", problem["msg"])
    if kind == "value_error":
        return f"{where}: {key}: {expected}"
    return f"{where}: {key!r} must {expected}, got {repr(problem['input'])[:80]}"


# ---------------------------------------------------------------------------------------------------------- digests


class Digest:
    """A sha256 that is fed named values: tensors and arrays by dtype, shape and content, anything else by its text.

    Parts are length-prefixed, so that no two lists of parts read the same.

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
            value = fresh_strides((value.to_dense() if kind else value).detach().cpu())
            head = f"{kind}{value.dtype}{tuple(value.shape)}"
            body = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray):
            head = f"{value.dtype}{value.shape}"
            body = np.ascontiguousarray(value).tobytes()
        elif isinstance(value, bytes):
            head = "bytes"
            body = value
        else:
            head = "text"
            body = str(value).encode()
        for part in (name.encode(), head.encode(), body):
            self.feed(len(part).to_bytes(8, "little")).feed(part)
        return self

    def feed(self, content: bytes | memoryview) -> Digest:
        """Take in bytes as they are: for contents whose lengths are taken in before."""
        self.sha.update(content)
        return self

    def hex(self) -> str:
        """The digest in hexadecimal."""
        return self.sha.hexdigest()

    def __str__(self) -> str:
        return f"sha256:{self.hex()}"


def digest_bytes(content: bytes) -> str:
    """`sha256:…` of a file's content."""
    return str(Digest("").feed(content))


def digest_document(document: Any) -> str:
    """`sha256:…` of plain data, whatever the order of its keys.

    >>> digest_document({"a": 1, "b": [2]}) == digest_document({"b": [2], "a": 1})
    True
    """
    return digest_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, as JSON gives it back, with its digest: evidence against accidents and naive edits, not a signature.

    >>> unsealed(sealed({"a": (1, 2)}), "x.json")
    {'a': [1, 2]}
    """
    plain = json.loads(json.dumps(document))
    return plain | {"digest": digest_document(plain)}


def unsealed(document: Any, where: str, needed: bool = False) -> Any:
    """The document without its digest; refused where the two do not fit, or where there is none and it is `needed`.

    Args:
        document: the parsed JSON.
        where: what it is, for the message.
        needed: whether a document without a digest is refused.
    """
    if not isinstance(document, dict) or "digest" not in document:
        if needed:
            raise InputError(f"{where} has lost its digest: restore it, or remove the file")
        return document
    plain = dict(document)
    if plain.pop("digest") != digest_document(plain):
        raise InputError(
            f"{where} was changed after it was written (its digest does not fit): restore it, or remove the line "
            '"digest" if the change is yours'
        )
    return plain


# -------------------------------------------------------------------------------------------------------- factories


def resolve(spec: str) -> Any:
    """The object that `package.module:attribute` names; every failure, in the user's own code too, is one sentence.

    >>> resolve("math:pi")
    3.141592653589793
    """
    module, _, attribute = spec.partition(":")
    if not SPEC.match(spec):
        raise InputError(f"a factory is written package.module:factory, got {spec[:200]!r}")
    package = module.partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        # behind everything installed, and only for a name that nothing installed has
        sys.path.append(os.getcwd())
    target = guarded(lambda: importlib.import_module(module), f"the import of {module!r}")
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            raise InputError(f"{module!r} has no {attribute!r}{did_you_mean(part, names)}")
        target = getattr(target, part)
    return target
