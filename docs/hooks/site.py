"""Hooks of the site: our markup, and the API pages made from what the packages export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from markup import SiteMarkup
from mkdocs.structure.files import File, Files
from reference import pages


def on_config(config: Any) -> Any:
    """Formulas and doctests, in pages and docstrings."""
    config.markdown_extensions.append(SiteMarkup())
    return config


def on_files(files: Files, config: Any) -> Files:
    """The API pages."""
    for path, text in pages().items():
        known = files.get_file_from_path(path)
        if known is not None:
            files.remove(known)
        files.append(File.generated(config, path, content=text))
    return files
