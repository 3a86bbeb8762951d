"""The API pages, made from what the packages export: every public name is there, with its docstring and its example."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple


class Page(NamedTuple):
    """One page: its title and the packages whose names it lists."""

    title: str
    packages: tuple[str, ...]


#: file → page; a name that several packages export is shown where it comes first
PAGES = {
    "norms": Page(
        "Norms, bounds and errors",
        ("equipoise.core", "equipoise.norms", "equipoise.functional"),
    ),
    "lipschitz": Page("Lipschitz bounds", ("equipoise.lipschitz", "equipoise.onnx")),
    "nn": Page("1-Lipschitz layers", ("equipoise.nn", "equipoise.nn.models", "equipoise.models")),
    "smoothing": Page("Randomized smoothing", ("equipoise.smoothing",)),
    "runs": Page(
        "Runs and reports",
        (
            "equipoise.runs", "equipoise.report",
        ),
    ),
    "data": Page("Data and models in files", ("equipoise.data", "equipoise.checkpoints", "equipoise.certificates")),
    "training": Page("Training", ("equipoise.train", "equipoise.optim", "equipoise.regularizers")),
    "curvature": Page("Curvature and attacks", ("equipoise.curvature", "equipoise.attacks")),
    "maps": Page("Linear maps", ("equipoise.maps",)),
    "lab": Page("Experiments and self-checks", ("equipoise_lab.experiments", "equipoise.testing")),
    "equipoise": Page("The rest of eq.*", ("equipoise",)),
}  # fmt: skip

_INTRO = """# {title}

Every public name of {packages}. Formulas are those of the docstrings; examples are run in the tests.

"""


def public(package: str) -> list[str]:
    """The names a package exports: its `__all__`, else what its module defines."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            n
            for n, v in vars(module).items()
            if n[0] != "_" and getattr(v, "__module__", None) == package
        ]
    return sorted(listed, key=str.lower)


def pages() -> dict[str, str]:
    """File → Markdown of every page, and `api.md`, which lists all names."""
    seen: dict[int, str] = {}
    made, index = {}, ["# API\n\nEvery public name, by package. `import equipoise as eq`.\n"]
    for file, page in PAGES.items():
        blocks, names = [], []
        for package in page.packages:
            module = importlib.import_module(package)
            for name in public(package):
                value = getattr(module, name)
                if inspect.ismodule(value) or id(value) in seen:
                    continue
                seen[id(value)] = f"{package}.{name}"
                anchor, text = entry(package, name, value)
                blocks.append(text)
                names.append(f"[`{name}`](api/{file}.md#{anchor})")
        packages = ", ".join(f"`{p}`" for p in page.packages)
        made[f"api/{file}.md"] = _INTRO.format(title=page.title, packages=packages) + "\n".join(
            blocks
        )
        index.append(f"## {page.title}\n\n{packages}\n\n{', '.join(names)}\n")
    return {"api.md": "\n".join(index), **made}


def entry(package: str, name: str, value: Any) -> tuple[str, str]:
    """(anchor, Markdown) of one name: by mkdocstrings where the source shows it, by hand where it is made or plain data."""
    path = source_path(value)
    if path is not None:
        return path, f"::: {path}\n"
    anchor = f"{package}.{name}"
    lines = [f"### {name} {{ #{anchor} }}", ""]
    if inspect.isclass(value) or inspect.isroutine(value):
        lines += [
            "```python",
            f"{name}{_signature(value)}",
            "```",
            "",
            *(inspect.getdoc(value) or "").splitlines(),
            "",
        ]
    else:
        shown = (
            ", ".join(map(str, value))
            if isinstance(value, dict | tuple | list | set | frozenset)
            else repr(value)
        )
        lines += [f"Of type `{type(value).__name__}`: {_plain(shown)}", ""]
    return anchor, "\n".join(lines)


def source_path(value: Any) -> str | None:
    """Where a class or function is defined, if its source says so under that name."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if (
        not (inspect.isclass(value) or inspect.isfunction(value))
        or not module
        or "." in str(qualified)
    ):
        return None
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError, ImportError):
        return None
    defined = any(f"\n{word} {qualified}" in source for word in ("def", "class", "async def"))
    return f"{module}.{qualified}" if defined else None


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(…)"


def _plain(text: str) -> str:
    short = text if len(text) < 600 else text[:600] + " …"
    return "`" + short.replace("`", "") + "`"


def names() -> Iterator[tuple[str, str]]:
    """(package, name) of everything that must be found on the pages."""
    for page in PAGES.values():
        for package in page.packages:
            module = importlib.import_module(package)
            yield from (
                (package, n) for n in public(package) if not inspect.ismodule(getattr(module, n))
            )
