"""Running checks for a given time on a given device, reproducibly; how close brackets came to the truth, how often they fail."""

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core import EquipoiseError, InputError, explained, float64

#: the reference is an SVD in float64, which rounds too: a bracket end counts as wrong only beyond this relative distance.
#: LAPACK's error is a modest multiple of n·2⁻⁵³, about 1e-14 for the sizes used here.
REFERENCE_ROUNDING = 1e-12
_MOST_EXAMPLES = 5


@dataclass
class Tally:
    """Counts of one check.

    Attributes:
        name: of the check.
        comparisons: how many brackets or bounds were compared with the truth.
        violations: how many ends were wrong.
        refused: batches in which the library declined to give a bound, which is not a violation.
        closest_upper: the smallest `upper/truth − 1`: the nearer to 0, the harder the test was.
        closest_lower: the largest `lower/truth`: the nearer to 1, the harder.
        seconds: spent.
        examples: the first violations, in words or as programs that show them.
    """

    name: str
    comparisons: int = 0
    violations: int = 0
    refused: int = 0
    closest_upper: float = math.inf
    closest_lower: float = 0.0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    def record(self, lower: Any, upper: Any, truth: Any, what: str) -> None:
        """Compare brackets with the truth.

        Args:
            lower: lower ends, a number or a tensor; None where that end says nothing about this operator.
            upper: upper ends, infinite where they say nothing.
            truth: the norms.
            what: describes the batch and its seed.
        """
        truth = _flat(truth)
        upper = _flat(upper)
        lower = torch.zeros_like(truth) if lower is None else _flat(lower)
        self.comparisons += truth.numel()

        too_low = ~(upper >= truth * (1 - REFERENCE_ROUNDING))  # NaN counts as wrong
        too_high = ~(lower <= truth * (1 + REFERENCE_ROUNDING))
        for side, wrong, ends in (("upper", too_low, upper), ("lower", too_high, lower)):
            for i in wrong.nonzero().flatten().tolist():
                self.violations += 1
                if len(self.examples) < _MOST_EXAMPLES:
                    self.examples.append(
                        f"{what}: {side} {float(ends[i])!r}, truth {float(truth[i])!r} (number {i})"
                    )

        positive = truth > 0
        if positive.any():
            self.closest_upper = min(self.closest_upper, float((upper / truth)[positive].min()) - 1)
            self.closest_lower = max(self.closest_lower, float((lower / truth)[positive].max()))


def _flat(value: Any) -> Tensor:
    return float64(value).cpu().flatten()


@dataclass(frozen=True)
class Batch:
    """What one call of a check gets: its device, its own generator (on the CPU), where to count, and its name."""

    device: torch.device
    generator: torch.Generator
    tally: Tally
    label: str

    def integer(self, low: int, high: int) -> int:
        """A random whole number, both ends included.

        Args:
            low: the least.
            high: the largest.
        """
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choose(self, *options: Any) -> Any:
        """One of the options at random."""
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """A Gaussian tensor on the CPU."""
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def dtype(self) -> torch.dtype:
        """Single or double precision, real or complex."""
        return self.choose(torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Check:
    """One guarantee: `run(batch)` tests some operators and counts them; it is called again until its time is up."""

    name: str
    run: Callable[[Batch], None]


@dataclass(frozen=True)
class Report:
    """Results of a run."""

    tallies: tuple[Tally, ...]
    device: str
    seed: int

    @property
    def comparisons(self) -> int:
        """How many brackets or bounds were compared with the truth."""
        return sum(tally.comparisons for tally in self.tallies)

    @property
    def violations(self) -> int:
        """How many bounds were wrong; must be 0."""
        return sum(tally.violations for tally in self.tallies)


def run(
    checks: tuple[Check, ...],
    seconds: float,
    device: str = "cpu",
    seed: int = 0,
    tick: Callable[[Tally, float], None] = lambda tally, done: None,
) -> Report:
    """Run the checks one after the other for the same time, at least one batch each.

    Batch number b of a check draws from a generator seeded by (seed, name, b), so a violation can be repeated whatever
    the speed of the machine.

    Args:
        checks: what to test.
        seconds: in all.
        device: cpu or cuda (or cuda:1).
        seed: other seeds test other operators.
        tick: called after each batch with the tally and the share of the time that is spent.

    >>> from equipoise.testing import SUITES
    >>> run(SUITES["norms"], seconds=0.1).violations
    0
    """
    if not 0 < seconds < math.inf:
        raise InputError(f"the time must be positive, got {seconds / 60:g} minutes")
    with explained(
        f"device must be cpu or cuda (with float64), and one that PyTorch {torch.__version__} sees here, got {device!r}"
    ):
        place = torch.zeros(1, dtype=torch.float64, device=device).device

    tallies: list[Tally] = []
    for check in checks:
        tally = Tally(check.name)
        tallies.append(tally)
        begin = time.perf_counter()
        number = 0
        while number == 0 or tally.seconds < seconds / len(checks):
            generator = torch.Generator().manual_seed(
                zlib.crc32(f"{seed}/{check.name}/{number}".encode())
            )
            batch = Batch(place, generator, tally, f"{check.name}, seed {seed}, batch {number}")
            try:
                check.run(batch)
            except EquipoiseError:
                tally.refused += 1
            number += 1
            tally.seconds = time.perf_counter() - begin
            tick(tally, min(1.0, sum(t.seconds for t in tallies) / seconds))
    return Report(tuple(tallies), str(place), seed)
