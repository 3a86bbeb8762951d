"""Damage to files: accidents (flipped bits, cuts, swaps) and intent (edited fields, injected code, repaired checksums)."""

import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.core.files import sealed

#: the file whose appearance shows that something in a file was executed
CANARY = "executed"
_TOUCH = f"__import__('pathlib').Path('{CANARY}').touch()"


class _Bomb:
    """Unpickling it creates the canary."""

    def __reduce__(self) -> Any:
        return open, (CANARY, "w")


#: what an attacker would write where a name, a text or a number stands
HOSTILE: tuple[Any, ...] = (
    _TOUCH, f"x={_TOUCH}", f"x\n    {_TOUCH}\n    y", f'"+{_TOUCH}+"', f"'] + [{_TOUCH}] + ['", f"{_TOUCH} is None",
    f"touch {CANARY}", "os:system", "equipoise.checkpoints:load_factory", "equipoise.core.files:atomic_write",
    "torch.os.system", "_operator.call", "torch.ops.aten.from_file.default", "torch.ops.aten.remainder.int",
    "torch.ops.aten.max_pool2d_with_indices_backward.default", "torch.ops.aten.softmax.int", "torch.ops.aten.repeat.default",
    "torch.ops.aten.arange.default", "__class__", "../../../etc/passwd", "/dev/zero",
    "", "x" * 100_000, "ｎame", "\x00", "\ud800", 10**400, -1, 2**63, 1e308, 0, None, True, [], {}, [[[]]], {"a": {}},
    {"as_operator": "torch.os.system"}, {"expr_str": _TOUCH}, [_TOUCH], {_TOUCH: 1},
)  # fmt: skip

Mutation = Callable[[random.Random, Path], str]


def _files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and path.stat().st_size
    )


def _choose(chance: random.Random, folder: Path) -> tuple[Path, bytearray]:
    path = chance.choice(_files(folder))
    return path, bytearray(path.read_bytes())


def flip(chance: random.Random, folder: Path) -> str:
    """One bit."""
    path, content = _choose(chance, folder)
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name} flipped"


def overwrite(chance: random.Random, folder: Path) -> str:
    """A few bytes, with zeros, ones or noise."""
    path, content = _choose(chance, folder)
    place, count = chance.randrange(len(content)), chance.choice((1, 2, 4, 8, 64, 512))
    fill = chance.choice((b"\0" * count, b"\xff" * count, chance.randbytes(count)))
    content[place : place + count] = fill[: len(content) - place]
    path.write_bytes(content)
    return f"{count} bytes at {place} of {path.name} overwritten"


def cut(chance: random.Random, folder: Path) -> str:
    """The end is missing."""
    path, content = _choose(chance, folder)
    kept = chance.randrange(len(content))
    path.write_bytes(content[:kept])
    return f"{path.name} cut to {kept} bytes"


def extend(chance: random.Random, folder: Path) -> str:
    """Something is appended."""
    path, content = _choose(chance, folder)
    path.write_bytes(content + chance.choice((b"\0", b"\n", chance.randbytes(40), bytes(content))))
    return f"{path.name} extended"


def swap(chance: random.Random, folder: Path) -> str:
    """Two files change places."""
    one, other = chance.choice(_files(folder)), chance.choice(_files(folder))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name} swapped"


def remove(chance: random.Random, folder: Path) -> str:
    """A file is gone."""
    path = chance.choice(_files(folder))
    path.unlink()
    return f"{path.name} removed"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        current = todo.pop()
        if isinstance(current, dict | list):
            keys = list(current) if isinstance(current, dict) else range(len(current))
            places += [(current, key) for key in keys]
            todo += [current[key] for key in keys]
    return places


def edit_document(chance: random.Random, document: Any) -> str:
    """Change one or two places of a JSON document as an attacker would."""
    changes = []
    for _ in range(chance.choice((1, 1, 2))):
        places = _places(document)
        if not places:
            break
        container, key = chance.choice(places)
        how = chance.randrange(6)
        if how == 0:
            del container[key]
            changes.append(f"{str(key)[:30]} removed")
        elif how == 1 and isinstance(container, dict):
            container[str(chance.choice([h for h in HOSTILE if isinstance(h, str)]))] = (
                container.pop(key)
            )
            changes.append(f"{str(key)[:30]} renamed")
        elif how == 2 and len(places) > 1:
            other, place = chance.choice(places)
            container[key] = (
                json.loads(json.dumps(other[place]))
                if place in range(len(other)) or isinstance(other, dict)
                else 0
            )
            changes.append(f"{str(key)[:30]} copied from elsewhere")
        else:
            container[key] = chance.choice(HOSTILE)
            changes.append(f"{str(key)[:30]} = {str(container[key])[:40]!r}")
    return ", ".join(changes)


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", errors="replace")


def edit_json(chance: random.Random, folder: Path) -> str:
    """Edit a field of a JSON file and write a digest that fits."""
    paths = [path for path in _files(folder) if path.suffix == ".json"]
    if not paths:
        return edit_archive(chance, folder)
    path = chance.choice(paths)
    document = json.loads(path.read_text(encoding="utf-8"))
    change = edit_document(chance, document)
    if isinstance(document, dict) and document.pop("digest", None) is not None:
        document = sealed(document)
    path.write_bytes(_dump(document))
    return f"{path.name}: {change}"


def edit_archive(chance: random.Random, folder: Path) -> str:
    """Edit a description inside a zip archive, or replace an entry; checksums fit."""
    paths = [path for path in _files(folder) if zipfile.is_zipfile(path)]
    if not paths:
        return edit_text(chance, folder)
    path = chance.choice(paths)
    change, out = "", io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        entry = chance.choice(old.namelist())
        documents = [name for name in old.namelist() if name.endswith(".json")]
        if documents and chance.random() < 0.8:
            entry = chance.choice(documents)
        for name in old.namelist():
            content = old.read(name)
            if name == entry and name.endswith(".json"):
                document = json.loads(content)
                change = edit_document(chance, document)
                content = _dump(document)
            elif name == entry:
                change, content = (
                    "replaced",
                    chance.choice((pickle.dumps(_Bomb()), b"", content[: len(content) // 2])),
                )
            new.writestr(name, content)
        if chance.random() < 0.1:
            extra = chance.choice(
                (
                    "../x",
                    "model/data/aotinductor/model/x.so",
                    "model/extra/x",
                    "model/data/weights/x.pt",
                )
            )
            new.writestr(extra, pickle.dumps(_Bomb()))
            change += f", {extra} added"
    path.write_bytes(out.getvalue())
    return f"{path.name}, {entry}: {change}"


def edit_text(chance: random.Random, folder: Path) -> str:
    """Replace a word of a text by something hostile."""
    path, content = _choose(chance, folder)
    text = content.decode("utf-8", errors="replace")
    words = text.split()
    old = chance.choice(words) if words else text
    new = str(chance.choice(HOSTILE))
    path.write_bytes(text.replace(old, new, 1).encode("utf-8", errors="replace"))
    return f"{path.name}: {old[:30]!r} → {new[:40]!r}"


def link(chance: random.Random, folder: Path) -> str:
    """A file becomes a link to a device without end, or to nothing."""
    path = chance.choice(_files(folder))
    path.unlink()
    target = chance.choice(("/dev/zero", "/dev/null", "nowhere", path.parent))
    path.symlink_to(target)
    return f"{path.name} → {target}"


ACCIDENTS: tuple[Mutation, ...] = (flip, flip, flip, overwrite, cut, extend, swap, remove)
INTENTS: tuple[Mutation, ...] = (edit_json, edit_json, edit_archive, edit_archive, edit_text, link)
