"""What `DATA` means on the command line: one function from a name to a dataset."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from equipoise.core.errors import InputError, did_you_mean, one_line
from equipoise.core.imports import SPEC
from equipoise.data.dataset import Dataset
from equipoise.data.files import find_tables, load_archive, load_folder, load_tables
from equipoise.data.objects import load_object
from equipoise.data.sources import MAX_BYTES, Layout, Options

#: the grey value that stands for 1
WHITE = 16.0


def load_digits(name: str = "digits", split: str | None = None, options: Options = Options()) -> Dataset:  # noqa: B008
    """The bundled 1,797 handwritten digits, inputs (1, 8, 8) in [0, 1], so that the demo needs no download.

    Optical Recognition of Handwritten Digits, E. Alpaydin & C. Kaynak, UCI Machine Learning Repository (1998),
    https://doi.org/10.24432/C50P49, licensed CC BY 4.0. Here: the images of its test part (as shipped with scikit-learn),
    grey values 0 … 16 as bytes, shuffled once and split 1,437 / 360, stratified by class.

    >>> load_digits(split="test")
    Dataset('digits', 360 inputs of 1×8×8, 10 classes)
    """
    with resources.files("equipoise.data").joinpath("digits.npz").open("rb") as file:
        options = replace(options, num_classes=10 if options.num_classes is None else options.num_classes)
        return load_archive(file, split, options, name=name, scale=WHITE)


_EXPECTED = "digits, a .npz, .parquet or .arrow file, a folder of data, or package.module:factory"


class Kind(NamedTuple):
    """A kind of data: what it is called, who reads it, and which options mean something for it."""

    name: str
    load: Callable[..., Dataset]
    options: tuple[str, ...]


ARCHIVE = Kind("a .npz archive", load_archive, ("layout",))
TABLES = Kind("a Parquet or Arrow table", load_tables, ("layout", "size", "columns"))
PICTURES = Kind("a folder of pictures", load_folder, ("size",))
DIGITS = Kind("digits", load_digits, ())
FACTORY = Kind("a factory", load_object, ("layout", "columns"))


def load_dataset(
    spec: str | Path,
    split: str | None = None,
    *,
    num_classes: int | None = None,
    layout: Layout = "auto",
    size: int | tuple[int, int] | None = None,
    columns: tuple[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
    labelled: bool = True,
) -> Dataset:
    """The dataset that `spec` names; nothing in a file is executed, every failure is an `InputError` of one sentence.

    Args:
        spec: `digits`; a .npz, .parquet or .arrow file; a folder (of tables, also from Hugging Face's `save_to_disk`, or of
            pictures in class folders); or `package.module:factory`. `spec#split` names the split too.
        split: e.g. "train"; by default "test" where there is one, otherwise the only one.
        num_classes: checked against the labels; by default what the source says, else the largest label + 1.
        layout: of arrays with three axes per input, "NHWC" or "NCHW"; by default bytes are NHWC and floats NCHW.
        size: (height, width) to which pictures are resized and cropped; by default they must agree.
        columns: names of the columns of inputs and labels, for Parquet, Arrow and datasets whose rows are dictionaries; an
            empty second name: there are no labels (Parquet, Arrow).
        max_bytes: an array (or Parquet file) declared larger is refused.
        labelled: refuse data without labels.

    >>> load_dataset("digits#train")
    Dataset('digits', 1437 inputs of 1×8×8, 10 classes)
    """
    options = Options(num_classes, layout, size, columns, max_bytes)
    try:
        spec, split = _split_of(str(spec), split)
        kind, source = _kind_of(spec)
        for option in ("layout", "size", "columns"):
            if option not in kind.options and getattr(options, option) not in (None, "auto"):
                raise InputError(f"{spec} is {kind.name}, for which {option}= means nothing: leave it out")
        found = kind.load(source, split, options)
    except OSError as error:
        raise InputError(f"cannot read {str(spec)[:200]}: {error.strerror or one_line(error)}") from error
    if labelled and not found.labelled:
        raise InputError(f"{str(spec)[:200]} has no labels, which are needed here")
    return found


def _kind_of(spec: str) -> tuple[Kind, str | Path]:
    path = Path(spec)
    if spec == "digits":
        return DIGITS, spec
    if spec and path.is_dir():
        return TABLES if find_tables(path) else PICTURES, path
    if spec and path.is_file():
        kinds = {".npz": ARCHIVE, ".parquet": TABLES, ".arrow": TABLES}
        if path.suffix not in kinds:
            raise InputError(f"{path.name} is a file of no known kind; expected {_EXPECTED}")
        return kinds[path.suffix], path
    if SPEC.match(spec):
        return FACTORY, spec
    raise InputError(f"there is no {spec[:200]!r}{did_you_mean(spec[:200], ['digits'])}; expected {_EXPECTED}")


def _split_of(spec: str, split: str | None) -> tuple[str, str | None]:
    """`path#split` is the path and its split, unless a file of that very name exists."""
    stem, mark, named = spec.rpartition("#")
    if not mark or not re.fullmatch(r"\w+", named) or Path(spec).exists():
        return spec, split
    if split is not None and split != named:
        raise InputError(f"{spec!r} names the split {named!r}, but {split!r} was asked for too")
    return stem, named
