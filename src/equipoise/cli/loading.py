"""Model and data as the options of a command, or the record of a run, name them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli.options import numbers, sizes
from equipoise.core.errors import InputError
from equipoise.core.files import parse_json, read_bounded

if TYPE_CHECKING:
    from equipoise.data import Dataset
    from equipoise.runs.models import Portable
    from equipoise.runs.settings import Recipe

#: draws of one forward pass, at which a dynamic batch dimension is fixed
CHUNK = 100


def make_recipe(
    model: str,
    data: str,
    *,
    weights: Path | None,
    split: str | None,
    size: str | None,
    classes: Path | None,
    mean: str | None,
    std: str | None,
    denoiser: str | None = None,
    layout: str | None = None,
    columns: str | None = None,
) -> Recipe:
    """What the options say about model, data and preprocessing, checked.

    Args:
        model: a file, a checkpoint directory, or package.module:factory.
        data: a name, a file or a folder.
        weights: of a factory.
        split: of the data.
        size: of pictures, `32` or `32,48`.
        classes: a file of class names.
        mean: per channel.
        std: per channel.
        denoiser: a model put before.
        layout: NHWC, NCHW, NHW or as-is.
        columns: names of inputs and labels, `image,label`.
    """
    from equipoise.runs.settings import Recipe

    shape = None if size is None else sizes(size, "--size takes one or two whole numbers such as 32 or 32,48")
    if shape is not None and (len(shape) > 2 or max(shape) > 10**5):
        raise InputError(f"--size takes one or two whole numbers such as 32 or 32,48, got {size!r}")
    names = None if columns is None else tuple(part.strip() for part in columns.split(","))
    if names is not None and (len(names) != 2 or not all(names)):
        raise InputError(f"columns takes two names such as image,label, got {columns!r}")

    centre, spread = _channels(mean, std)
    return Recipe(
        model=model,
        data=data,
        weights=None if weights is None else str(weights),
        denoiser=denoiser,
        mean=centre,
        std=spread,
        split=split,
        layout=layout,
        size=None if shape is None else (shape[0], shape[-1]),
        columns=None if names is None else (names[0], names[1]),
        classes=None if classes is None else read_classes(classes),
    )


def _channels(mean: str | None, std: str | None) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and deviation per channel; a single number serves every channel."""
    if mean is None and std is None:
        return None, None
    takes = "--mean and --std take one finite number per channel, std > 0"
    centre, spread = numbers(mean or "0", takes), numbers(std or "1", takes)
    longest = max(len(centre), len(spread))
    centre, spread = (v * longest if len(v) == 1 else v for v in (centre, spread))
    if len(centre) != len(spread) or not all(map(math.isfinite, centre)) or not all(0 < s < math.inf for s in spread):
        raise InputError(f"{takes}, got {mean!r} and {std!r}")
    return tuple(centre), tuple(spread)


def read_classes(path: Path) -> tuple[str, ...] | dict[str, int]:
    """Class names: one per line in the order of the logits, or a JSON list, or a JSON object of name → number."""
    content = read_bounded(path, 10_000_000)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text of class names: {error.reason} at byte {error.start}") from error
    found: Any = [line.strip() for line in text.splitlines() if line.strip()]
    if text.lstrip()[:1] in ("{", "["):
        found = parse_json(content, str(path))
    if isinstance(found, list) and found and all(isinstance(name, str) for name in found):
        return tuple(found)
    if isinstance(found, dict) and all(type(k) is int for k in found.values()):
        return found
    raise InputError(f"{path} names no classes: expected one name per line, a JSON list or an object of name → number")


def load_network(recipe: Recipe, batch: int = CHUNK) -> Portable:
    """The model with everything that stands before it.

    Args:
        recipe: sources and preprocessing.
        batch: the size at which a dynamic batch dimension is fixed.
    """
    from equipoise.checkpoints import load_model
    from equipoise.runs.models import denoised, normalised, portable

    network = portable(load_model(recipe.model, recipe.weights, batch=batch))
    if recipe.mean is not None and recipe.std is not None:
        network = normalised(network, recipe.mean, recipe.std)
    if recipe.denoiser is not None:
        network = denoised(load_model(recipe.denoiser, batch=batch), network)
    return network


def load_data(recipe: Recipe, data: str | None = None, split: str | None = None) -> Dataset:
    """The data of a recipe, or other data read in the same way.

    Args:
        recipe: sources and preprocessing.
        data: other data.
        split: of the other data.
    """
    from equipoise.data import load_dataset

    options: dict[str, Any] = {"layout": recipe.layout, "size": recipe.size, "columns": recipe.columns}
    given = {name: value for name, value in options.items() if value is not None}
    source, part = (recipe.data, recipe.split) if data is None else (data, split)
    dataset = load_dataset(source, part, labelled=False, **given)
    classes: Sequence[str] | Mapping[str, int] | None = recipe.classes
    return dataset if classes is None or not dataset.labelled else dataset.with_classes(classes)
