"""The command reference, made from the help texts of the commands themselves."""

from __future__ import annotations

from typer.testing import CliRunner

from equipoise.cli.app import COMMANDS, build, installed


def reference() -> str:
    """`commands.md`: every command with its help."""
    parts = ["# Commands\n\nWhat `equipoise COMMAND --help` prints.\n"]
    for command in (*COMMANDS, *installed()):
        ran = CliRunner().invoke(
            build(wanted=command.name),
            [command.name, "--help"],
            prog_name="equipoise",
            terminal_width=100,
        )
        assert ran.exit_code == 0, (command.name, ran.output)
        parts.append(f"## {command.name}\n\n```text\n{ran.stdout.strip()}\n```\n")
    return "\n".join(parts)
