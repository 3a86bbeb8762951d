"""`package.module:attribute`: the one way from a name to the code it means.

Policy: a name that the user typed (on the command line, in Python) may mean any installed code, or a module in the current
folder that nothing installed shares its name with, because typing it is asking for it. A name read from a file may not:
checkpoints and recipes name registered builders only (`equipoise.checkpoints`).
"""

import importlib
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.core.errors import EquipoiseError, InputError, did_you_mean, one_line

#: what such a name looks like
SPEC = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", re.ASCII)


def resolve(spec: str) -> Any:
    """The object that `package.module:attribute` names; every failure, in the user's own code too, is one sentence.

    >>> resolve("math:pi")
    3.141592653589793
    """
    module, _, attribute = spec.partition(":")
    if not SPEC.match(spec):
        raise InputError(f"a factory is written package.module:factory, got {spec[:200]!r}")
    target = guarded(lambda: _module(module), f"the import of {module!r}")
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            raise InputError(f"{module!r} has no {attribute!r}{did_you_mean(part, names)}")
        target = getattr(target, part)
    return target


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
    except SystemExit as error:
        raise InputError(
            f"{what} ended the program (exit code {error.code!r}) instead of returning something"
        ) from error
    except TypeError as error:
        raise InputError(f"{what} cannot be called like that: {one_line(error)[:200]}") from error
    except Exception as error:
        raise InputError(f"{what} failed with {type(error).__name__}: {one_line(error)[:200]}") from error


def _module(name: str) -> Any:
    _look_here(name.partition(".")[0])
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:  # ValueError: names such as "a..b"
        raise InputError(
            f"cannot import {name!r}: {one_line(error)[:200]}; is it installed or on PYTHONPATH?"
        ) from error


def _look_here(package: str) -> None:
    """Let a module of the current folder be found, behind everything installed, if that is where the name is."""
    here = Path.cwd()
    if package in sys.modules or str(here) in sys.path or "" in sys.path:
        return
    if ((here / f"{package}.py").is_file() or (here / package).is_dir()) and find_spec(package) is None:
        sys.path.append(str(here))
