"""Older place of the rescaling layers, for one more release: they are in `equipoise.nn`."""

from equipoise.core.imports import moved

_LAYERS = tuple(f"{m}{p}" for m in ("SN", "AOL", "SR") for p in ("Linear", "Conv1d", "Conv2d", "ConvTranspose2d"))
__getattr__ = moved("equipoise.nn.named", "equipoise.nn", (*_LAYERS, "RLBLinear", "RLBConv2d"))
