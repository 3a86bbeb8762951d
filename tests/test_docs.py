"""Every Python block of the README and the documentation and every cell of the notebooks runs, in one namespace per page.

A block is left out only with a reason, in an HTML comment right before it: `<!-- not run: reason -->`.
"""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from equipoise.cli import app

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(
    r"(?P<skip><!--\s*not run:\s*(?P<reason>[^>]*?)\s*-->\s*\n)?"
    r"^(?P<indent>[ \t]*)```(?:python|py)\b[^\n]*\n(?P<code>.*?)^[ \t]*```",
    re.MULTILINE | re.DOTALL,
)


def blocks(text):
    """(line number, code) of the blocks to run; a reason is required to leave one out."""
    found = []
    for match in BLOCK.finditer(text):
        if match["skip"]:
            assert match["reason"], "a block that is not run needs a reason"
            continue
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
        found.append((text.count("\n", 0, match.start("code")) + 1, code))
    return found


def cells(path):
    """(cell number, code) of a notebook, which is stored without outputs."""
    found = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in found)
    return [(number, "".join(cell["source"])) for number, cell in enumerate(found, 1)]


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a page may write files, but not into the repository
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for line, code in cells(page) if page in NOTEBOOKS else blocks(page.read_text(encoding="utf-8")):
        padded = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(padded, str(page.relative_to(ROOT)), "exec"), namespace)


def test_blocks_are_found_and_left_out_only_with_a_reason():
    text = "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\ny = 1\n```\n```console\n$ z\n```\n"
    assert blocks(text) == [(3, "x = 1\n")]
    assert len(NOTEBOOKS) == 4
    with pytest.raises(AssertionError):
        blocks("<!-- not run: -->\n```python\nx = 1\n```\n")


def test_no_page_mentions_a_path_of_some_machine():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(home|root|work|Users|tmp)/", page.read_text(encoding="utf-8")), page


def console_lines():
    """(page, words after `equipoise`) of every command in a console block."""
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.replace("$(command -v equipoise)", "equipoise"), comments=True)
                if "equipoise" in words and "install" not in words:
                    given = words[words.index("equipoise") + 1 :]
                    yield page.name, given[: given.index(">")] if ">" in given else given


def test_every_command_of_the_docs_has_these_options():
    """Parsed by the commands themselves; nothing is run."""
    commands = {}
    for page, (name, *arguments) in console_lines():
        if name not in commands:
            commands[name] = get_command(app.build(wanted=name)).commands.get(name)
        command = commands[name]
        if hasattr(command, "commands"):  # `bench norms`: a command of its own
            name, *arguments = arguments
            command = command.commands[name]
        assert command is not None, (page, name)
        command.make_parser(command.context_class(command)).parse_args(arguments)
    assert len(commands) > 14
