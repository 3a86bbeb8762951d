"""Attacks on the inputs of a run, stored beside its certificates and checked against them."""

from equipoise.runs.attacks.run import AttackSummary, attack_run, known_certificates
from equipoise.runs.attacks.search import Search, Violation

__all__ = ["AttackSummary", "Search", "Violation", "attack_run", "known_certificates"]
