"""Attack the guarantees on your own machine: random operators against a float64 reference, bounds against gradient ascent.

`SUITES` lists the built-in suites; packages add theirs through the entry point group `equipoise.selfchecks`, each a function
without arguments that returns a tuple of `Check`.
"""

from importlib.metadata import entry_points

from equipoise.core import InputError
from equipoise.lipschitz.attack import attack
from equipoise.testing import networks, norms
from equipoise.testing.runner import REFERENCE_ROUNDING, Check, Report, Tally, run

#: the built-in suites of `equipoise selfcheck NAME`: each check with its name and its share of the time
SUITES: dict[str, tuple[Check, ...]] = {
    "norms": (
        Check("matrices, random", norms.random_matrices),
        Check("convolutions, random", norms.random_convolutions),
    ),
    "layers": (Check("layers, trained to break their constant", networks.random_layers),),
    "networks": (Check("networks, random compositions", networks.random_networks),),
}


def find_suite(name: str) -> tuple[Check, ...]:
    """A built-in suite, or one of an installed package; an error lists the names."""
    if name in SUITES:
        return SUITES[name]
    installed = {entry.name: entry for entry in entry_points(group="equipoise.selfchecks")}
    if name not in installed:
        raise InputError(
            f"there is no suite {name!r}; installed are {', '.join({**SUITES, **installed})}"
        )
    return installed[name].load()()


__all__ = [
    "REFERENCE_ROUNDING",
    "SUITES",
    "Check",
    "Report",
    "Tally",
    "attack",
    "find_suite",
    "run",
]
