"""What our pages and docstrings hold beyond Markdown: doctests as code, formulas as formulas."""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree
from collections.abc import Iterator
from typing import Any

from formulas import formula_blocks, is_formula, mathml, unescaped
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

_FENCE = re.compile(r"^\s*(```|~~~)")


class Doctests(Preprocessor):
    """`>>>` lines and their answers become a block of code, and indented formulas are displayed."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines with fences around examples; what is fenced already stays."""
        found: list[str] = []
        for fenced, part in _parts(lines):
            found += part if fenced else list(formula_blocks(list(_examples(part))))
        return found


def _parts(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Runs of lines inside and outside of fences."""
    held: list[str] = []
    mark = ""
    for line in lines:
        fence = _FENCE.match(line)
        if not mark and fence:
            yield False, held
            held, mark = [line], fence[1]
        elif mark and fence and fence[1] == mark:
            yield True, [*held, line]
            held, mark = [], ""
        else:
            held.append(line)
    yield bool(mark), held


def _examples(lines: list[str]) -> Iterator[str]:
    inside = ""
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        starts = line.lstrip().startswith(">>> ") or line.strip() == ">>>"
        if starts and not inside:
            inside = indent or "\0"
            yield ""
            yield f"{indent}```pycon"
        if inside and not line.strip():
            yield f"{inside.strip(chr(0))}```"
            inside = ""
        yield line
    if inside:
        yield f"{inside.strip(chr(0))}```"


class Typeset(Treeprocessor):
    """Code spans that are formulas become MathML."""

    def run(self, root: etree.Element) -> None:
        """In place."""
        for parent in root.iter():
            if parent.tag == "pre":
                continue
            for place, child in enumerate(list(parent)):
                text = unescaped(child.text or "") if child.tag == "code" and not len(child) else ""
                if text and is_formula(text):
                    made = mathml(text)
                    made.tail = child.tail
                    parent[place] = made


class SiteMarkup(Extension):
    """Both of them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Before fences are read, and after spans are."""
        md.preprocessors.register(Doctests(md), "house-doctests", 40)
        md.treeprocessors.register(Typeset(md), "house-formulas", 5)


def makeExtension(**options: Any) -> SiteMarkup:
    """What `markdown_extensions: - markup` loads."""
    return SiteMarkup(**options)
