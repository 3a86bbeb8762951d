"""What equipoise raises: a user's mistake, or a guarantee that cannot be given.

Both carry one readable sentence; the command line prints it and exits non-zero. Anything else that
escapes is a bug of ours and keeps its traceback.
"""

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class EquipoiseError(Exception):
    """Base of every error that is meant to be read by a user."""


class InputError(EquipoiseError, ValueError):
    """The input is malformed: wrong shape, non-finite weights, unknown file, empty data."""


class Refused(EquipoiseError):
    """The input is fine but the guarantee asked for cannot be given; the message says why and what to try."""


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?` where one of the words is much like this one, else nothing.

    Args:
        word: what was typed.
        words: the words there are.
        cutoff: how alike they must be, between 0 and 1.

    >>> did_you_mean("sed", ["seed", "sigma"]), did_you_mean("x", ["seed"])
    ("; did you mean 'seed'?", '')
    """
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 letters of it, or its type where it says nothing."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 300 else f"{line[:300]} …"


@contextmanager
def explained(
    sentence: str, todo: str = "", kind: type[EquipoiseError] = InputError
) -> Iterator[None]:
    """What fails inside is refused in one sentence with the reason; what is refused already stays as it is.

    Args:
        sentence: what is wrong.
        todo: what to do about it, with its punctuation.
        kind: of the error.

    >>> with explained("the size is not a number", "; give one"):
    ...     int("x")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: the size is not a number: invalid literal for int() with base 10: 'x'; give one
    """
    try:
        yield
    except EquipoiseError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise kind(f"{sentence}: {reason[:200]}{todo}") from error


def guarded(work: Callable[[], Any], what: str) -> Any:
    """The result of the user's own code; an exception of its own, or an attempt to end the process, is one sentence.

    Args:
        work: the user's code.
        what: its name, for the message.
    """
    try:
        return work()
    except EquipoiseError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what} failed with {type(error).__name__}: {one_line(error)[:200]}"
        ) from error


def optional(module: str, extra: str) -> Any:
    """A module of a package that not every installation has; where it is missing, a sentence says how to get it.

    Args:
        module: its name.
        extra: the extra of equipoise that brings it.

    >>> optional("math", "train").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs {module}: pip install 'equipoise[{extra}]' ({one_line(error)})"
        ) from error


#: how PyTorch says that there is not enough memory: of the processor's it has no type of error for it
_SHORTAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether something did not fit into memory: what was asked for is too large for this machine, and not a bug.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGES)


@contextmanager
def unlogged() -> Iterator[None]:
    """Without log messages: PyTorch logs the traceback of what is raised anyway, and that is said once, in a sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
