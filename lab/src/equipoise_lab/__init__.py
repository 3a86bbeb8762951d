"""Experiments, benchmarks, scoreboard and fuzzers of equipoise; the library never imports this package."""
