"""Every Python block of the pages runs, in order, in one namespace per page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "lipschitz").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict = {"__name__": f"docs_{page.stem}"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.S | re.M):
        line = text[: match.start()].count("\n") + 2
        exec(compile("\n" * (line - 1) + match[1], str(page), "exec"), namespace)
