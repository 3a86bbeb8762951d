"""The application: one table of commands, one way to report errors."""

import contextlib
import errno
import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from typer import Option

from equipoise.cli.consoles import complain, emit_json


@dataclass(frozen=True)
class Command:
    """One row of the command table: `attribute` of `module` is a function with typer annotations, or a `typer.Typer`.

    Modules may import torch: a command with a `summary` is loaded only when it is the one that will run, and until then
    listed by its summary.
    """

    name: str
    module: str
    attribute: str
    summary: str = ""


#: every command in the order of the help: its module in this package and what the list says of it
_TABLE = {
    "demo": ("demo", "Train, audit, certify and attack on bundled digits."),
    "norm": ("norm", "Prove the spectral norm of every weight in a file."),
    "audit": ("audit", "Prove a Lipschitz bound of a network, layer by layer."),
    "certify": ("certify", "Certify a dataset by randomized smoothing."),
    "prove": ("certify", "Prove a radius around every input, without noise."),
    "check": ("certify", "Check a certificate bundle independently."),
    "derive": ("certify", "Show a stored run at another risk or procedure."),
    "merge": ("certify", "Join runs over disjoint inputs."),
    "export": ("certify", "Write a run as a table (.csv)."),
    "attack": ("attack", "Attack a run; no certificate may break."),
    "predict": ("attack", "Answer new inputs as the certified classifier does."),
    "report": ("report", "Show runs and bounds on one HTML page."),
    "train": ("train", "Train a network from a recipe."),
    "curvature": ("curvature", "Measure the curvature of the loss at the weights."),
    "selfcheck": ("selfcheck", "Attack the guarantees on your own machine."),
}
COMMANDS = tuple(
    Command(name, f"equipoise.cli.{module}", name, text) for name, (module, text) in _TABLE.items()
)

#: click's class of mistakes in a command line; typer has its own copy of click in later versions
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

HELP = """Measure, train and certify the stability of PyTorch networks, with guarantees.

Every reported upper bound is rigorous, rounding included.

Examples:

  equipoise demo                                everything once, on digits
  equipoise audit model.onnx                    how far can it stretch inputs?
  equipoise prove model.onnx --data images.npz  which answers cannot change?
  equipoise certify model.onnx --data photos/ --sigma 0.1  the same, by noise

Every command has --help and --json. Exit codes: 0 success, 1 a check failed,
2 the input was refused (one sentence on stderr; with --json also {"error": …}
on stdout), 130 interrupted.
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
        cls=Commands,
        name="equipoise",
        help=_verbatim(HELP),
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for command in commands:
        _register(app, command, wanted)
    return app


class Commands(typer.core.TyperGroup):
    """All commands: a user's mistake becomes one sentence on stderr and exit code 2; a bug keeps its traceback.

    With `--json` stdout holds a document in this case too: `{"error": sentence}`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, with a note of `--json`."""
        ctx.meta["json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, UsageError):
            raise
        except Exception as error:
            # imported here, not above: the module imports torch, and help is quick
            from equipoise.core.errors import EquipoiseError, one_line, out_of_memory

            if isinstance(error, EquipoiseError):
                sentence = str(error)
            elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                sentence = "a name given is too long"
            elif out_of_memory(error):
                sentence = f"this does not fit into memory ({one_line(error)})"
            else:
                raise
        complain(sentence)
        if ctx.meta["json"]:
            emit_json({"error": sentence})
        raise typer.Exit(2)


def run_to_exit(app: typer.Typer, arguments: list[str]) -> NoReturn:
    """Run the application and end the process: 0 fine, 1 a check failed, 2 refused or not written, 130 interrupted.

    Mistakes in the command line are a sentence, with --json a document too; output that cannot be written (a broken pipe, a
    full disk) never ends in success.

    Args:
        app: what `build` returned.
        arguments: of the command line.
    """
    code = 0
    try:
        try:
            code = app(arguments, prog_name="equipoise", standalone_mode=False)
        except UsageError as error:
            code = 2
            error.show()  # type: ignore[attr-defined]
            if "--json" in arguments:
                emit_json({"error": " ".join(error.format_message().split())})  # type: ignore[attr-defined]
        except typer.Exit as error:
            code = error.exit_code
        except (typer.Abort, KeyboardInterrupt):
            complain("interrupted")
            code = 130
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # not a stream: a bug
            raise
        with contextlib.suppress(OSError):
            complain(f"cannot write the output: {error.strerror}")
        os._exit(2)  # what waits to be written cannot be
    sys.exit(code if isinstance(code, int) else 0)


def _version(wanted: bool) -> None:
    if wanted:
        from equipoise import __version__

        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Options of the application itself."""


def _register(app: typer.Typer, command: Command, wanted: str | None) -> None:
    summary = command.summary or None
    if summary and wanted not in (None, command.name):
        app.command(command.name, help=summary)(lambda: None)
        return
    target = getattr(importlib.import_module(command.module), command.attribute)
    if not isinstance(target, typer.Typer):
        app.command(command.name, short_help=summary, help=_verbatim(target.__doc__ or ""))(target)
        return
    for info in target.registered_commands:
        info.help = _verbatim(info.callback.__doc__ or "")
    app.add_typer(target, name=command.name, short_help=summary)


def _verbatim(text: str) -> str:
    """Help text whose line breaks are kept (`\\b` marks a paragraph that is not to be re-wrapped)."""
    paragraphs = inspect.cleandoc(text).strip().split("\n\n")
    return "\n\n".join("\b\n" + p for p in paragraphs)
