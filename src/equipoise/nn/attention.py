"""L2 self-attention: distances instead of products, query and key tied, Lipschitz on the whole space.

Each head reads `q_i = W x_i`, weighs `p_ij ∝ exp(−τ‖q_i − q_j‖²)` over the tokens j that i may see (itself among them), and
returns `m_i = Σ_j p_ij q_j`. Values that are functions of the q are what keeps the Jacobian bounded: far tokens have large
values, and weights that vanish faster.

**The constant.** With `r_j = q_j − q_i`, `t_j = τ‖r_j‖²`, r̄ and C the mean and covariance of r under p_i,

    dm_i = Σ_j p_j [dq_j − 2τ (r_j − r̄) r_jᵀ dq_j]  +  2τ C dq_i.

1. `τ Σ_j p_j‖r_j‖² = Σ t_j e^{−t_j} / (1 + Σ e^{−t_j}) ≤ ω`, where `ω e^{ω+1} = N − 1` (Kim et al. 2021, lemma): so
   `2τ‖C‖ ≤ 2ω`, and `τ Σ_j p_j (u·(r_j − r̄))² ≤ ω` for every unit u.
2. For unit u and any θ > 0, Cauchy–Schwarz on `Σ p_j (1, 2√(τθ) u·(r_j − r̄)) · (u·dq_j, −√(τ/θ) r_j·dq_j)` bounds the sum in
   dm_i by `√(1 + 4θω) · √(Σ_j p_ij (1 + t_ij/θ)‖dq_j‖²)`.
3. Summed over i, token j meets `Σ_i p_ij (1 + t_ij/θ)`: at most 1 from itself and, since `p_ij ≤ 1/(1 + e^{t_ij})`, at most
   `max_t (1 + t/θ)/(1 + e^t) = W₀(e^{θ−1})/θ` from each of the others.

    ‖dm‖ ≤ L_N ‖dq‖,      L_N = min_θ √(1 + 4θω) √(1 + (N − 1) W₀(e^{θ−1})/θ)  +  2ω.

It does not depend on τ, holds for every mask that lets a token see itself, and heads act on coordinates of their own, so
the layer has constant `‖W_O‖·L_N·‖W‖`. Kim et al. have `√N(4ω + 1)`: 81 for N = 64, where L_N is 22.

Reference: Kim, Papamakarios, Mnih 2021, The Lipschitz constant of self-attention (theorem 3.2, there with `XA` as values).
"""

import functools
import math

import torch
from scipy.special import lambertw
from torch import Tensor, nn

from equipoise.core.bounds import Bound, Kind
from equipoise.core.checks import require_number
from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.core.precision import inflate
from equipoise.norms.spectral import spectral_norm

#: places where θ is tried; any value gives a bound
_THETAS = tuple(0.02 * 1.15**i for i in range(40))


def _product_root(value: float, shift: float) -> float:
    """x ≥ 0 with `x·e^{x + shift} ≥ value`, as small as rounding allows: W₀ from above, checked by substitution."""
    if value <= 0:
        return 0.0
    x = float(lambertw(value * math.exp(-shift)).real)
    while x * math.exp(x + shift) * (1 - 1e-13) < value:
        x = x * (1 + 1e-13) + 1e-300
    return x


@functools.lru_cache
def attention_gain(tokens: int) -> float:
    """`L_N` of the module's text for N tokens, rounded up: the constant of `q ↦ m`.

    >>> attention_gain(1), 21 < attention_gain(64) < 22
    (1.0, True)
    """
    if tokens < 1:
        raise InputError(f"attention needs at least one token, got {tokens}")
    if tokens == 1:
        return 1.0
    omega = _product_root(tokens - 1, 1.0)
    sums = [
        math.sqrt(1 + 4 * theta * omega) * math.sqrt(1 + (tokens - 1) * _product_root(math.exp(theta - 1), 0.0) / theta)
        for theta in _THETAS
    ]
    return inflate((min(sums) + 2 * omega) * (1 + 1e-12))


class L2Attention(nn.Module):
    """Multi-head self-attention by distances, with query and key tied: Lipschitz on the whole space.

        y = W_O·concat_h(P_h Q_h) / scale,     P_h = softmax(−τ_h ‖q_i − q_j‖²),     Q = W x

    Guarantee: `‖y(x) − y(x')‖ ≤ ‖W_O‖·L_N·‖W‖/scale · ‖x − x'‖` for sequences of N tokens, all of them together, causal or not,
    whatever the temperatures τ_h (see the module's text). `lipschitz_upper` says it for the weights at hand, and
    `lipschitz_bound` uses that. With `scale=None` the output is divided by `L_N` of the longest sequence, `context`, so that
    weights of norm at most 1 make a 1-Lipschitz layer.

    Args:
        width: features of a token.
        heads: must divide `width`.
        context: the longest sequence; longer ones are refused.
        causal: token i sees tokens j ≤ i only.
        scale: the output is divided by this.

    >>> layer = L2Attention(8, heads=2, context=5).eval()
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    >>> float(layer.lipschitz_upper((5, 8))) > 0
    True
    """

    def __init__(
        self, width: int, heads: int = 1, context: int = 128, causal: bool = True, scale: float | None = None
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("heads", heads), ("context", context)):
            require_number(value, name, whole=True)
        if heads < 1 or width < 1 or width % heads or context < 1:
            raise InputError(
                f"heads must divide the width, and context be positive; got {heads}, {width} and {context}"
            )
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise InputError(f"scale must be a positive number, got {scale}")
        self.heads, self.context, self.causal = heads, context, causal
        self.scale = attention_gain(context) if scale is None else float(scale)
        self.query = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.log_temperature = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the tokens of `x (batch, tokens, width)`."""
        batch, tokens, width = x.shape
        if tokens > self.context:
            raise InputError(f"this layer was made for at most {self.context} tokens, got {tokens}")
        q = self.query(x).reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        tau = self.log_temperature.exp()[:, None, None]
        scores = tau * (2 * q @ q.mT - q.square().sum(-1)[:, :, None, :])  # ‖q_i‖² cancels in the softmax
        if self.causal:
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        mixed = (scores.softmax(-1) @ q).transpose(1, 2).reshape(batch, tokens, width)
        return self.output(mixed) / self.scale

    @by_construction(None)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`‖W_O‖·L_N·‖W‖/scale` for sequences of this length."""
        tokens = input_shape[0]
        norms = float(spectral_norm(self.query).upper) * float(spectral_norm(self.output).upper)
        return Bound(inflate(inflate(norms) * attention_gain(tokens) / self.scale), Kind.UPPER, "L2 attention")

    def extra_repr(self) -> str:
        """Heads and context."""
        return f"heads={self.heads}, context={self.context}, causal={self.causal}"
