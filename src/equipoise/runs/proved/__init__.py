"""Deterministic runs: a proved radius, its limiting rival and its method per input, with attacks beside."""

from equipoise.runs.proved.certify import ProvedJob, certify_proved, describe_proved, start_proved
from equipoise.runs.proved.run import Asked, ProvedManifest, ProvedRow, ProvedRun, is_proved, open_proved

__all__ = [
    "Asked", "ProvedJob", "ProvedManifest", "ProvedRow", "ProvedRun", "certify_proved", "describe_proved",
    "is_proved", "open_proved", "start_proved",
]  # fmt: skip
