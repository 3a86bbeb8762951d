"""What a node of a captured graph is: typed maps, on which every bound dispatches.

A rule says how far an operation can stretch distances (`Step.gains`) and which of these it is (`Step.map`). Global ℓ2
bounds need the gains alone; enclosures, tangents, chains and other norms ask the map. `Opaque` claims nothing but its
gains. Labels are for readers, and nothing is decided by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise.maps.linear import Diagonal, Linear, Padding
from equipoise.maps.pointwise import Pointwise


@dataclass(frozen=True)
class Copy:
    """Entries moved, chosen or repeated, none computed. `same`: all of them, where they were (dropout in evaluation, casts).

    `traced`: the operation can be replayed on a tensor of positions, to know which entries it holds.
    """

    same: bool = False
    traced: bool = False


@dataclass(frozen=True)
class Padded:
    """Padding by copies or by the constant `fill`; `run(x, fill)` pads with another one."""

    fill: float
    run: Callable[[Tensor, float], Tensor] = field(repr=False)
    form: Padding | None = None


@dataclass(frozen=True)
class Join:
    """Concatenation of tensors, some of which may be constant, by `run`."""

    parts: tuple[Tensor | None, ...]
    run: Callable[[list[Tensor]], Tensor] = field(repr=False)


@dataclass(frozen=True)
class Weighted:
    """`run(x, weight, bias)`, linear in x and in the weight: dense layers and convolutions.

    `form` is the operator as a value, where it can be composed. `rows` is the dimension of the output along which one row
    of `weight.flatten(1)` stands, where its rows are those of the operator.
    """

    weight: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor] = field(repr=False)
    form: Linear | None = field(default=None, repr=False)
    rows: int | None = None


@dataclass(frozen=True)
class Scaled:
    """`factor·x + shift` with constants that broadcast; `size` bounds the magnitudes that `shift` was computed from."""

    factor: Tensor = field(repr=False)
    shift: Tensor | None = field(default=None, repr=False)
    size: Tensor | None = field(default=None, repr=False)
    form: Diagonal | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Sum:
    """`Σ weights_i·x_i` over the branches, in the order of the gains, with broadcasting, plus a constant `shift`."""

    weights: tuple[float, ...]
    shift: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Average:
    """A linear operation with non-negative coefficients, known by running it: means, sums, average pooling."""


@dataclass(frozen=True)
class Largest:
    """The largest entry of every window; `windows` is how many hold one entry, at most.

    `sliding` windows over the last `dims` dimensions can be run on half-widths too.
    """

    windows: int = 1
    sliding: bool = False
    dims: int = 0


@dataclass(frozen=True)
class Sorted:
    """The same values in order."""


@dataclass(frozen=True)
class Choice:
    """Every entry is that of one operand at its place, with broadcasting, chosen by a constant mask."""


@dataclass(frozen=True)
class Normalised:
    """Rows of the last dimension divided by their size, `top` times: `√(var + ε)` where `centred`, else the root mean square."""

    top: float
    eps: float
    centred: bool


@dataclass(frozen=True)
class Constant:
    """Does not depend on the input: reads nothing of it but the shape."""


#: a signal, a factor, and whether the factor multiplies the change of its `row`s in ℓ2 or that of its `peak`s, the entries
Term = tuple[Any, float, str]


@dataclass(frozen=True)
class Product:
    """A product of branches, softmax, attention: bounded where its factors are.

    No row (last dimension) of the result changes by more than the sum of the terms in `rows` in ℓ2, and no entry by more than
    that of those in `peaks`; empty where nothing is known.
    """

    rows: tuple[Term, ...] = ()
    peaks: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Opaque:
    """Nothing is known but the gains. `inside`: not even those, in a block that bounds itself."""

    inside: bool = False


Map = (
    Copy
    | Padded
    | Join
    | Weighted
    | Scaled
    | Sum
    | Average
    | Pointwise
    | Largest
    | Sorted
    | Choice
    | Normalised
    | Constant
    | Product
    | Opaque
)
