"""Training inside experiments: a recipe as plain data, the same for both scales, cut to two steps in a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from equipoise.core.errors import InputError
from equipoise.lab.experiments.experiment import Context

if TYPE_CHECKING:
    from equipoise.train import Result

Plain = dict[str, Any]

#: flips and crops with a margin of four pixels: the thesis' augmentation
STANDARD = ("flip", {"kind": "pad-crop", "padding": 4})


def recipe(
    model: str,
    arguments: Mapping[str, Any],
    data: str,
    epochs: int,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    augment: Sequence[Any] = (),
    optimizer: Mapping[str, Any],
    batch_size: int = 128,
    warmup: float = 0.0,
    **rest: Any,
) -> Plain:
    """A network of `nn.models` (or `module:factory`) on images with a cosine schedule, measured after the last epoch."""
    return {
        "model": {"factory": model if ":" in model else f"equipoise.nn.models:{model}", "arguments": dict(arguments)},
        "data": {"path": data, "limit": limit, "test_limit": test_limit, "augment": list(augment)},
        "optimizer": dict(optimizer),
        "schedule": {"kind": "cosine", "warmup": warmup},
        "epochs": epochs,
        "batch_size": batch_size,
        "metrics": {"bound": False, "every": epochs},
        **rest,
    }


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> Plain:
    """`base` with the keys of `change`, part by part.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def train(recipe: Mapping[str, Any], context: Context, seed: int = 0) -> Result:
    """`run_recipe` with `data.path` looked up in the data folder; a dry run trains for two small steps and proves no
    bound.
    """
    from equipoise.train import run_recipe

    path = str(recipe["data"]["path"])
    if "." in path and ":" not in path:
        path = str(_file(path, context))
    elif ":" in path and "/" in path:  # reader:/name, as the text recipes have it
        reader, _, name = path.rpartition(":")
        path = f"{reader}:{context.file(name.lstrip('/'))}"
    chosen = merged(recipe, {"seed": context.seed * 1000 + seed, "data": {"path": path}})
    if context.dry:
        batch = min(16, int(chosen.get("batch_size", 128)))
        few: Plain = {"limit": 2 * batch, "test_limit": 64}
        if chosen["data"].get("validation"):
            few["validation"] = 0.25  # the share of a whole data set may be less than one of these few
        chosen = merged(chosen, {"epochs": 1, "batch_size": batch, "data": few, "metrics": {"bound": False}})
    return run_recipe(chosen, cpu=context.device == "cpu")


def _file(name: str, context: Context) -> Any:
    """The data file; a rehearsal of the paper's scale makes do with the subset where the full set is not at hand."""
    try:
        return context.file(name)
    except InputError:
        if not context.dry or "-full" not in name:
            raise
        return context.file(name.replace("-full", ""))
