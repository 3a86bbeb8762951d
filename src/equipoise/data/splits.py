"""Which part of a dataset is meant."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.core import InputError


def choose_split(split: str | None, available: Sequence[str], name: str) -> str:
    """The split asked for; without one, `test` if there is one, else the only one.

    >>> choose_split(None, ["train", "test"], "digits")
    'test'
    """
    if split is None:
        if "test" in available:
            return "test"
        if len(available) == 1:
            return available[0]
        raise InputError(f"{name} has the splits {', '.join(available)}: say which one")
    if split not in available and list(available) == ["all"]:
        raise InputError(f"{name} is not divided into splits, so there is no {split!r}: leave the split out")
    if split not in available:
        raise InputError(f"{name} has no split {split!r}; it has {', '.join(available)}")
    return split
