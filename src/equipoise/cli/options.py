"""Options that several commands share: what is read, which inputs, where the network runs, what is printed; lists of numbers."""

from pathlib import Path
from typing import Annotated

import typer

Weights = Annotated[Path | None, typer.Option(help="weights for a factory, as .safetensors")]
Device = Annotated[str, typer.Option(help="where the network runs")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
Split = Annotated[str | None, typer.Option(help="which part of the data; default: test")]
Skip = Annotated[int, typer.Option(help="leave out the first inputs")]
Stride = Annotated[int, typer.Option(help="take every so many-th input")]
Mean = Annotated[
    str | None, typer.Option(help="the model takes (x − mean)/std: one number per channel, e.g. 0.5,0.5,0.5")
]
Std = Annotated[str | None, typer.Option(help="see --mean; noise and radii stay in the units of the data")]
Layout = Annotated[str | None, typer.Option(help="of arrays with three axes: NHWC or NCHW; default by type")]
Size = Annotated[str | None, typer.Option(help="resize and crop pictures to this, e.g. 32 or 32,48 (height,width)")]
Columns = Annotated[str | None, typer.Option(help="names of inputs and labels in tables and dicts, e.g. image,label")]
Classes = Annotated[
    Path | None, typer.Option(help="class names in the order of the logits: a line each, or JSON name → number")
]


def numbers(text: str, takes: str, least: float | None = None) -> list[float]:
    """Numbers between commas; `takes` begins the sentence that refuses others, or those below `least`.

    >>> numbers("0.25,0.5", "--sigma takes numbers like 0.25")
    [0.25, 0.5]
    """
    from equipoise.core.errors import InputError

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{takes}, got {text!r}") from error
    if least is not None and not all(value >= least for value in found):
        raise InputError(f"{takes}, got {text!r}")
    return found


def sizes(text: str, takes: str) -> tuple[int, ...]:
    """Positive whole numbers between commas or crosses.

    >>> sizes("3,32x32", "--input-shape takes positive numbers like 3,32,32")
    (3, 32, 32)
    """
    from equipoise.core.errors import InputError

    try:
        found = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError(f"{takes}, got {text!r}")
    return found
