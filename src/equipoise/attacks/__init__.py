"""Attacks: certificates seen from the other side. An attack that succeeds inside a certified radius is a bug."""

from equipoise.attacks.auto import autoattack
from equipoise.attacks.pgd import AttackResult, inside_ball, pgd, smooth_pgd

__all__ = ["AttackResult", "autoattack", "inside_ball", "pgd", "smooth_pgd"]
