"""Formulas as they stand in docstrings and pages, `‖Wx‖₂ ≤ σ₁·‖x‖₂` in a code span, set as MathML: no script, no font.

What is a formula is read off its letters: it holds a mathematical sign and nothing that only code has. In doubt it stays code.
"""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as etree
from collections.abc import Iterator

#: a formula holds at least one of these …
SIGNS = set(
    "≤≥≠≈∞∈∉⊂∪∩∑Σ∏∫√‖⁻¹²³⁴⁵⁶⁷⁸⁹⁰ᵀ₀₁₂₃₄₅₆₇₈₉·×⊗∘→∂∇ΦφΨψΔδσετλμρωαβγθηκπξνζΩΛΓℓ⌊⌋⌈⌉±ᵢⱼₖₙ∀∃ᵗᵏⁿ⟨⟩"
)
#: … and nothing of this: strings, options, calls of named functions, attributes, keyword arguments, placeholders
CODE = re.compile(
    r"""["#\\@$%]|(?<![\w)'*])'|--|[A-Za-z]{2,}_[A-Za-z]{2,}|[A-Za-z_]\w*\.[A-Za-z_]|::|\w=\w|==|:=|\.\.\.|<\w+>|[A-Z]{3,}_|^\W*$|\]\["""
)
UP = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ᵀᵗᵏⁿ", "0123456789−+Ttkn", strict=True))
DOWN = dict(zip("₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₙ₋₊", "0123456789ijkn−+", strict=True))
_TOKEN = re.compile(
    r"(?P<number>\d+(?:[.,]\d+)*)|(?P<up>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ᵀᵗᵏⁿ]+)|(?P<down>[₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₙ₋₊]+)|(?P<prime>'+)"
    r"|(?P<word>(?![A-Z]{2}(?![A-Za-z(]))[A-Za-z]{2,}|[^\W\d_][\u0300-\u036f]*)"
    r"|(?P<space>\s+)|(?P<mark>[_^√])|(?P<open>[(\[{⟨⌊⌈])|(?P<close>[)\]}⟩⌋⌉])|(?P<other>.)"
)
_CLOSE = {"(": ")", "[": "]", "{": "}", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉"}


def is_formula(text: str) -> bool:
    """Whether a code span is a formula.

    >>> is_formula("‖x' − x‖₂ < R"), is_formula("eq.spectral_norm(W)"), is_formula("'ε'"), is_formula("σ")
    (True, False, False, True)
    """
    return bool(SIGNS & set(text)) and not CODE.search(text) and "\n" not in text


def mathml(text: str, display: bool = False) -> etree.Element:
    """The formula as a `<math>` element, with the plain text as its alternative.

    >>> etree.tostring(mathml("σ₁²"), encoding="unicode")
    '<math alttext="σ₁²"><mrow><msubsup><mi>σ</mi><mn>1</mn><mn>2</mn></msubsup></mrow></math>'
    """
    root = etree.Element("math", {"alttext": text, **({"display": "block"} if display else {})})
    row = etree.SubElement(root, "mrow")
    row.extend(_Parser(text).row())
    return root


class _Parser:
    """Tokens to MathML: scripts bind to the piece before them, brackets group."""

    def __init__(self, text: str) -> None:
        self.tokens = [(m.lastgroup or "other", m.group()) for m in _TOKEN.finditer(text)]
        self.place = 0

    def peek(self) -> tuple[str, str] | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self) -> tuple[str, str]:
        self.place += 1
        return self.tokens[self.place - 1]

    def row(self, end: str | None = None) -> list[etree.Element]:
        found: list[etree.Element] = []
        while (token := self.peek()) is not None:
            kind, value = token
            if kind == "close" and value == end:
                break
            if kind == "space":
                self.take()
                continue
            found.append(self.scripted())
        return found

    def scripted(self) -> etree.Element:
        base, down, up = self.piece(), None, None
        while (token := self.peek()) is not None:
            kind, value = token
            if kind == "down" and down is None:
                self.take()
                down = _script(value, DOWN)
            elif kind == "up" and up is None:
                self.take()
                up = _script(value, UP)
            elif kind == "prime" and up is None:
                self.take()
                up = _leaf("mo", "′" * len(value))
            elif value in "_^" and kind == "mark" and (down if value == "_" else up) is None:
                self.take()
                piece = self.argument()
                down, up = (piece, up) if value == "_" else (down, piece)
            else:
                break
        if down is None and up is None:
            return base
        name = (
            "msubsup"
            if down is not None and up is not None
            else "msub"
            if down is not None
            else "msup"
        )
        result = etree.Element(name)
        result.extend([base, *(p for p in (down, up) if p is not None)])
        return result

    def argument(self) -> etree.Element:
        """What a mark applies to: a group without its brackets, or one piece with its sign."""
        token = self.peek()
        if token is not None and token[0] == "open" and token[1] in "({":
            self.take()
            inner = etree.Element("mrow")
            inner.extend(self.row(_CLOSE[token[1]]))
            if self.peek() is not None:
                self.take()
            return inner
        if token is not None and token[1] in "−-+":
            inner = etree.Element("mrow")
            inner.extend([self.piece(), self.piece()])
            return inner
        return self.piece()

    def piece(self) -> etree.Element:
        token = self.peek()
        if token is None:
            return _leaf("mo", "")
        kind, value = self.take()
        if kind == "mark" and value == "√":
            root = etree.Element("msqrt")
            root.append(self.argument())
            return root
        if kind == "open":
            group = etree.Element("mrow")
            group.append(_leaf("mo", value, stretchy="false"))
            group.extend(self.row(_CLOSE[value]))
            if self.peek() is not None:
                group.append(_leaf("mo", self.take()[1], stretchy="false"))
            return group
        if kind == "number":
            return _leaf("mn", value)
        if kind == "word":
            return self.word(value)
        if kind in ("up", "down"):
            return _script(value, UP if kind == "up" else DOWN)
        return _leaf("mo", value, **({"stretchy": "false"} if value in "|‖" else {}))

    def word(self, value: str) -> etree.Element:
        """A letter is a variable, a name before a bracket a function; other words are text, with their spaces."""
        if len(value) == 1:
            return _leaf("mi", value)
        after = self.peek()
        if after is not None and (after[0] in ("open", "mark", "down", "up")):
            return _leaf("mi", value)
        return _leaf("mtext", f"\u00a0{value}\u00a0" if len(value) > 1 else value)


def _leaf(name: str, text: str, **attributes: str) -> etree.Element:
    element = etree.Element(name, attributes)
    element.text = text
    return element


def _script(value: str, table: dict[str, str]) -> etree.Element:
    text = "".join(table[c] for c in value)
    return _leaf("mn" if text.isdigit() else "mi" if text.isalpha() else "mtext", text)


def formula_blocks(lines: list[str]) -> Iterator[str]:
    """Indented blocks between empty lines whose every line is a formula become displayed formulas; other lines stay."""
    i = 0
    while i < len(lines):
        j = i
        while j < len(lines) and lines[j].startswith("    ") and lines[j].strip():
            j += 1
        alone = (
            j > i
            and (i == 0 or not lines[i - 1].strip())
            and (j == len(lines) or not lines[j].strip())
        )
        if alone and all(is_formula(line.strip()) for line in lines[i:j]):
            shown = "".join(
                etree.tostring(mathml(line.strip(), True), encoding="unicode")
                for line in lines[i:j]
            )
            yield f'<div class="formula">{shown}</div>'
            i = j
            continue
        yield lines[i]
        i += 1


def unescaped(text: str) -> str:
    """The text of a code span as it was written."""
    return html.unescape(text)
