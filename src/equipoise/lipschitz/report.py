"""What a network's bound says, layer by layer; and constants by pairs of classes where it ends in a linear layer."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import format_down, format_up, inflate, row_lengths
from equipoise.core.files import plain_json
from equipoise.lipschitz.logs import exp_up, log_product, log_up, show_log
from equipoise.lipschitz.propagate import Propagation
from equipoise.maps.linear import Matrix

_NORMS = {"l2": "ℓ2", "token": "max over tokens of ℓ2"}
#: kinds of rows that hold nothing to shrink
_ADDITIONS = ("sum", "difference")


@dataclass(frozen=True)
class Row:
    """One operation: where, what, its bracket, and how much it weighs in the total.

    `weight` is ∂ log L/∂ log c of the product bound, so `weight·log c` is what this row adds to log L.
    """

    name: str
    node: str
    kind: str
    shape: str
    lower: float
    upper: float
    method: str
    weight: float
    share: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Upper bounds of the Lipschitz constant of a network, with the layers they are made of.

    `upper` is the smallest proved total, `product` the layer-by-layer one; both are infinite where they exceed the floats,
    `log_upper` and `log_product` never are. `ball` is the radius of the input ball they hold on (None: everywhere). `pairs`
    bounds the constants of `f_i − f_j` (classes, classes), where the network ends in a linear layer: what certificates of
    classes need (`smoothing.margin_radius`).
    """

    log_upper: float
    log_product: float
    log_fused: float
    layers: tuple[Row, ...]
    method: str
    ball: float | None = None
    notes: tuple[str, ...] = ()
    log_chain: float | None = None
    pairs: Tensor | None = field(default=None, repr=False, compare=False)
    norm: str = "l2"

    @property
    def upper(self) -> float:
        """The best proved upper bound."""
        return exp_up(self.log_upper)

    @property
    def product(self) -> float:
        """The product bound, layer by layer."""
        return exp_up(self.log_product)

    @property
    def fused(self) -> float:
        """The bound with linear runs composed before their norm is taken."""
        return exp_up(self.log_fused)

    def fix_first(self, count: int = 3) -> tuple[Row, ...]:
        """The layers that add most to the bound: shrinking one by 1 % shrinks the bound by `weight` %.

        Sums of branches are left out: what can be shrunk are the layers in them. Empty where no layer stretches, so loop over
        it rather than taking its first entry.
        """
        heavy = [r for r in self.layers if r.upper > 1 and r.share > 0 and r.kind not in _ADDITIONS]
        return tuple(sorted(heavy, key=lambda r: -r.share)[:count])

    @property
    def _has_shares(self) -> bool:
        """Shares are parts of log L, which says nothing of the sort where L ≤ 1."""
        return self.log_upper > 0

    def __float__(self) -> float:
        return self.upper

    def __str__(self) -> str:
        head = ("layer", "kind", "shape", "norm in", "constant", "share", "method")
        body = [_cells(row, self._has_shares) for row in self.layers]
        widths = [max(len(r[i]) for r in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
            for r in [head, *body]
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *self.summary()])

    def summary(self) -> list[str]:
        """The totals, the domain, what to fix first and the notes, a line each."""
        domain = (
            "everywhere"
            if self.ball is None
            else f"for inputs of norm at most {format_down(self.ball)}"
        )
        lines = [
            f"Lipschitz constant ({_NORMS[self.norm]}, {domain}) at most {show_log(self.log_upper)}   ({self.method})",
            f"product, layer by layer: {show_log(self.log_product)}; fused: {show_log(self.log_fused)}"
            + ("" if self.log_chain is None else f"; chain: {show_log(self.log_chain)}"),
        ]
        parts = [
            f"{r.name} ({r.kind}{f', {r.share:.0%} of the log-bound' if self._has_shares else ''})"
            for r in self.fix_first()
        ]
        if parts:
            lines.append("fix first: " + ", ".join(parts))
        return lines + [f"note: {note}" for note in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers beyond the floats appear as null next to their logarithm."""
        names = (
            "upper", "log_upper", "product", "log_product", "fused", "log_fused", "log_chain", "method", "norm", "ball",
            "notes",
        )  # fmt: skip
        unknown = {} if self._has_shares else {"share": None}
        document = {name: getattr(self, name) for name in names} | {
            "kind": "upper",
            "fix_first": [row.name for row in self.fix_first()],
            "layers": [asdict(row) | unknown for row in self.layers],
        }
        return plain_json(document)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)


def _cells(row: Row, shares: bool) -> tuple[str, ...]:
    bracketed = not math.isnan(row.lower)
    inside = f"[{format_down(row.lower, 5)}, {format_up(row.upper, 5)}]" if bracketed else ""
    share = f"{row.share:.1%}".replace("-0.0%", "0.0%") if shares else "–"
    return (
        row.name,
        row.kind,
        row.shape,
        inside,
        format_up(row.upper, 5),
        share,
        row.method or row.note,
    )


def pair_constants(run: Propagation, logs: Mapping[fx.Node, float] | None = None) -> Tensor | None:
    """`L'·‖w_i − w_j‖`, rounded up, float64 (classes, classes): upper bounds of the constants of `f_i − f_j`.

    w are the rows of the linear run at the end of the network, in which neighbouring linear maps are composed, and L' is
    the proved bound of what comes before it. None where the network has several outputs or ends in another operation.

    Args:
        run: of the network.
        logs: logarithms of bounds of its nodes on a ball; by default those of the run.

    Reference: Tsuzuku, Sato, Sugiyama (2018), section 4.1.
    """
    last = last_matrix(run)
    if last is None:
        return None
    weight, base, error = last
    log = run.facts[base].fused if logs is None else logs[base]
    trunk = exp_up(log_product(log, log_up(1.0)))
    apart = torch.stack([row_lengths(weight - row) for row in weight])
    rounding = 2.0**-52 * row_lengths(weight).max()
    return inflate((apart + rounding + 2 * error) * trunk)


def last_matrix(run: Propagation) -> tuple[Tensor, fx.Node, float] | None:
    """The linear run at the end of a network with one output (1, classes): its matrix, where it begins, and its error."""
    if len(run.program.outputs) != 1:
        return None
    output = run.program.outputs[0]
    facts, shape = run.facts[output], output.meta["val"].shape
    if not isinstance(facts.form, Matrix) or facts.base is None or len(shape) != 2:
        return None
    if len(facts.form.matrix) != shape[1]:  # a batch of several samples in one matrix
        return None
    return facts.form.matrix.detach().double(), facts.base, facts.form.error
