"""What equipoise raises: a user's mistake, or a guarantee that cannot be given.

Both carry one readable sentence; the command line prints it and exits non-zero. Anything else that
escapes is a bug of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class EquipoiseError(Exception):
    """Base of every error that is meant to be read by a user."""


class InputError(EquipoiseError, ValueError):
    """The input is malformed: wrong shape, non-finite weights, unknown file, empty data."""


class Refused(EquipoiseError):
    """The input is fine but the guarantee asked for cannot be given; the message says why and what to try."""


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?` where a known word is much like this one, else nothing.

    >>> near("sed", ["seed", "sigma"]), near("x", ["seed"])
    ("; did you mean 'seed'?", '')
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_one_of(known: Iterable[str], **given: object) -> None:
    """Refuse a choice that is not `known`, by the name it was given under.

    >>> require_one_of(("l1", "linf"), order="l1")
    """
    names = tuple(known)
    for name, value in given.items():
        if value not in names:
            raise InputError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
