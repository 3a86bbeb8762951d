"""Hooks of the site: our markup, the API pages made from what the packages export, and the command reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from commands import reference
from markup import SiteMarkup
from mkdocs.structure.files import File, Files
from reference import pages

from equipoise.core.files import read_json
from equipoise_lab.bench import pairs

_RESULTS = Path(__file__).parents[2] / "lab" / "results"
_STORED = _RESULTS / "bench-amd-one-thread.json"


def on_config(config: Any) -> Any:
    """Formulas and doctests, in pages and docstrings."""
    config.markdown_extensions.append(SiteMarkup())
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages that are made, and the figures of the experiments."""
    for path, text in {"commands.md": reference(), **pages()}.items():
        known = files.get_file_from_path(path)
        if known is not None:
            files.remove(known)
        files.append(File.generated(config, path, content=text))
    for figure in sorted((_RESULTS / "experiments").glob("*/figure.svg")):
        path = f"experiments/results/{figure.parent.name}/{figure.name}"
        files.append(File.generated(config, path, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The table of the stored benchmarks, in place of its name; figures of experiments where the site has them."""
    markdown = markdown.replace("../../lab/results/experiments/", "results/")
    mark = "{{ stored benchmarks }}"
    if mark in markdown:
        markdown = markdown.replace(
            mark, pairs.markdown(*pairs.read(read_json(_STORED), "stored run"))
        )
    return markdown
