"""Options that several commands share, how their texts are read, and how model and data are loaded from them.

Nothing here imports torch before a command runs: help is quick.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Argument, Exit, Option, echo

if TYPE_CHECKING:
    from equipoise.data import Dataset
    from equipoise.runs.sources import Portable
    from equipoise.runs.store import Recipe

Weights = Annotated[str | None, Option(help="load these .safetensors into a factory's model")]
Device = Annotated[str, Option(help="run the network here: cpu, cuda, …")]
Json = Annotated[bool, Option("--json", help="print one JSON document and nothing else")]
Split = Annotated[str | None, Option(help="use this split of the data; default: test")]
Mean = Annotated[str | None, Option(help="feed the model (x − mean)/std: 0.5,0.5,0.5")]
Std = Annotated[str | None, Option(help="as --mean; radii stay in the units of the data")]
Data = Annotated[str, Option(help="read inputs from digits, a .npz or .parquet file, a folder, …")]
RunFolder = Annotated[
    Path | None, Option(help="store the run here; default: runs/<command>-<digest>")
]
Limit = Annotated[
    int | None, Option(help="take at most so many inputs, from every class in turn", min=1)
]
Shard = Annotated[str | None, Option(help="take one part, e.g. 2/8; --limit is per part")]
Epsilon = Annotated[str | None, Option(help="report accuracy at these radii: 0,0.25,0.5")]
Alpha = Annotated[float | None, Option(help="accept this risk per input; default: the run's")]
Procedure = Annotated[str | None, Option(help="use cohen, rivals, …; default: the run's")]
Model = Annotated[
    str, Argument(help="a .pt2 or .onnx file, a checkpoint directory, or package.module:factory")
]
RunArgument = Annotated[Path, Argument(metavar="RUN", help="a run directory")]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="change a rarer setting (keys above)"),
]
InputShape = Annotated[
    str | None, Option(help="set the shape of one input, without the batch: 3,32,32")
]
FailAbove = Annotated[
    float | None, Option(help="exit with code 1 if an upper bound is larger than this")
]


def refuse(sentence: str) -> NoReturn:
    """End the command with this sentence and exit code 2."""
    from equipoise.core.errors import InputError

    raise InputError(sentence)


def numbers(text: str, takes: str, least: float = -math.inf) -> list[float]:
    """Numbers between commas.

    Args:
        text: of the option.
        takes: what the option takes: the beginning of the sentence that refuses anything else.
        least: the smallest number allowed.

    >>> numbers("0.25,0.5", "--sigma takes numbers like 0.25")
    [0.25, 0.5]
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not min(values) >= least:
        refuse(f"{takes}, got {text!r}")
    return values


def epsilons(text: str | None) -> list[float] | None:
    """The radii of `--epsilon`."""
    return (
        None if text is None else numbers(text, "--epsilon takes numbers like 0,0.25,0.5", least=0)
    )


def sizes(
    text: str | None, takes: str = "--input-shape takes positive numbers like 3,32,32"
) -> tuple[int, ...] | None:
    """Positive whole numbers between commas or crosses.

    Args:
        text: of the option.
        takes: what the option takes.

    >>> sizes("3,32x32")
    (3, 32, 32)
    """
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= 10**7 for part in parts):
        refuse(f"{takes}, got {text!r}")
    return tuple(int(part) for part in parts)


def shard(text: str | None) -> dict[str, int]:
    """`2/8` as skip and stride.

    >>> shard("2/8")
    {'skip': 1, 'stride': 8}
    """
    if text is None:
        return {}
    parts = sizes(text.replace("/", ","), "--shard takes a part and their number such as 2/8") or ()
    if len(parts) != 2 or parts[0] > parts[1]:
        refuse(f"--shard takes a part and their number such as 2/8, got {text!r}")
    return {"skip": parts[0] - 1, "stride": parts[1]}


def interrupted(folder: Path) -> NoReturn:
    """End a command that was interrupted: exit code 130."""
    echo(f"interrupted: what is done is stored in {folder}; the same command continues", err=True)
    raise Exit(130)


def pairs(texts: list[str] | None) -> dict[str, Any]:
    """The values of `--set KEY=VALUE`: JSON where they are, else text.

    >>> pairs(["n0=50", "map=softmax:0.5"])
    {'n0': 50, 'map': 'softmax:0.5'}
    """
    values: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals:
            refuse(f"--set takes KEY=VALUE, got {text!r}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def make_recipe(**values: Any) -> Recipe:
    """What the options say about model, data and preprocessing, checked.

    Args:
        **values: fields of `Recipe`; mean and std as numbers between commas.
    """
    from equipoise.core.files import check_document
    from equipoise.runs.store import Recipe

    if "mean" in values or "std" in values:
        takes = "--mean and --std take one number per channel"
        mean = numbers(str(values.get("mean", 0)), takes)
        std = numbers(str(values.get("std", 1)), takes)
        longest = max(len(mean), len(std))
        # a single number serves every channel
        values["mean"], values["std"] = (v * longest if len(v) == 1 else v for v in (mean, std))
    return check_document(values, Recipe, "the options")


def load_network(recipe: Recipe, batch: int = 100) -> Portable:
    """The model with its preprocessing in front.

    Args:
        recipe: sources and preprocessing.
        batch: the size at which a dynamic batch dimension is fixed; by default the draws of one forward pass.
    """
    from equipoise.checkpoints import load_model
    from equipoise.runs.sources import normalised, portable

    network = portable(load_model(recipe.model, recipe.weights, batch=batch))
    if recipe.mean is not None and recipe.std is not None:
        network = normalised(network, recipe.mean, recipe.std)
    return network


def load_data(recipe: Recipe) -> Dataset:
    """The data of a recipe."""
    from equipoise.data import load_dataset

    reading = recipe.model_dump(include={"layout", "size", "columns"}, exclude_none=True)
    return load_dataset(recipe.data, recipe.split, labelled=False, **reading)
