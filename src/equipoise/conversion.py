"""Whole networks: `make_lipschitz` turns an existing one into one of a chosen constant, `export` into plain modules."""

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import (
    InputError,
    Refused,
    deflate,
    evaluating,
    format_down,
    format_up,
    require_positive,
    single_down,
)
from equipoise.lipschitz import lipschitz_bound
from equipoise.lipschitz.capture import as_examples
from equipoise.lipschitz.report import Report
from equipoise.nn.convert import (
    Certificate,
    Change,
    convert,
    evaluate_at,
    plain,
    with_effective_weights,
)
from equipoise.nn.wrappers import known_constant


@dataclass(frozen=True)
class Conversion:
    """What became of every module of a converted network, and the bound of the whole (None: by construction only)."""

    rows: tuple[Change, ...]
    constant: float
    report: Report | None

    @property
    def left(self) -> tuple[Change, ...]:
        """The modules that could not be converted."""
        return tuple(row for row in self.rows if row.action == "left")

    def __str__(self) -> str:
        head = ("module", "was", "now", "action", "note")
        lines = [
            f"{name:20}  {was:16}  {now:16}  {action:10} {note}".rstrip()
            for name, was, now, action, note in [head, *(astuple(row) for row in self.rows)]
        ]
        measured = (
            "by construction"
            if self.report is None
            else f"proved: at most {format_up(self.report.upper)}"
        )
        return "\n".join(
            [*lines, "", f"Lipschitz constant {format_up(self.constant)} ({measured})"]
        )


class Rescaled(nn.Module):
    """`factor·f` with the factor chosen so that the proved bound of the whole is `constant`.

    The factor belongs to the weights f had when `rescale` was called. The layers of f stay 1-Lipschitz under
    training, but a bound below 1 can grow towards 1, and so can that of plain layers that were left: call `rescale`
    again after training. `conversion` says what became of every module (None: the
    network was built to load a checkpoint into).
    """

    factor: Tensor
    conversion: Conversion | None

    def __init__(self, module: nn.Module, constant: float) -> None:
        super().__init__()
        self.module, self.constant = module, float(constant)
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))
        self.conversion = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """The scaled output."""
        out = self.module(*inputs)
        if not isinstance(out, Tensor):
            raise InputError(
                f"a network to be scaled must return one tensor, got {type(out).__name__}"
            )
        return out * self.factor

    def rescale(self, example_input: Any) -> Report:
        """Measure f's bound on inputs of this shape, set the factor, and return the report of the whole: `upper ≤ constant`.

        Args:
            example_input: a batch of inputs (only the shape matters).
        """
        with evaluating(self):
            self.factor.fill_(1.0)
            # the same map with its effective weights as constants
            stored: Any = with_effective_weights(self, *_one_sample(example_input))
            # once more with the factor, since the last layer's norm is measured with it
            for _ in range(6):
                report = lipschitz_bound(stored, example_input)
                if not report.upper > 0 or not math.isfinite(report.upper):
                    raise Refused(
                        f"the network's bound is {format_up(report.upper)}: no factor makes it {format_up(self.constant)}"
                    )
                if (1 - 1e-4) * self.constant <= report.upper <= self.constant:
                    break
                stored.factor.mul_(self.constant / report.upper * (1 - 1e-6))
            self.factor.copy_(stored.factor)
            if report.upper > self.constant:
                raise Refused(
                    f"the bound stays above {format_down(self.constant)}: {report.upper!r}; ask for a larger constant"
                )
        return report

    def extra_repr(self) -> str:
        """The constant and the factor."""
        return f"constant={self.constant:g}, factor={float(self.factor):.6g}"


def _one_sample(example_input: Any) -> tuple[Tensor, ...]:
    return tuple(x[:1] if x.dim() > 1 else x for x in as_examples(example_input))


def make_lipschitz(
    model: nn.Module,
    constant: float = 1.0,
    method: str = "sr",
    *,
    example_input: Any = None,
    **options: Any,
) -> Rescaled:
    """The network with every layer that has a 1-Lipschitz form converted to it, scaled to a proved constant.

    Linear and convolutional layers get the parametrisation of `method`, starting from their weights; batch norm
    becomes centring, overlapping max pooling disjoint, steep activations are divided by their constant
    (`nn.convert.convert`). What is left (layer norm, attention, plain sums of branches in a `forward`) is counted:
    the result is `factor·f` with `lipschitz_bound(result).upper` between `0.999·constant` and `constant`. The
    function changes, so train it further; then `result.rescale(example_input)` sets the factor again.
    `result.conversion` says what became of every module, and holds the report.

    Guarantee: `lipschitz_bound(result, example_input).upper ≤ constant`. Without an example the constant must follow from
    the construction of every module, and is then an upper bound for all input sizes, else the call is refused.

    Args:
        model: any module; it is not changed.
        constant: the Lipschitz constant in ℓ2 to reach.
        method: sr, aol, sn, rko, cayley, … (`nn.convert.methods()`).
        example_input: a batch of inputs (only the shape matters).
        options: for every layer, e.g. `t=3`.

    >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4)
    >>> 1.998 <= lipschitz_bound(make_lipschitz(net, constant=2.0, example_input=x).eval(), x).upper <= 2.0
    True
    """
    require_positive(constant=constant)
    new, rows = convert(model, method, **options)
    scaled = Rescaled(new, constant)
    report = None
    if example_input is not None:
        report = scaled.rescale(example_input)
    else:
        inner = known_constant(new)
        if inner is None:
            why = next((f": {r.name} ({r.was}): {r.note}" for r in rows if r.action == "left"), "")
            raise Refused(
                f"the converted network's constant does not follow from its construction{why}; pass example_input, so that "
                "it can be bounded"
            )
        scaled.factor.fill_(single_down(deflate(constant / max(inner, 1.0))))
    scaled.training = model.training
    scaled.conversion = Conversion(rows, float(constant), report)
    return scaled


def export(model: nn.Module, example_input: Any = None) -> nn.Module:
    """Plain modules with the effective weights: same outputs, no overhead, ready for `torch.export` and ONNX.

    A deep copy in evaluation mode; the attribute `certificate` says what was proved of it: a bound per layer, and one
    of the whole from `lipschitz_bound` on the example (or from the construction, without one).

    Args:
        model: any module; it is not changed.
        example_input: a batch of inputs, for a bound of the whole and for layers that depend on the image size.

    >>> from equipoise.nn import SRLinear
    >>> net = export(nn.Sequential(SRLinear(4, 4), nn.ReLU()), torch.zeros(1, 4))
    >>> type(net[0]).__name__, net.certificate.upper <= 1.00001
    ('Linear', True)
    """
    if example_input is not None:
        evaluate_at(model, *_one_sample(example_input))
    new, rows = plain(model)
    new.eval()
    upper = known_constant(model)
    source = "" if upper is None else "construction"
    if example_input is not None:
        bound = lipschitz_bound(new, example_input).upper
        if upper is None or bound <= upper:
            upper = bound
            source = "lipschitz_bound of the exported network"
    new.certificate = Certificate(rows, upper, source)  # type: ignore[assignment]
    return new


def converted(
    *,
    base: str,
    arguments: dict[str, Any] | None = None,
    constant: float = 1.0,
    method: str = "sr",
    options: dict[str, Any] | None = None,
) -> Rescaled:
    """A converted network of `nn.models` to load a checkpoint into: the factor comes with the state, or from `rescale`.

    The factory of checkpoints of converted networks: `equipoise.conversion:converted`.

    Args:
        base: name of the network before conversion.
        arguments: of its builder.
        constant: the Lipschitz constant.
        method: of the conversion.
        options: of every layer.

    >>> model = converted(base="mlp", arguments={"widths": [8]})
    >>> type(model.module[1]).__name__
    'SRLinear'
    """
    from equipoise.nn.models import build

    return Rescaled(
        convert(build(base, **(arguments or {})), method, **(options or {}))[0], constant
    )
