"""Where output goes: results to stdout, progress and complaints to stderr, and stdout holds only JSON when asked for."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

#: letters of numbers in the cells of tables
NUMERIC = set("-+.,0123456789e %×")


def results() -> Console:
    """Console for results; not on a terminal it is wide enough that tables are not cut."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def messages() -> Console:
    """Console for progress and complaints."""
    return Console(stderr=True, highlight=False)


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    say(f"equipoise: {sentence}", style="red")


def visible(text: str) -> str:
    """The text with control characters written out: those of a name in a file could hide what else is printed."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def say(text: str, style: str | None = None) -> None:
    """A remark on stderr, as it is."""
    messages().print(visible(text), markup=False, style=style, soft_wrap=True)


def tell(*lines: str) -> None:
    """Lines of a result on stdout, as they are."""
    console = results()
    for line in lines:
        console.print(visible(line), markup=False, soft_wrap=True)


@contextmanager
def progress(description: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, shown only on a terminal and gone when done; gives `update(done, total, description=…)`."""
    console = messages()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total, **text: bar.update(task, completed=done, total=total, **text)


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table of results; columns of numbers are aligned to the right.

    Args:
        title: above it.
        rows: the cells by the heading of their column.
    """
    table = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
    for column in rows[0] if rows else ():
        numeric = all(set(row[column]) <= NUMERIC for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(visible, row.values()))
    results().print(table, markup=False)


def emit_json(document: Any) -> None:
    """Write one JSON document to stdout; numbers JSON cannot hold become null, letters beyond ASCII are escaped."""
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    typer.echo(json.dumps(finite, indent=2, allow_nan=False))
