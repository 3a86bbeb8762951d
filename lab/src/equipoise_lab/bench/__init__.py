"""Benchmarks: ratios against the alternatives, side by side in one run."""
