"""Self-attention with a constant on the whole space: by distances (`L2Attention`), and from a potential (`ConvexAttention`).

# L2 attention

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

**In `max over tokens of ℓ2`.** Since `Σ_j p_j (r_j − r̄) = 0`, `dm_i = Σ_j p_j dq_j − 2τ Σ_j p_j (r_j − r̄) r_jᵀ(dq_j − dq_i)`.
Where every dq_j has length at most 1, that is at most `1 + 4τ Σ_j p_j‖r_j − r̄‖‖r_j‖ ≤ 1 + 4τ Σ_j p_j‖r_j‖² ≤ 1 + 4ω`, by
Cauchy–Schwarz and step 1. H heads may look at H different tokens, which costs √H: `‖W_O‖(1 + 4ω)√H‖W‖`.

# Attention from a convex potential

`x − 2Uᵀρ(Ux)` with ‖U‖ ≤ 1 and ρ = ∇φ, φ convex with a Hessian of norm at most 1, acting on all tokens at once: the Jacobian
`I − 2UᵀHU` with 0 ≤ H ≤ I is symmetric with eigenvalues in [1 − 2‖U‖², 1], the proof of CPL. Two potentials of `q = Ux`, with
`π_δ(z) = z·min(1, δ/‖z‖)`, the gradient of the vector Huber function:

1. Pairs, `φ = Σ_{i<j} huber_δ(q_i − q_j)/N` and `ρ_i = Σ_j π_δ(q_i − q_j)/N`. With D all differences, `DᵀD = N·I − 11ᵀ`, so the
   Hessian is at most ‖D‖²/N = 1.
2. Memory, `φ = 2δ²·log Σ_m exp(q_m/δ)` for each token and `ρ = 2δ·softmax(q/δ)`. The Hessian `2(diag p − ppᵀ)` is at most
   `2·max 2p(1 − p) ≤ 1` (Gershgorin).

Heads are coordinates of their own of q, each with its δ.

3. Causal. `y = (x − UᵀF(Ux))/√2`, `F_i = Σ_{1≤k≤K} a_k π_δ(q_i − q_{i−k})` with a ≥ 0 and Σa ≤ 1 is no gradient. Its Jacobian is
   `(I − UᵀLU)/√2`, `(Lu)_i = Σ_k a_k H_{ik}(u_i − u_{i−k})`, 0 ≤ H ≤ I. Let `E = Σ_{ik} a_k r·Hr` with `r = u_i − u_{i−k}`. From
   `2u_i·Hr = r·Hr + u_i·Hu_i − u_{i−k}·Hu_{i−k}` follows `2⟨u, Lu⟩ ≥ E − Σa·‖u‖²`, and by Cauchy–Schwarz, with ‖Hr‖² ≤ r·Hr,
   `‖Lu‖² ≤ Σa·E`. With `t = ‖U‖²·Σa ≤ 1` and u = Uv,

    ‖v − UᵀLUv‖² = ‖v‖² − 2⟨u, Lu⟩ + ‖UᵀLu‖² ≤ (1 + t)‖v‖² + (t − 1)E ≤ 2‖v‖².

   Where rounding leaves t above 1, `E ≤ 4Σa·‖u‖² ≤ 4t‖v‖²`. For any a, ‖UᵀLU‖ ≤ 2t with Σ|a| in t.

**In `max over tokens of ℓ2`**, a token's own block and those of the others are bounded apart.

1. `dy_i = (I − (2/N)UᵀΣ_{j≠i} H_ij U)dx_i + (2/N)Σ_{j≠i} UᵀH_ij U dx_j`: at most `b + 2‖U‖² ≤ 2b + 1`, b = max(1, 2‖U‖² − 1).
2. A memory acts on every token alone: b.
3. Own block `I − UᵀΣ_k a_k H_ik U`: at most max(1, t − 1) for a ≥ 0, else 1 + t. The others: head h of `Σ_k a_k H_ik U dx_{i−k}`
   is at most `Σ_k |a_k|·‖U‖`, so H heads have at most `√H·Σ|a|·‖U‖`. Together `(own + √H·t)/√2`, which is at most `√(2H)` times
   the bound in ℓ2: `(1 + √H·t)² ≤ 2H(1 + t)` for t ≤ 1, `(own + √H·t)² ≤ 2H(1 + t + 4t(t − 1))` for t > 1, and
   `1 + t + √H·t ≤ √H(1 + 2t)`.
"""

import functools
from math import exp, inf, sqrt
from typing import Any

import torch
from scipy.special import lambertw
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import (
    Bound,
    InputError,
    Kind,
    Shape,
    by_construction,
    inflate,
    require_counts,
    require_number,
    root,
    single_down,
)
from equipoise.nn.activations import Described
from equipoise.nn.parametrize import Tensors
from equipoise.nn.residual import CPL, upper_near_one
from equipoise.norms.spectral import spectral_norm

#: places where θ is tried; any value gives a bound
_THETAS = tuple(0.02 * 1.15**i for i in range(40))


def _product_root(value: float, shift: float) -> float:
    """x ≥ 0 with `x·e^{x + shift} ≥ value`, as small as rounding allows: W₀ from above, checked by substitution."""
    if value <= 0:
        return 0.0
    x = float(lambertw(value * exp(-shift)).real)
    while x * exp(x + shift) * (1 - 1e-13) < value:
        x = x * (1 + 1e-13) + 1e-300
    return x


@functools.lru_cache
def attention_gain(tokens: int) -> float:
    """`L_N` of the module's text for N tokens, rounded up: the constant of `q ↦ m`.

    >>> attention_gain(1), 21 < attention_gain(64) < 22
    (1.0, True)
    """
    require_number(tokens, "the number of tokens", least=1, whole=True)
    if tokens == 1:
        return 1.0
    omega = _product_root(tokens - 1, 1.0)
    sums = [
        sqrt(1 + 4 * theta * omega)
        * sqrt(1 + (tokens - 1) * _product_root(exp(theta - 1), 0.0) / theta)
        for theta in _THETAS
    ]
    return inflate((min(sums) + 2 * omega) * (1 + 1e-12))


def _check_heads(width: int, heads: int) -> None:
    require_counts(width=width, heads=heads)
    if width % heads:
        raise InputError(f"heads must divide the width, got {heads} and {width}")


class L2Attention(Described):
    """Multi-head self-attention by distances, with query and key tied: Lipschitz on the whole space.

        y = W_O·concat_h(P_h Q_h) / scale,     P_h = softmax(−τ_h ‖q_i − q_j‖²),     Q = W x

    Guarantee: `‖y(x) − y(x')‖ ≤ ‖W_O‖·L_N·‖W‖/scale · ‖x − x'‖` for sequences of N tokens, all of them together, causal or not,
    whatever the temperatures τ_h (see the module's text). `lipschitz_upper` says it for the weights at hand, and
    `lipschitz_bound` uses that. The output is divided by `scale`, `L_N` of the longest sequence, so that weights of norm at
    most 1 make a 1-Lipschitz layer.

    Args:
        width: features of a token.
        heads: must divide `width`.
        context: the longest sequence; longer ones are refused.
        causal: token i sees tokens j ≤ i only.

    >>> layer = L2Attention(8, heads=2, context=5).eval()
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    >>> float(layer.lipschitz_upper((5, 8))) > 0
    True
    """

    __constants__ = ("heads", "context", "causal")

    def __init__(self, width: int, heads: int = 1, context: int = 128, causal: bool = True) -> None:
        super().__init__()
        _check_heads(width, heads)
        self.heads, self.context, self.causal = heads, context, causal
        self.scale = attention_gain(context)
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
        # ‖q_i‖² cancels in the softmax
        scores = tau * (2 * q @ q.mT - q.square().sum(-1)[:, :, None, :])
        if self.causal:
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, -inf)
        mixed = (scores.softmax(-1) @ q).transpose(1, 2).reshape(batch, tokens, width)
        return self.output(mixed) / self.scale

    @by_construction(None)
    def lipschitz_upper(self, input_shape: Shape) -> Bound:
        """`‖W_O‖·L_N·‖W‖/scale` for sequences of this length."""
        tokens = input_shape[0]
        norms = float(spectral_norm(self.query).upper) * float(spectral_norm(self.output).upper)
        return Bound(
            inflate(inflate(norms) * attention_gain(tokens) / self.scale),
            Kind.UPPER,
            "L2 attention",
        )

    def token_upper(self, input_shape: Shape) -> Bound:
        """`‖W_O‖·(1 + 4ω)·√heads·‖W‖/scale`, in `max over tokens of ℓ2`."""
        tokens = input_shape[0]
        grown = (1 + 4 * _product_root(tokens - 1, 1.0)) * sqrt(self.heads) * (1 + 1e-12)
        value = self.lipschitz_upper(input_shape).value * inflate(grown / attention_gain(tokens))
        return Bound(inflate(value), Kind.UPPER, "L2 attention")


def _projection(
    width: int,
    hidden: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    """The map from tokens to the coordinates in which they are compared."""
    return nn.Linear(width, hidden or width, False, device, dtype)


class ConvexAttention(CPL):
    """A step down a convex potential of all tokens, 1-Lipschitz for any weights and any number of tokens.

        y_i = x_i − (2/N)·Uᵀ Σ_j π_δ(U(x_i − x_j))                 π_δ(z) = z·min(1, δ/‖z‖)
        y_i = x_i − 4δ·Uᵀ softmax(Ux_i/δ)                          memory
        y_i = (x_i − Uᵀ Σ_{k ≤ window} a_k π_δ(U(x_i − x_{i−k})))/√2      window

    Tokens attract each other with weights `min(1, δ/distance)`. U is the raw weight over a bound of its norm; δ and a ≥ 0 with
    Σa ≤ 1 are learned for each head. The block is its own residual connection.

    Guarantee: `‖y(x) − y(x')‖ ≤ ‖x − x'‖` for all tokens together, rounding of U and a included (see the module's text).

    Args:
        width: features of a token.
        hidden: coordinates in which tokens are compared, or keys of the memory, `width` by default.
        device: of the parameters.
        dtype: of the parameters.
        heads: must divide `hidden`.
        memory: tokens attend to learned keys instead of each other.
        window: causal, each token sees so many tokens before it; 0: all tokens see each other. A memory has none.

    >>> layer = ConvexAttention(8, heads=2)
    >>> layer(torch.randn(3, 5, 8)).shape, layer.lipschitz_upper((5, 8)).value
    (torch.Size([3, 5, 8]), 1.0)
    """

    plain_type = staticmethod(_projection)

    def build(  # type: ignore[override]
        self, plain: Any, *, heads: int = 1, memory: bool = False, window: int = 0
    ) -> None:
        """The raw weight, log δ and the logits of a.

        Args:
            plain: the plain layer that the arguments describe.
            heads: must divide the number of coordinates in which tokens are compared.
            memory: tokens attend to learned keys instead of each other.
            window: tokens before it that each token sees; 0: all tokens see each other.
        """
        super().build(plain)
        _check_heads(self.hidden, heads)
        require_number(window, "window", least=0, most=0 if memory else inf, whole=True)
        self.heads, self.memory, self.window = heads, memory, window
        self.log_threshold = nn.Parameter(self.raw.new_zeros(heads))
        self.logits = nn.Parameter(self.raw.new_zeros(heads, window))

    def compute(self, *args: Any) -> Tensors:
        """`(U, δ, a)`."""
        # any δ > 0 keeps the bound: this range keeps z/δ finite
        threshold = self.log_threshold.exp().clamp(2.0**-60, 2.0**60)
        weights = self.logits.double().softmax(-1) * (1 - 1e-6)  # at most 1 in sum after rounding
        return super().compute()[0], threshold, weights.to(self.logits.dtype)

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The block on `x (…, tokens, width)`."""
        U, threshold, weights = tensors
        q = functional.linear(x, U).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        threshold = threshold[:, None, None]
        tokens = x.shape[-2]
        if self.memory:
            force = 4 * threshold * (q / threshold).softmax(-1)
        else:
            gaps = (q[..., :, None, :] - q[..., None, :, :]) / threshold[..., None]
            pulls = gaps.square().sum(-1).clamp_min(1).rsqrt()
            if self.window:  # a_{i−j}, 0 outside the window
                places = torch.arange(tokens, device=x.device)
                back = (places[:, None] - places).clamp(0, self.window + 1)
                pulls = pulls * functional.pad(weights, (1, 1))[:, back]
            else:
                pulls = pulls * single_down(2 / tokens)
            force = pulls.sum(-1, keepdim=True) * q - pulls @ q
        y = x - functional.linear(force.transpose(-2, -3).flatten(-2), U.mT)
        return y * single_down(sqrt(0.5)) if self.window else y

    def bound(self, tensors: Tensors, input_shape: Shape) -> Bound:
        """`max(1, 2‖U‖² − 1)`; with a window from `t = ‖U‖²·Σa`.

        Args:
            tensors: the effective tensors.
            input_shape: of one sample.
        """
        if not self.window:
            return super().bound(tensors, input_shape)
        U, _, weights = tensors
        norm = upper_near_one(self.inner(U), None)
        total = float(weights.double().abs().sum(-1).max()) * (1 + 1e-12)
        t = inflate(total * norm**2)
        value = 1 + 2 * t
        if (weights >= 0).all():
            value = sqrt(1 + t + 4 * t * max(0.0, t - 1))
        return Bound(inflate(value * sqrt(0.5)), Kind.UPPER, "causal convex attention")

    def token_upper(self, input_shape: Shape) -> Bound:
        """The bound of the module's text in `max over tokens of ℓ2`."""
        value = self.lipschitz_upper(input_shape).value
        if self.window:
            value *= root(2 * self.heads)
        elif not self.memory:
            value = 2 * value + 1
        return Bound(inflate(value), Kind.UPPER, "convex attention")
