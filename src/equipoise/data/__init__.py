"""Data: labelled inputs from files that are only ever read, never executed, with a fingerprint of their content."""

from equipoise.core import fresh_strides
from equipoise.data.augment import random_crop, random_flip
from equipoise.data.dataset import Dataset, as_dataset
from equipoise.data.load import load_dataset

__all__ = ["Dataset", "as_dataset", "fresh_strides", "load_dataset", "random_crop", "random_flip"]
