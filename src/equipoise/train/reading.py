"""Recipes from files: YAML with line numbers, overrides `key.key=value`, and errors that say what was expected where."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from equipoise.checkpoints.builders import registered
from equipoise.core.errors import InputError, Refused, did_you_mean, one_line
from equipoise.core.files import read_bounded
from equipoise.core.imports import SPEC
from equipoise.train.recipe import Recipe
from equipoise.train.text import READERS

_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+$")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_LARGEST = 1_000_000  # bytes of a recipe
_DEEPEST = 50
_EXTENDED = 8  # recipes that extend one another
Lines = dict[tuple[str | int, ...], int]


def bundled() -> dict[str, str]:
    """The recipes that come with the package: name → text.

    >>> "sll-sr-digits" in bundled()
    True
    """
    folder = resources.files("equipoise.train") / "recipes"
    found = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): found[name] for name in sorted(found)}


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe, overrides: Iterable[str] = (), *, allow_code: bool = False
) -> Recipe:
    """A checked recipe from a bundled name, a YAML file, plain data or a recipe, with `key.key=value` overrides on top.

    A file names registered models and data only; `allow_code` lets it name `package.module:factory` of your own, which is run.
    `extends: NAME` starts from a bundled recipe: what is given is put over it, key by key (`extended`).

    >>> read_recipe("sll-sr-digits", ["epochs=2", "optimizer.lr=1e-2"]).epochs
    2
    """
    lines: Lines = {}
    where = "the recipe"
    if isinstance(source, Recipe):
        document: Any = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        document = numbers(dict(source))
    else:
        where, text = _text(str(source))
        document, lines = parse(text, where)
        if not allow_code:
            _require_no_code(document, where)
        if isinstance(document, dict):
            document.setdefault("name", _plain(Path(where).stem))
    if not isinstance(document, dict):
        raise InputError(f"{where} must hold `key: value` pairs, got {_kind(document)}")
    document = extended(_american(document), where)
    for item in overrides:
        head, dot, rest = item.partition(".")
        document = _override(document, f"{_BRITISH.get(head, head)}{dot}{rest}")
    return check(document, where, lines)


def extended(document: dict[str, Any], where: str, depth: int = 0) -> dict[str, Any]:
    """A recipe that `extends` a bundled one, written out: parts are merged key by key, the rest is replaced.

    A part that names another `kind` is another thing, so nothing of the old one is kept; neither are the description and the
    published figures, which speak of the other recipe.

    >>> extended({"extends": "sll-sr-digits", "epochs": 1}, "the recipe")["epochs"]
    1
    """
    if "extends" not in document:
        return document
    name, known = document["extends"], bundled()
    if not isinstance(name, str) or name not in known or depth > _EXTENDED:
        raise InputError(
            f"{where}: extends takes the name of a bundled recipe, got {name!r}{nearest(str(name), known)}"
        )
    base = extended(parse(known[name], name)[0], name, depth + 1)
    for key in ("description", "published", "name"):
        base.pop(key, None)
    return _over(base, {key: value for key, value in document.items() if key != "extends"})


def _over(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in new.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            found[key] = _over(old, value)
        else:
            found[key] = value
    return found


def _require_no_code(document: Any, where: str) -> None:
    """Refuse a file that names code: a model that is not registered, or data made by a factory."""
    named = _named_code(document) if isinstance(document, dict) else None
    if named is not None:
        raise Refused(
            f"{where} names {named[:100]!r}, code that would be run: if you trust it, allow it (--allow-code, "
            "allow_code=True), or name it yourself (--set model.factory=…)"
        )


def _named_code(document: dict[Any, Any]) -> str | None:
    """The first factory that is no registered model, in the words it has once variables are filled in."""
    model, data = (part if isinstance(part, dict) else {} for part in (document.get("model"), document.get("data")))
    factory, extra = model.get("factory"), data.get("extra")
    if isinstance(factory, str) and SPEC.match(factory) and not registered(factory):
        return factory
    for path in (data.get("path"), extra.get("path") if isinstance(extra, dict) else None):
        filled = _VARIABLE.sub(lambda match: os.environ.get(match[1], ""), path) if isinstance(path, str) else ""
        if SPEC.match(filled.split("#")[0]) and filled.partition(":")[0] not in READERS:
            return filled
    return None


def _text(source: str) -> tuple[str, str]:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            return source, read_bounded(path, _LARGEST).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"the recipe {path} is not UTF-8 text") from error
    known = bundled()
    if source in known:
        return f"{source}.yaml", known[source]
    raise InputError(f"no bundled recipe {source!r}{nearest(source, known)}; `equipoise train --list` shows them")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name) or "run"


def parse(text: str, where: str) -> tuple[Any, Lines]:
    """Safe YAML and the line of every key; numbers like 1e-3 are numbers, a key given twice is an error."""
    try:
        _require_tame(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except (ValueError, RecursionError, OverflowError) as error:  # dates and numbers that are none, bottomless nesting
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not YAML: {one_line(error)[:160]}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise InputError(f"{place} is not YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from error
    lines: Lines = {}
    if node is not None:
        _walk(node, (), lines, where)
    return numbers(document), lines


def _require_tame(text: str, where: str) -> None:
    """Refuse aliases, which a few lines can multiply into gigabytes, and nesting beyond any recipe."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise InputError(f"{where}: aliases such as *{event.anchor} are not read: write it out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise InputError(f"{where} is nested deeper than {_DEEPEST} levels")


def _walk(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, where: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise InputError(f"{where}, line {line}: {key.value!r} is given twice")
            seen.add(key.value)
            lines[(*path, key.value)] = line
            _walk(value, (*path, key.value), lines, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, where)


def numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text; here it is the number.

    >>> numbers({"lr": "1e-3", "name": "e3"})
    {'lr': 0.001, 'name': 'e3'}
    """
    if isinstance(value, str) and (_FLOAT.match(value) or value in (".inf", "-.inf")):
        return float(value.replace(".inf", "inf"))
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    return [numbers(item) for item in value] if isinstance(value, list) else value


def _override(document: dict[str, Any], item: str) -> dict[str, Any]:
    """A copy of the document with `a.b=value` (or `list.0.key=value`) set; the value is read as YAML."""
    key, equals, text = item.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"--set takes key=value like optimizer.lr=0.1, got {item!r}")
    try:
        value = numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise InputError(f"--set {key}: {text!r} is not a YAML value") from error
    return _put(document, path, value, key)


def _put(current: Any, path: list[str], value: Any, key: str) -> Any:
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(current, list):
        if not head.isdigit() or int(head) > len(current):
            raise InputError(f"--set {key}: {head!r} is no position in a list of {len(current)} (0 is the first)")
        items = [*current, *([{}] if int(head) == len(current) else [])]
        items[int(head)] = _put(items[int(head)], rest, value, key)
        return items
    if current is None and head == "0":  # the first entry of a list that is not there yet
        return [_put(None, rest, value, key)]
    inner = current if isinstance(current, dict) else {"kind": current} if isinstance(current, str) else {}
    return {**inner, head: _put(inner.get(head), rest, value, key)}


def check(document: Mapping[str, Any], where: str = "the recipe", lines: Lines | None = None) -> Recipe:
    """The document as a `Recipe`, or an `InputError` naming the first problem: key, line, what was expected, what came.

    Unknown keys come first: a misspelt key is also a missing one, and its own line says what to mend.
    """
    document = _american(document)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        problems = sorted(error.errors(), key=lambda p: p["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(_sentence(problems[0], where, lines or {}) + more) from error


#: keys as they were spelled in the first release
_BRITISH = {"optimiser": "optimizer", "regularisers": "regularizers"}


def _american(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with today's keys; an earlier spelling is accepted with a hint, both at once are an error."""
    renamed: dict[str, Any] = {}
    for key, value in document.items():
        new = _BRITISH.get(key, key) if isinstance(key, str) else key
        if new != key:
            if new in document:
                raise InputError(f"{key!r} is the earlier spelling of {new!r}: give one of them")
            warnings.warn(f"the recipe's key {key!r} is spelled {new!r} now", FutureWarning, stacklevel=4)
        renamed[new] = value
    return renamed


def _sentence(problem: Any, where: str, lines: Lines) -> str:
    location = tuple(p for p in problem["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    line = next((lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), None)
    place = f"{where}, line {line}" if line else where
    key = ".".join(map(str, location))
    if problem["type"] == "extra_forbidden":
        owner = _owner(location[:-1])
        return f"{place}: unknown key {key!r}{nearest(str(location[-1]), owner)}"
    if problem["type"] == "missing":
        return f"{place}: {key!r} is missing"
    said = re.sub(r"^(Value error, |(Input|String|Tuple|List) should )", "", problem["msg"])
    if problem["type"] == "value_error":
        return f"{place}: {key}: {said}"
    return f"{place}: {key!r} must {said}, got {problem['input']!r}"


def _owner(location: tuple[str | int, ...]) -> list[str]:
    """The known keys of the part a location points at."""
    current: Any = Recipe
    for part in location:
        fields = getattr(current, "model_fields", {})
        if part in fields:
            current = next((t for t in _types(fields[str(part)].annotation) if hasattr(t, "model_fields")), None)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _types(annotation: Any) -> list[Any]:
    inner = [t for a in get_args(annotation) for t in _types(a)]
    return [annotation, *inner]


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a text", type(None): "nothing"}.get(type(value), "a number")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, or all of them.

    >>> nearest("cosin", ["cosine", "constant"])
    "; did you mean 'cosine'?"
    """
    names = list(known)
    return did_you_mean(word, names, 0.5) or (f"; known are {', '.join(sorted(names))}" if names else "")


def fill_in(path: str) -> str:
    """`${NAME}` from the environment; an unset one is an error that says so.

    >>> fill_in("digits")
    'digits'
    """
    for name in _VARIABLE.findall(path):
        if not os.environ.get(name):
            raise InputError(
                f"data.path is {path!r}, but {name} is not set: export {name}=FOLDER, or --set data.path=FILE"
            )
    return _VARIABLE.sub(lambda match: os.environ[match[1]], path)
