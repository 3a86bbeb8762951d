"""The command line.

Only the module of the command that runs is imported (`app.build`), and it imports what it needs when it runs, so that help is
quick.
"""

import io
import os
import sys


def main() -> None:
    """Entry point of the `equipoise` command."""
    from equipoise.cli.app import build, run_to_exit

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without UTF-8 shows "?" for what it cannot show
            stream.reconfigure(errors="replace")
    words = sys.argv
    if "_EQUIPOISE_COMPLETE" in os.environ:  # a shell asks what may follow a line
        line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        words = line.split()
    wanted = next((word for word in words[1:] if not word.startswith("-")), "")
    run_to_exit(build(wanted=wanted), sys.argv[1:])


__all__ = ["main"]
