"""The command line.

Only the module of the command that runs is imported (`app.build`), and it imports what it needs when it runs, so that help is
quick.
"""

import sys


def main() -> None:
    """Entry point of the `equipoise` command."""
    from equipoise.cli.app import build, run_to_exit
    from equipoise.cli.consoles import prepare_streams

    prepare_streams()
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    run_to_exit(build(wanted=wanted), sys.argv[1:])


__all__ = ["main"]
