"""`equipoise check`: an independent program accepts or rejects a certificate bundle."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.consoles import emit_json, results
from equipoise.cli.options import Json


def check(
    folder: Annotated[Path, typer.Argument(help="The folder of the bundle.")],
    exact: Annotated[bool, typer.Option(help="Use exact integers; for dense ReLU networks.")] = False,
    as_json: Json = False,
) -> None:
    """Check every claim of a certificate bundle with the lone checker.

    The checker (equipoise/checker/check.py) needs Python and NumPy alone and shares no
    code with the rest of the library; copy it anywhere and run `python check.py DIR`.

    Examples:

      equipoise check bundle/
    """
    from equipoise import certificates

    proved = certificates.check(folder, exact=exact)
    if as_json:
        emit_json({"accepted": True, "proved": proved})
        return
    console = results()
    console.print("ACCEPTED", style="bold green")
    for line in proved:
        console.print(f"  {line}", markup=False, highlight=False)
