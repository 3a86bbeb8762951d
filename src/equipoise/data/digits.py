"""The bundled digits: 1,797 handwritten digits of 8×8 pixels, so that the demo needs no download.

Optical Recognition of Handwritten Digits, E. Alpaydin & C. Kaynak, UCI Machine Learning Repository (1998),
https://doi.org/10.24432/C50P49, licensed CC BY 4.0. Here: the 1,797 images of its test part (as shipped with
scikit-learn), grey values 0 … 16 as bytes, shuffled once and split 1,437 / 360, stratified by class.
"""

from __future__ import annotations

from importlib import resources

from equipoise.data.archives import load_archive
from equipoise.data.dataset import Dataset

#: the grey value that stands for 1
WHITE = 16.0


def load_digits(name: str = "digits", split: str | None = None, *, num_classes: int | None = None) -> Dataset:
    """The bundled digits, inputs (1, 8, 8) in [0, 1].

    >>> load_digits(split="test")
    Dataset('digits', 360 inputs of 1×8×8, 10 classes)
    """
    with resources.files("equipoise.data").joinpath("digits.npz").open("rb") as file:
        return load_archive(file, split, name=name, num_classes=10 if num_classes is None else num_classes, scale=WHITE)
