"""Options that several commands share, and lists of numbers in them."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

Weights = Annotated[Path | None, typer.Option(help="weights for a factory, as .safetensors")]
Device = Annotated[str, typer.Option(help="where the network runs")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
Split = Annotated[str | None, typer.Option(help="which part of the data; default: test")]
Mean = Annotated[str | None, typer.Option(help="the model takes (x − mean)/std: per channel, e.g. 0.5,0.5,0.5")]
Std = Annotated[str | None, typer.Option(help="see --mean; noise and radii stay in the units of the data")]
Size = Annotated[str | None, typer.Option(help="resize and crop pictures, e.g. 32 or 32,48 (height,width)")]
Classes = Annotated[Path | None, typer.Option(help="class names in the order of the logits: a line each, or JSON")]
Data = Annotated[str, typer.Option(help="the data: digits, a .npz or .parquet file, a folder, …")]
RunFolder = Annotated[Path | None, typer.Option(help="run directory; default: runs/<command>-<digest>")]
Limit = Annotated[int | None, typer.Option(help="at most this many inputs, the first of every class in turn")]
Shard = Annotated[str | None, typer.Option(help="one part of the inputs, e.g. 2/8: the second of eight (see merge)")]
Epsilon = Annotated[str | None, typer.Option(help="radii for certified accuracy, e.g. 0,0.25,0.5")]
Model = Annotated[str, typer.Argument(help="a .pt2 or .onnx file, a checkpoint directory, or package.module:factory")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a rarer setting, see below")]


def numbers(text: str, takes: str, least: float | None = None) -> list[float]:
    """Numbers between commas; `takes` begins the sentence that refuses others, or those below `least`.

    Args:
        text: of the option.
        takes: what the option takes.
        least: the smallest number allowed.

    >>> numbers("0.25,0.5", "--sigma takes numbers like 0.25")
    [0.25, 0.5]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or (least is not None and not all(value >= least for value in found)):
        _refuse(takes, text)
    return found


def epsilons(text: str | None) -> list[float] | None:
    """The radii of `--epsilon`."""
    return None if text is None else numbers(text, "--epsilon takes numbers like 0,0.25,0.5", least=0)


def sizes(text: str, takes: str) -> tuple[int, ...]:
    """Positive whole numbers between commas or crosses.

    Args:
        text: of the option.
        takes: what the option takes.

    >>> sizes("3,32x32", "--input-shape takes positive numbers like 3,32,32")
    (3, 32, 32)
    """
    try:
        found = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        _refuse(takes, text)
    return found


def shard(text: str | None) -> dict[str, int]:
    """`2/8` as skip and stride.

    >>> shard("2/8")
    {'skip': 1, 'stride': 8}
    """
    if text is None:
        return {}
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and len(count) < 10 and 1 <= int(part) <= int(count)):
        _refuse("--shard takes a part and their number such as 2/8", text)
    return {"skip": int(part) - 1, "stride": int(count)}


def _refuse(takes: str, text: str) -> NoReturn:
    from equipoise.core.errors import InputError

    raise InputError(f"{takes}, got {text!r}")


def pairs(given: list[str] | None, known: dict[str, type]) -> dict[str, Any]:
    """The values of `--set KEY=VALUE`, by their types.

    Args:
        given: the texts.
        known: the keys a command takes, with their types.

    >>> pairs(["n0=50"], {"n0": int})
    {'n0': 50}
    """
    from equipoise.core.errors import InputError, did_you_mean

    found: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f"--set takes KEY=VALUE with a key among {', '.join(known)}, got {text!r}{hint}")
        kind = known[name]
        try:
            found[name] = value.lower() in ("true", "yes", "1") if kind is bool else kind(value)
        except ValueError as error:
            raise InputError(f"--set {name} takes a {kind.__name__}, got {value!r}") from error
    return found
