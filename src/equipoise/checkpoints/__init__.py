"""Models from and to files, without executing anything a file says; see `docs/files.md` for all that is checked."""

from equipoise.checkpoints.builders import register_model, registered
from equipoise.checkpoints.directory import (
    load_checkpoint,
    load_weights,
    save_checkpoint,
    tensor_bytes,
)
from equipoise.checkpoints.sources import Loaded, load_factory, load_model

__all__ = [
    "Loaded", "load_checkpoint", "load_factory", "load_model", "load_weights", "register_model", "registered", "save_checkpoint",
    "tensor_bytes",
]  # fmt: skip
