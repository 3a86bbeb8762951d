"""Where output goes: results to stdout, progress and complaints to stderr, and stdout holds only JSON when asked for."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def results() -> Console:
    """Console for results; not on a terminal it is wide enough that tables are not cut."""
    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160, highlight=False)


def messages() -> Console:
    """Console for progress and complaints."""
    return Console(stderr=True, highlight=False)


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    messages().print(f"equipoise: {sentence}", markup=False, style="red", soft_wrap=True)


def say(text: str) -> None:
    """A remark on stderr, as it is."""
    messages().print(text, markup=False, soft_wrap=True)


def tell(*lines: str) -> None:
    """Lines of a result on stdout, as they are."""
    console = results()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def progress() -> Progress:
    """A progress bar on stderr, shown only on a terminal and gone when done."""
    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table.

    Args:
        title: above it.
        columns: their headings.
        right: the columns of numbers.
    """
    result = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table of results.

    Args:
        title: above it.
        columns: their headings.
        rows: the cells.
        right: the columns of numbers.
    """
    shown = table(title, *columns, right=right)
    for row in rows:
        shown.add_row(*row)
    results().print(shown, markup=False)


def emit_json(document: Any) -> None:
    """Write one JSON document to stdout; numbers JSON cannot hold become null, letters it cannot print are escaped."""
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    typer.echo(json.dumps(finite, indent=2, ensure_ascii=ascii_only, allow_nan=False))
