"""The application: one table of commands, one way to report errors."""

import contextlib
import errno
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer

from equipoise.cli.consoles import complain, emit_json


@dataclass(frozen=True)
class Command:
    """One row of the command table: `attribute` of `module` is a function with typer annotations, or a `typer.Typer`.

    `optional` rows belong to floors that may not be installed: they are left out when their module is absent. Their modules may
    import torch, so they are loaded only when they are the command `wanted`; until then `summary` stands in the list.
    """

    name: str
    module: str
    attribute: str
    optional: bool = False
    summary: str = ""


#: every command in the order of the help: its module in this package and what the list says of it
_TABLE = {
    "demo": ("demo", "Train, audit, certify and attack on bundled digits."),
    "norm": ("norm", "Spectral norms of the weights in a file, proved."),
    "audit": ("audit", "A proved Lipschitz bound of a network, by layer."),
    "certify": ("certify", "Certify a dataset by randomized smoothing."),
    "prove": ("certify", "Prove radii of a network itself, without noise."),
    "check": ("check", "Check a certificate bundle independently."),
    "derive": ("certify", "A stored run at another risk or procedure."),
    "merge": ("certify", "Join runs over disjoint inputs."),
    "export": ("certify", "A run as .csv, .json or Cohen's log."),
    "attack": ("attack", "Attack a run; no certificate may break."),
    "predict": ("attack", "Answers of a run's classifier as deployed."),
    "report": ("report", "One HTML page from certification runs."),
    "train": ("train", "Train a network from a recipe."),
    "curvature": ("curvature", "Hessian eigenvalue, trace, density, sharpness."),
    "selfcheck": ("selfcheck", "Attack the guarantees on your own machine."),
}
#: loaded at once; the others only when they are wanted
_LIGHT = frozenset({"demo", "norm", "selfcheck"})
COMMANDS = tuple(
    Command(name, f"equipoise.cli.{module}", name, name not in _LIGHT, text) for name, (module, text) in _TABLE.items()
)

#: click's class of mistakes in a command line; typer has its own copy of click in later versions
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

#: a disk, a quota or a file that takes no more
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HELP = """Stability of PyTorch networks, with guarantees: every reported upper bound is rigorous, rounding included.

Examples:

  equipoise demo                                           everything once, on bundled digits: a minute or two
  equipoise audit model.onnx                               how much can this network stretch a distance?
  equipoise certify model.onnx --data photos/ --sigma 0.1  which answers cannot change, and how far?
  equipoise prove model.onnx --data images.npz             the same without noise, for the network itself
  equipoise norm model.safetensors --input-size 32,32      spectral norm of every weight
  equipoise selfcheck --minutes 5                          the guarantees, attacked on this machine

Every command has --json and --help. Exit codes: 0 fine, 1 a check failed, 2 the input was refused
(one sentence on stderr; with --json {"error": …} on stdout as well), 130 interrupted.
"""


def installed() -> tuple[Command, ...]:
    """The commands that other packages add through the entry point group `equipoise.commands`, by name."""
    points = sorted(entry_points(group="equipoise.commands"), key=lambda point: point.name)
    return tuple(Command(point.name, point.module, point.attr) for point in points)


def build(commands: tuple[Command, ...] | None = None, wanted: str | None = None) -> typer.Typer:
    """The typer application.

    Args:
        commands: rows of the command table; by default the built-in ones and those of installed packages.
        wanted: the command that will run; the others are listed without being imported.
    """
    if commands is None:
        commands = (*COMMANDS, *installed())
    app = typer.Typer(
        name="equipoise",
        help=_verbatim(HELP),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for command in commands:
        _register(app, command, wanted)
    return app


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command: an `EquipoiseError` becomes one sentence on stderr and exit code 2; a bug keeps its traceback.

    With `--json` stdout holds a document in this case too: `{"error": sentence}`.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
            return result
        except Exception as error:
            sentence = _sentence(error)
            if sentence is None:
                raise
            refuse(sentence, bool(kwargs.get("json") or kwargs.get("as_json")))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(130) from None

    wrapper.__doc__ = _verbatim(function.__doc__ or "")
    return wrapper


def _sentence(error: Exception) -> str | None:
    """What is said to the user; None: a bug of ours."""
    from equipoise.core.errors import EquipoiseError, one_line, out_of_memory

    if isinstance(error, EquipoiseError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "a name given is too long to be that of a file"
    return f"this does not fit into memory ({one_line(error)})" if out_of_memory(error) else None


def refuse(sentence: str, as_json: bool) -> None:
    """One sentence on stderr; with --json a document on stdout as well."""
    complain(sentence)
    if as_json:
        emit_json({"error": sentence})


def run_to_exit(app: typer.Typer, arguments: list[str]) -> NoReturn:
    """Run the application and end the process: 0 fine, 1 a check failed, 2 refused or not written, 130 interrupted.

    Mistakes in the command line are a sentence, with --json a document too; output that cannot be written (a closed or broken
    pipe, a full disk) never ends in success.
    """
    code: Any = 0
    try:
        try:
            code = app(arguments, prog_name="equipoise", standalone_mode=False)
        except UsageError as error:
            code = _misused(error, "--json" in arguments)
        except typer.Exit as error:
            code = error.exit_code
        except (typer.Abort, KeyboardInterrupt):
            complain("interrupted")
            code = 130
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (*_FULL, errno.EPIPE, errno.EBADF, errno.EIO):
            raise
        hint = "; free some space and run the same command again" if error.errno in _FULL else ""
        with contextlib.suppress(OSError):
            complain(f"cannot write the output: {error.strerror}{hint}")
        os._exit(2)  # what waits to be written cannot be
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Any, as_json: bool) -> int:
    """What is wrong with the command line, on stderr; with --json a document as well."""
    error.show()
    if as_json:
        emit_json({"error": " ".join(error.format_message().split())})
    return 2


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=lambda v: _version(v)),
    ] = False,
) -> None:
    """Options of the application itself."""


def _version(asked: bool) -> None:
    if asked:
        from equipoise import __version__

        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


def _register(app: typer.Typer, command: Command, wanted: str | None) -> None:
    if command.optional and importlib.util.find_spec(command.module) is None:
        return
    if command.optional and wanted is not None and wanted != command.name:
        app.command(command.name, short_help=command.summary or None, help=command.summary)(
            _unavailable(command, "it was not loaded")
        )
        return
    try:
        target = getattr(importlib.import_module(command.module), command.attribute)
    except ImportError as error:
        if not command.optional:
            raise
        target = _unavailable(command, str(error))
    if isinstance(target, typer.Typer):
        for info in target.registered_commands:
            if info.callback is not None:
                info.callback = reported(getattr(info.callback, "__wrapped__", info.callback))
        app.add_typer(target, name=command.name, short_help=command.summary or None)
    else:
        app.command(command.name, short_help=command.summary or None)(reported(target))


def _unavailable(command: Command, reason: str) -> Callable[[], None]:
    """A command that is installed but cannot be imported says so when it is called, and does not break the others."""

    def unavailable() -> None:
        """Not available in this installation."""
        complain(f"`equipoise {command.name}` is not available here: {reason}")
        raise typer.Exit(2)

    return unavailable


def _verbatim(text: str) -> str:
    """Help text whose line breaks are kept (`\\b` marks a paragraph that is not to be re-wrapped)."""
    paragraphs = inspect.cleandoc(text).strip().split("\n\n")
    return "\n\n".join("\b\n" + p for p in paragraphs)
