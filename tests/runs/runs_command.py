"""`python runs_command.py certify …`: the command line with the one command under test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from equipoise.cli.app import Command, build

COMMAND = Command("certify", "equipoise.cli.certify", "certify", optional=True, summary="Certify a dataset.")
NORM = Command("norm", "equipoise.cli.norm", "norm")


def app():
    return build((COMMAND, NORM))


if __name__ == "__main__":
    app()(prog_name="equipoise")
