"""Options that several commands share: what is read, which inputs, where the network runs, what is printed."""

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
