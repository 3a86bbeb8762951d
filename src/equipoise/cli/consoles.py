"""Where output goes: results to stdout, progress and complaints to stderr, and stdout holds only JSON when asked for."""

import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Closed(io.TextIOBase):
    """A standard output that was closed before we began: writing to it fails, so that no result is lost without a word."""

    encoding = "utf-8"

    def write(self, text: str, /) -> int:
        """Fail, as the system would."""
        raise OSError(errno.EBADF, "standard output is closed")


def prepare_streams() -> None:
    """A closed output fails when it is written to; a terminal without UTF-8 shows "?" for what it cannot show."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            _occupy(number)
            nowhere = Closed() if name == "stdout" else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _occupy(number: int) -> None:
    """Let no file that is opened later take the place of a standard stream, where stray output would go into it."""
    handle = os.open(os.devnull, os.O_RDWR)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)


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


def emit_json(document: Any, indent: int | None = 2) -> None:
    """Write one JSON document to stdout; numbers JSON cannot hold become null, letters it cannot print are escaped."""
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    plain = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(finite, indent=indent, ensure_ascii=plain, allow_nan=False) + "\n")
    sys.stdout.flush()
