"""The command line.

Only the module of the command that runs is imported (`app.build`), and it imports what it needs when it runs, so that help is
quick.
"""

import io
import sys


def main() -> None:
    """Entry point of the `equipoise` command."""
    from equipoise.cli.app import build, run_to_exit

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without UTF-8 shows "?" for what it cannot show
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    run_to_exit(build(wanted=wanted), sys.argv[1:])


__all__ = ["main"]
