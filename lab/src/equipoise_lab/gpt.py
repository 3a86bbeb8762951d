"""A character model whose logits are Lipschitz in its embeddings, with the constant proved from its own graph."""

import math

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bound, Kind
from equipoise.core.checks import require_one_of
from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.core.precision import deflate
from equipoise.nn import ConvexAttention, L2Attention
from equipoise.nn.wrappers import ConvexResidual


class RowEmbedding(nn.Embedding):
    """An embedding whose rows have norm at most `radius`, `e·min(1, radius/‖e‖)`; also reads mixtures of tokens.

    Exchanging one token moves the output by at most `2·radius`.

    >>> RowEmbedding(5, 4, radius=1.0)(torch.tensor([0, 3])).norm(dim=-1).max() <= 1.0001
    tensor(True)
    """

    def __init__(self, tokens: int, width: int, radius: float) -> None:
        super().__init__(tokens, width)
        self.radius = radius

    def rows(self) -> Tensor:
        """The rows as they are used."""
        return self.weight * (
            self.radius / self.weight.norm(dim=1, keepdim=True).clamp_min(self.radius)
        )

    def forward(self, input: Tensor) -> Tensor:
        """The rows of integer tokens, or mixtures of rows for a float tensor `(…, tokens)`."""
        return (
            input @ self.rows()
            if input.is_floating_point()
            else nn.functional.embedding(input, self.rows())
        )


class Positions(nn.Module):
    """`x + b_i` at position i: changes no distance."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(context, width))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens with their positions."""
        return x + self.weight[: x.shape[1]]


class TokenShift(nn.Module):
    """Features in `reach` groups, group g that of the token g places before (zeros where there is none).

    Guarantee: 1-Lipschitz, since every entry is moved to a place of its own or forgotten; nothing is rounded. The tokens just
    before are read without attention over all of them.

    >>> TokenShift(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist()
    [[[1.0, 0.0], [3.0, 2.0]]]
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        """The moved features of (batch, tokens, width)."""
        groups = enumerate(x.tensor_split(self.reach, -1))
        return torch.cat(
            [nn.functional.pad(g, (0, 0, k, 0))[:, : x.shape[1]] for k, g in groups], -1
        )

    @by_construction(None)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """1: every entry is moved to a place of its own, or forgotten."""
        return Bound(1.0, Kind.UPPER, "entries are moved")


class CausalLayer(nn.TransformerEncoderLayer):
    """A pre-norm layer with causal softmax attention, as plain GPTs have it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__(width, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        """The layer on (batch, tokens, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], src.device, src.dtype)
        return super().forward(src, mask, is_causal=True)


class LipschitzGPT(nn.Module):
    """A character model with Lipschitz attention and convex residuals whose logits can be held at a proved Lipschitz constant.

    Embedding, positions, `depth` times attention and a two-layer network as convex residuals, and a linear head.
    `SpectralGuard(model, model.radii())` holds the weights so that `lipschitz_bound(model.body, zeros(1, context, width))` is at
    most `constant`, for all embeddings; without the guard the weights are free and the bound follows them.

    Args:
        vocabulary: number of tokens.
        context: the longest sequence.
        width: features of a token.
        depth: pairs of blocks.
        heads: of the attention.
        hidden: of the two-layer networks, 4 times the width by default.
        constant: Lipschitz constant of the logits in the embeddings, None for none.
        reach: the two-layer networks read a group of features of each of the last `reach` tokens.
        attention: "l2", as a convex residual, or "convex", 1-Lipschitz and its own residual, with a window of `context`; or
            "softmax", the blocks of a plain GPT, for comparison, which have no radii: `constant` must be None.

    >>> from equipoise.lipschitz import lipschitz_bound
    >>> model = LipschitzGPT(vocabulary=7, context=4, width=8, depth=1, heads=2).eval()
    >>> model(torch.tensor([[0, 3, 6, 1]])).shape
    torch.Size([1, 4, 7])
    >>> lipschitz_bound(model.body, torch.zeros(1, 4, 8)).upper < float("inf")
    True
    """

    def __init__(
        self,
        *,
        vocabulary: int = 65,
        context: int = 64,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        hidden: int | None = None,
        constant: float | None = 10.0,
        reach: int = 4,
        attention: str = "l2",
    ) -> None:
        super().__init__()
        if depth < 1 or width < 1 or vocabulary < 2:
            raise InputError(
                f"expected depth and width ≥ 1 and vocabulary ≥ 2, got {depth}, {width} and {vocabulary}"
            )
        if not 1 <= reach <= width:
            raise InputError(f"reach must lie between 1 and the width, {width}, got {reach}")
        if constant is not None and not (math.isfinite(constant) and constant > 0):
            raise InputError(f"constant must be a positive number or None, got {constant}")
        require_one_of(("l2", "convex", "softmax"), attention=attention)
        if attention == "softmax" and constant is not None:
            raise InputError("softmax attention has no radii: take constant=None")
        self.constant = constant
        #: blocks whose weights are held
        self.held = depth if attention == "convex" else 2 * depth
        self.embedding = RowEmbedding(vocabulary, width, math.sqrt(width))
        self.keep = 1 - 1 / (2 * depth)
        hidden = hidden or 4 * width
        blocks: list[nn.Module] = []
        for _ in range(depth):
            if attention == "softmax":
                blocks.append(CausalLayer(width, heads, hidden))
                continue
            dense = nn.Sequential(
                TokenShift(reach), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)
            )
            if attention == "convex":
                blocks.append(ConvexAttention(width, heads=heads, window=context))
            else:
                blocks.append(ConvexResidual(L2Attention(width, heads, context), self.keep))
            blocks.append(ConvexResidual(dense, self.keep))
        self.body = nn.Sequential(Positions(context, width), *blocks, nn.Linear(width, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of integer tokens `(batch, tokens)`, or of float rows `(batch, tokens, vocabulary)`."""
        return self.body(self.embedding(x))

    def radii(self, tolerance: float = 1e-3) -> dict[str, float]:
        """The radius of every linear layer by name: `√constant` for the head, the rest shared by the blocks.

        Every held block gets the gain `a = constant^(1/(2·held))`, so that the product of all is `constant`; the tolerance of
        the guard is taken off.
        """
        if self.constant is None:
            raise InputError("this model was built without a constant: it has no radii")
        a = self.constant ** (1 / (2 * self.held))
        inner = (a - self.keep) / (1 - self.keep)  # keep + (1 − keep)·inner = a
        if inner <= 0:
            raise InputError(
                f"a constant of {self.constant} leaves nothing for the {self.held} blocks; take a larger one"
            )
        each = deflate(math.sqrt(inner) / (1 + tolerance) * (1 - 1e-6))
        head = deflate(math.sqrt(self.constant) / (1 + tolerance) * (1 - 1e-6))
        return {f"body.{len(self.body) - 1}": head, "*": each}
