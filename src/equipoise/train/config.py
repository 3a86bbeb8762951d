"""Recipes: a training run as data, typed models read from YAML, with overrides `key.key=value`.

Every part is a small pydantic model with defaults and bounded sizes. An unknown key, a wrong type or a value out of range is
one `InputError` that names the key. Parts that choose from a table (`loss`, `regularizers`, `projections`, `augment`, `noise`)
take a `kind` and the arguments of that kind, or just the name of the kind; `from_table` checks the arguments by the
annotations of the chosen function.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
    validate_call,
)

from equipoise.checkpoints.builders import registered
from equipoise.core import InputError, Refused, did_you_mean, one_line
from equipoise.core.files import SPEC, explain, read_bounded, resolve
from equipoise.data.dataset import Layout

#: plain data, as JSON and YAML hold it
Plain = dict[str, Any]

_FLOAT = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+$")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_LARGEST = 1_000_000  # bytes of a recipe

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**9)]
AtLeastOne = Annotated[int, Field(ge=1, le=10**9)]
# noisy copies, steps of an attack: each costs a pass through the network
Few = Annotated[int, Field(ge=1, le=100)]


class Part(BaseModel):
    """A part of a recipe: unknown keys are errors, values cannot change afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Choice(BaseModel):
    """A row of a table by its `kind`; every other key is an argument of that row."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")
    kind: str

    @property
    def arguments(self) -> Plain:
        """The arguments beside `kind`."""
        return dict(self.model_extra or {})


Named = Annotated[
    Choice, BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value)
]


class Model(Part):
    """`factory(**arguments)` makes the network; `weights` (safetensors) start it."""

    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: Plain = {}
    weights: str | None = None


class Data(Part):
    """The training data: `path` is a bundled name (`digits`) or a file or folder, `${EQUIPOISE_DATA}` is filled in.

    `reader` (`package.module:function`) is called as `reader(path, split)` instead of `load_dataset`. `validation` is the part
    of the training split held out and measured every epoch (0: the test split is measured instead); `limit` keeps the first so
    many examples of a seeded shuffle. From the training split of `extra`, generated images for instance, every epoch takes
    `extra_ratio` times as many examples as it has others, drawn anew.
    """

    path: str
    reader: str | None = None
    layout: Layout | None = None
    train: str = "train"
    test: str | None = "test"
    validation: Fraction = 0.0
    limit: AtLeastOne | None = None
    test_limit: AtLeastOne | None = None
    extra: str | None = None
    extra_ratio: Positive = 1.0
    augment: list[Named] = []


class Optimizer(Part):
    """`sgd`, `adam`, `adamw`, `nadam`, `muon`, or `sam`/`asam` around a `base` with radius `rho`.

    `muon` is `torch.optim.Muon` for matrices, and AdamW at a tenth of the rate for the rest. `lookahead: k`
    moves the weights halfway back after every k steps.
    """

    kind: Literal["sgd", "adam", "adamw", "nadam", "muon", "sam", "asam"] = "sgd"
    lr: Positive = 0.1
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.9
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    base: Literal["sgd", "adam", "adamw"] = "sgd"
    rho: Positive = 0.05
    decay: Literal["all", "matrices"] = "all"
    clip: Positive | None = None
    lookahead: AtLeastOne | None = None

    @property
    def two_steps(self) -> bool:
        """Whether a step needs the gradient at two points."""
        return self.kind in ("sam", "asam")

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if self.lookahead is not None and self.two_steps:
            raise ValueError(
                f"lookahead does not go with {self.kind}, which takes two steps in one"
            )
        return self


class Schedule(Part):
    """The factor of the learning rate over the run; it rises to 1 during the first `warmup` (a fraction of all steps).

    `cosine` and `linear` then fall to `final`; `one-cycle` is `cosine` with a warmup of 0.3 by default; `piecewise` is linear
    between `points` of (fraction, factor).
    """

    kind: Literal["constant", "cosine", "linear", "one-cycle", "piecewise"] = "constant"
    warmup: Fraction = 0.0
    final: NonNegative = 0.0
    points: list[tuple[Share, NonNegative]] = []

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        fractions = [fraction for fraction, _ in self.points]
        if fractions != sorted(set(fractions)) or (self.kind == "piecewise" and len(fractions) < 2):
            raise ValueError(
                "a piecewise schedule needs at least two points (fraction, factor) with increasing fractions"
            )
        return self


class Metrics(Part):
    """What is measured: certified accuracy at each ε (ℓ2, inputs in [0, 1]) and the network's bound every `bound_every` epochs.

    The last epoch is always measured in full; `bound_every: 0` means only then. `bound: false` leaves the bound out.
    """

    epsilons: list[NonNegative] = [0.1, 0.2]
    every: AtLeastOne = 1
    bound: bool = True
    bound_every: Count = 0
    rtol: Positive = 1e-3
    batch_size: AtLeastOne = 500


class Recipe(Part):
    """A whole training run. Two runs with equal recipes and data on one machine give equal networks, bit by bit on a CPU.

    >>> recipe = Recipe(model={"factory": "torch.nn:Flatten"}, data={"path": "digits"}, epochs=1)
    >>> recipe.optimizer.kind, recipe.batch_size
    ('sgd', 128)
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=100)] = "run"
    description: str = ""
    published: str = ""
    model: Model
    data: Data
    loss: Named = Choice(kind="ce")
    regularizers: list[Named] = []
    projections: list[Named] = []
    noise: Named | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    epochs: Annotated[int, Field(ge=1, le=10**6)]
    batch_size: Annotated[int, Field(ge=1, le=10**6)] = 128
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    metrics: Metrics = Metrics()
    checkpoint_steps: AtLeastOne | None = None

    def to_dict(self) -> Plain:
        """Plain JSON data, defaults included; infinite numbers are the text "Infinity", which is read as a number again."""
        return json.loads(self.model_dump_json())


def from_table(
    table: Mapping[str, Callable[..., Any]], choice: Choice, where: str, *first: Any
) -> Any:
    """The chosen row of a table, called with `first` and the choice's arguments.

    The arguments are converted and checked by the row's annotations. A kind `package.module:function` is imported.

    Args:
        table: functions by kind.
        choice: the kind and its arguments.
        where: the key of the recipe, for messages.
        first: positional arguments that do not come from the recipe.
    """
    row = resolve(choice.kind) if SPEC.match(choice.kind) else table.get(choice.kind)
    if row is None:
        hint = (
            did_you_mean(choice.kind, table, 0.5) or f"; the kinds are {', '.join(sorted(table))}"
        )
        raise InputError(f"{where}: no kind {choice.kind!r}{hint}")
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(
        functools.partial(row, *first)
    )
    try:
        return checked(**choice.arguments)
    except ValidationError as error:
        raise InputError(
            explain(error, f"{where} ({choice.kind})", inspect.signature(row).parameters)
        ) from error
    except TypeError as error:  # options that the row hands on
        raise InputError(f"{where} ({choice.kind}): {one_line(error)}") from error


def bundled() -> dict[str, str]:
    """The recipes that come with the package: name → text.

    >>> "sll-sr-digits" in bundled()
    True
    """
    files = sorted((Path(__file__).parent / "recipes").glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8") for path in files}


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: Iterable[str] = (),
    *,
    allow_code: bool = False,
) -> Recipe:
    """A checked recipe from a bundled name, a YAML file, plain data or a recipe, with overrides on top.

    `extends: NAME` starts from a bundled recipe: what is given is put over it, key by key.

    Args:
        source: where the recipe comes from.
        overrides: `"optimizer.lr=0.1"` and the like; the values are YAML.
        allow_code: let a file name `package.module:factory` of your own, which is run. Otherwise it names registered models only.

    >>> read_recipe("sll-sr-digits", ["epochs=2", "optimizer.lr=1e-2"]).epochs
    2
    """
    where = "the recipe"
    if isinstance(source, Recipe):
        document = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        document = dict(source)
    else:
        where = str(source)
        document = _read(where, allow_code)
    if not isinstance(document, dict):
        raise InputError(f"{where} must hold `key: value` pairs, got {type(document).__name__}")
    document = _extend(document, where)
    for item in overrides:
        document = _override(document, item)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        keys = list(Recipe.model_fields)
        for name, part in Recipe.model_fields.items():
            keys += [f"{name}.{key}" for key in getattr(part.annotation, "model_fields", ())]
        raise InputError(explain(error, where, keys)) from error


def _read(source: str, allow_code: bool) -> Any:
    """The document of a YAML file or a bundled recipe."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        recipes = bundled()
        if source not in recipes:
            hint = did_you_mean(source, recipes, 0.5)
            raise InputError(
                f"no bundled recipe {source!r}{hint}; `equipoise train --list` shows them"
            )
        return {"name": source, **parse(recipes[source], source)}
    document = parse(read_bounded(path, _LARGEST), source)
    if isinstance(document, dict):
        named = None if allow_code else next(_code_names(document), None)
        if named is not None:
            raise Refused(
                f"{source} names {named[:100]!r}, code that would be run: if you trust it, allow it (--allow-code, "
                "allow_code=True), or name it yourself (--set model.factory=…)"
            )
        document.setdefault("name", re.sub(r"[^\w.-]", "-", path.stem) or "run")
    return document


class _Loader(yaml.SafeLoader):
    """Safe YAML where `1e-3` is a number; aliases, a few lines of which expand to gigabytes, are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node, refused where it is an alias.

        Args:
            parent: of the node.
            index: its place in the parent.
        """
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read: write the value out")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("+-.0123456789"))


def parse(text: str | bytes, where: str) -> Any:
    """The plain data of a YAML text.

    Args:
        text: at most a few kilobytes of YAML.
        where: its name, for messages.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # constructors of YAML raise more than YAMLError
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        reason = getattr(error, "problem", None) or one_line(error)
        raise InputError(f"{place} is not YAML: {reason[:160]}") from error


def _extend(document: Plain, where: str) -> Plain:
    """A recipe that `extends` a bundled one, written out; description and published figures are not inherited."""
    if "extends" not in document:
        return document
    name = document["extends"]
    text = bundled().get(name) if isinstance(name, str) else None
    if text is None:
        hint = did_you_mean(str(name), bundled())
        raise InputError(f"{where}: extends takes the name of a bundled recipe, got {name!r}{hint}")
    base = _extend(parse(text, name), name)
    for key in ("description", "published", "name"):
        base.pop(key, None)
    return _merge(base, {key: value for key, value in document.items() if key != "extends"})


def _merge(base: Plain, new: Plain) -> Plain:
    """Parts are merged key by key; a part of another `kind` replaces the old one."""
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _code_names(value: Any, key: str = "") -> Any:
    """Every text of the document at a key that may be imported, with variables filled in."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name != "arguments":
                yield from _code_names(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _code_names(item, key)
    elif isinstance(value, str) and key not in ("description", "published", "weights"):
        text = _VARIABLE.sub(lambda match: os.environ.get(match[1], ""), value).split("#")[0]
        if SPEC.match(text) and not (key == "factory" and registered(text)):
            yield text


def _override(document: Plain, item: str) -> Plain:
    """A copy of the document with `a.b=value` set; the value is YAML."""
    key, equals, text = item.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"--set takes key=value like optimizer.lr=0.1, got {item!r}")
    return _put(document, path, parse(text, f"--set {key}: the value"))


def _put(current: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    head, *rest = path
    if isinstance(current, list):
        raise InputError(f"--set: {head!r} is inside a list: give the whole list, key=[…]")
    inner = {"kind": current} if isinstance(current, str) else dict(current or {})
    return {**inner, head: _put(inner.get(head), rest, value)}


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
