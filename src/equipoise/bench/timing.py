"""Timing, as the benchmarks import it."""

from equipoise.core.timing import Contest, peak_bytes, seconds, take_turns

__all__ = ["Contest", "peak_bytes", "seconds", "take_turns"]
