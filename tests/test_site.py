"""The site's own markup: every public name on an API page, doctests as code, formulas as MathML, none lost."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import equipoise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

markdown = pytest.importorskip("markdown")

import commands  # noqa: E402
import formulas  # noqa: E402
import markup  # noqa: E402
import reference  # noqa: E402


def test_every_public_name_is_on_a_page():
    """Of every package of the library; an object with several names is shown under the first."""
    listed = {p for page in reference.PAGES.values() for p in page.packages}
    packages = {f"equipoise.{m.name}" for m in pkgutil.iter_modules(equipoise.__path__) if m.ispkg}
    assert packages - listed == {"equipoise.checker", "equipoise.cli"}
    pages = reference.pages()
    shown = set(re.findall(r"\[`(\w+)`\]\(api/", pages["api.md"]))
    objects = {id(value_of(p, n)) for p, n in reference.names() if n in shown}
    assert not [f"{p}.{n}" for p, n in reference.names() if id(value_of(p, n)) not in objects]
    assert sum(text.count("\n::: ") + text.count("\n### ") for text in pages.values()) >= len(shown) > 250
    for file in reference.PAGES:
        assert f"api/{file}.md" in (ROOT / "mkdocs.yml").read_text()


def value_of(package, name):
    return getattr(importlib.import_module(package), name)


def test_every_command_is_in_the_reference():
    page = commands.reference()
    for name in ("audit", "certify", "prove", "train"):
        assert f"## {name}\n\n```text\nUsage: equipoise {name}" in page
    assert "--fail-above" in page


def rendered(text):
    return markdown.markdown(text, extensions=[markup.SiteMarkup(), "fenced_code", "tables"])


PAGES = {
    "a doctest": (
        "One sentence.\n\n>>> 1 + 1\n2\n\nMore.",
        '<code class="language-pycon">&gt;&gt;&gt; 1 + 1\n2\n</code>',
    ),
    "a formula": ("so `σ₁ ≤ 2` holds", "<mo>≤</mo><mn>2</mn></mrow></math> holds"),
    "a root": ("so `√(a² + b²)`", "<msqrt><mrow><msup><mi>a</mi><mn>2</mn></msup><mo>+</mo>"),
    "powers": ("`s_t^(2^-t) ≤ 1`", "<msubsup><mi>s</mi><mi>t</mi><mrow><msup><mn>2</mn><mrow><mo>-</mo>"),
    "code": ("call `f(x, y)`", "<code>f(x, y)</code>"),
    "a displayed formula": ("Thus\n\n    ‖Wx‖₂ ≤ σ₁·‖x‖₂\n\nas said.", '<div class="formula"><math'),
    "an indented program": ("Thus\n\n    x = f(1)\n\nas said.", "<pre><code>x = f(1)"),
    "a table": ("| a | b |\n|---|---|\n| `R ≥ ε` | x |", "<td><math"),
    "hostile": ("`<script>alert(1)</script> ≤ σ`", "&lt;script&gt;"),
}


@pytest.mark.parametrize("case", PAGES)
def test_markup(case):
    text, wanted = PAGES[case]
    found = rendered(text)
    assert wanted in found
    assert "<script>" not in found


def test_no_letter_of_a_formula_is_lost():
    for page in [*(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
            if formulas.is_formula(span):
                letters = sorted(re.findall(r"[A-Za-zΑ-ω]", span))
                assert sorted(re.findall(r"[A-Za-zΑ-ω]", "".join(formulas.mathml(span).itertext()))) >= letters or any(
                    c in span for c in "ᵀᵢⱼₖₙᵗᵏⁿ"
                ), span
