"""Guarantees tested on the user's own hardware: random and trained operators and whole networks, attacked in float64.

`SUITES` is the table of what is tested; a later floor adds its guarantees as a row.
"""

from equipoise.lab.selfcheck import convolutions, files, matrices, networks
from equipoise.lab.selfcheck.runner import REFERENCE_ROUNDING, Check, Report, Tally, run

#: name, share of the time, one batch of operators
CHECKS: tuple[Check, ...] = (
    Check("matrices, random", 0.35, matrices.random_batch),
    Check("matrices, one by one", 0.10, matrices.single),
    Check("matrices, trained", 0.10, matrices.trained_matrices),
    Check("convolutions, random", 0.25, convolutions.random_layers),
    Check("convolutions, any size", 0.05, convolutions.any_size),
    Check("convolutions, trained", 0.10, matrices.trained_kernels),
    Check("convolutions, other bounds", 0.05, convolutions.other_bounds),
)

#: what `equipoise selfcheck NAME` runs
SUITES: dict[str, tuple[Check, ...]] = {
    "norms": CHECKS,
    "networks": (Check("networks, random programs", 1.0, networks.random_networks),),
    "files": (Check("files, damaged and hostile", 1.0, files.damaged_files),),
}


__all__ = ["CHECKS", "REFERENCE_ROUNDING", "SUITES", "Check", "Report", "Tally", "run"]
