"""Data: labelled inputs from files that are only ever read, never executed, with a fingerprint of their content."""

from equipoise.core.modules import fresh_strides
from equipoise.data.augment import Augmentation, random_crop, random_flip
from equipoise.data.dataset import Dataset
from equipoise.data.files import data_file
from equipoise.data.load import load_dataset
from equipoise.data.objects import as_dataset

__all__ = [
    "Augmentation", "Dataset", "as_dataset", "data_file", "fresh_strides", "load_dataset", "random_crop",
    "random_flip",
]  # fmt: skip
