"""The table of checks: one row adds a guarantee to `equipoise selfcheck`."""

from __future__ import annotations

from equipoise.lab.selfcheck import convolutions, files, matrices, networks, trained
from equipoise.lab.selfcheck.runner import Check

#: name, share of the time, one batch of operators
CHECKS: tuple[Check, ...] = (
    Check("matrices, random", 0.35, matrices.random_batch),
    Check("matrices, one by one", 0.10, matrices.single),
    Check("matrices, trained", 0.10, trained.matrices_batch),
    Check("convolutions, random", 0.25, convolutions.random_layers),
    Check("convolutions, any size", 0.05, convolutions.any_size),
    Check("convolutions, trained", 0.10, trained.kernels),
    Check("convolutions, other bounds", 0.05, convolutions.other_bounds),
)

#: what `equipoise selfcheck NAME` runs
SUITES: dict[str, tuple[Check, ...]] = {
    "norms": CHECKS,
    "networks": (Check("networks, random programs", 1.0, networks.random_networks),),
    "files": (Check("files, damaged and hostile", 1.0, files.damaged_files),),
}
