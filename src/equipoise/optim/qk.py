"""`QKGuard`: attention logits held below a limit, from the weights alone or from what a batch did, without touching a kernel.

A head computes `q·k/√d_h` with `q = W_q h_i + b_q` and `k = W_k h_j + b_k`, where h is the output of a normalisation with gain g
and shift β: `h = g ⊙ z + β`, `z = (x − mean)/√(var + ε)`, so `‖z‖² = d·var/(var + ε) ≤ d`. With

    A = W_q·diag(g),   a = W_q β + b_q,   B = W_k·diag(g),   b = W_k β + b_k

the product is `q·k = zᵀAᵀBz' + zᵀAᵀb + z'ᵀBᵀa + aᵀb`, and for **every** input

    |q·k|/√d_h ≤ (d‖AᵀB‖ + √d(‖Aᵀb‖ + ‖Bᵀa‖) + |aᵀb|)/√d_h .                                              (weights)

RMSNorm has β = 0 and no mean: `‖z‖² = d·ms/(ms + ε) ≤ d` as well, so nothing else changes. A rotary embedding turns q and k by
orthogonal matrices of their positions, `q·k = (A z + a)ᵀR_{j−i}(B z' + b)`; AᵀRB depends on the distance, and the ceiling becomes

    (√d‖A‖ + ‖a‖)·(√d‖B‖ + ‖b‖)/√d_h .                                                                       (rotary)

For the vectors of one batch Cauchy's inequality gives, rotations or not,

    |q_i·k_j|/√d_h ≤ max_i‖q_i‖·max_j‖k_j‖/√d_h .                                                             (batch)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.checks import POSITIVE, require_module, require_number, require_one_of
from equipoise.core.errors import InputError
from equipoise.core.precision import frobenius, full_precision, gamma, inflate, require_finite
from equipoise.norms.spectral import spectral_norm
from equipoise.optim.guard import hooked_optimizer

Rung = Literal["weights", "batch", "exact"]

#: classes of Hugging Face that compute `weight·x/√(mean(x²) + ε)`, as `nn.RMSNorm` does
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm")


@dataclass(frozen=True)
class Projection:
    """The map to queries or keys: some outputs of a module with a weight and perhaps a bias.

    Args:
        module: the layer.
        outputs: range of its outputs; None: all of them.
        weight: name of the weight, `(out, in)`, or `(in, out)` for Hugging Face's `Conv1D`.
        bias: name of the bias.
    """

    module: nn.Module
    outputs: tuple[int, int] | None = None
    weight: str = "weight"
    bias: str = "bias"

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Views of the weight `(out, in)` and of the bias."""
        W = getattr(self.module, self.weight).detach()
        W = W.mT if type(self.module).__name__ == "Conv1D" else W
        bias = getattr(self.module, self.bias, None)
        rows = slice(*(self.outputs or (None,)))
        return W[rows], None if bias is None else bias.detach()[rows]


@dataclass(frozen=True)
class Attention:
    """One attention layer: its projections, and what its inputs are known to be.

    Args:
        query: to queries, heads one after the other.
        key: to keys.
        heads: number of heads of the queries.
        key_heads: of the keys, where several query heads share one; None: the same.
        norm: the LayerNorm or RMSNorm whose output is read by both; or a bound of the length of every input; None: unknown, and
            no ceiling can be computed from the weights alone.
        rotary: True where rotary embeddings are applied to queries and keys.
        scale: what products are multiplied with; None: `1/√d_h`.
    """

    query: Projection
    key: Projection
    heads: int
    key_heads: int | None = None
    norm: nn.Module | float | None = None
    rotary: bool = False
    scale: float | None = None

    def factor(self) -> float:
        """What products are multiplied with."""
        width = len(self.query.parts()[0]) // self.heads
        return self.scale if self.scale is not None else 1 / math.sqrt(width)

    def ceilings(self) -> list[float]:
        """A bound of `|q·k|·scale` per head over all inputs; infinite where the norm is unknown."""
        if self.norm is None:
            return [math.inf] * self.heads
        with torch.no_grad(), full_precision():
            queries, radius = _folded(self.query, self.norm, self.heads)
            keys, _ = _folded(self.key, self.norm, self.key_heads or self.heads)
            group = self.heads // len(keys)
            return [
                inflate(_ceiling(query, keys[h // group], radius, self.rotary) * self.factor())
                for h, query in enumerate(queries)
            ]


def _folded(
    part: Projection, norm: nn.Module | float, heads: int
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], float]:
    """`(A, a, |a|)` of every head in float64, with the gain and shift of the norm folded in, and a bound of ‖z‖.

    |a| sums absolute values: the rounding of a is relative to it, since a shift and a bias may cancel.
    """
    W, bias = part.parts()
    W = require_finite(W.double().cpu(), "weight of a projection")
    shift = torch.zeros(len(W), dtype=torch.float64) if bias is None else bias.double().cpu()
    terms = shift.abs()
    radius = norm if isinstance(norm, float | int) else inflate(math.sqrt(W.shape[1]))
    if isinstance(norm, nn.Module):
        if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) and type(norm).__name__ not in RMS_NORMS:
            raise InputError(
                f"a {type(norm).__name__} is not a normalisation whose gain is known; give a bound of the length of its "
                "outputs instead, or name an nn.LayerNorm or nn.RMSNorm"
            )
        beta = getattr(norm, "bias", None)
        if beta is not None:
            beta = beta.detach().double().cpu()
            shift, terms = shift + W @ beta, terms + W.abs() @ beta.abs()
        gain = getattr(norm, "weight", None)
        if gain is not None:
            W = W * gain.detach().double().cpu()
    by_head = [x.unflatten(0, (heads, -1)) for x in (W, shift, terms)]
    return list(zip(*by_head, strict=True)), float(radius)


def _ceiling(
    query: tuple[Tensor, Tensor, Tensor],
    key: tuple[Tensor, Tensor, Tensor],
    radius: float,
    rotary: bool,
) -> float:
    """The ceiling of the module's header for one head, without the scale; sums of float64 are covered by a common slack."""
    (A, a, _), (B, b, _) = query, key
    slack = gamma(8 * (A.shape[1] + 8), torch.float64)
    # at least ‖Az + a‖ and ‖Bz + b‖, term by term: what rounding is relative to
    sizes = [
        radius * float(frobenius(matrix)) + float(frobenius(terms[None]))
        for matrix, _, terms in (query, key)
    ]
    rounding = inflate(slack * sizes[0] * sizes[1])
    if rotary:
        lengths = [
            inflate(radius * float(spectral_norm(X, rtol=1e-3).upper) + float(frobenius(x[None])))
            for X, x in ((A, a), (B, b))
        ]
        return inflate(inflate(lengths[0] * lengths[1]) + 3 * rounding)
    ends = [float(torch.linalg.vector_norm(x.mT @ y)) for x, y in ((A, b), (B, a))]
    value = radius**2 * _product_norm(A, B) + radius * sum(ends) + abs(float(a @ b))
    return inflate(inflate(value) + rounding)


def _product_norm(A: Tensor, B: Tensor) -> float:
    """A bound of `‖AᵀB‖` for wide A and B, through their triangular factors.

    If `Aᵀ = Q R + E` with `‖QᵀQ − I‖ ≤ δ`, then `‖AᵀB‖ ≤ (1 + δ)‖R_A R_Bᵀ‖ + ‖E_A‖‖B‖ + ‖A‖‖E_B‖`, up to squares of roundings.
    """
    factors, error = [], 0.0
    defect = 0.0
    for X, other in ((A, B), (B, A)):
        Q, R = torch.linalg.qr(X.mT)
        eye = torch.eye(Q.shape[1], dtype=Q.dtype)
        defect = max(
            defect, float(frobenius(Q.mT @ Q - eye)) + gamma(4 * len(Q), torch.float64) * Q.shape[1]
        )
        lost = (
            float(frobenius(X.mT - Q @ R))
            + gamma(4 * len(R) + 8, torch.float64) * float(frobenius(X)) * 4
        )
        error += lost * float(frobenius(other))
        factors.append(R)
    small = factors[0] @ factors[1].mT
    rounding = (
        gamma(4 * len(small) + 8, torch.float64)
        * float(frobenius(factors[0]))
        * float(frobenius(factors[1]))
    )
    upper = float(spectral_norm(small, rtol=1e-4).upper) + rounding
    return inflate(upper * (1 + 2 * defect) + 2 * error)


class QKGuard:
    """Holds attention logits below a limit by rescaling the query and key weights of the heads that exceed it.

    | rung | a head's number | what it means |
    |---|---|---|
    | `weights` | the ceiling of the module's header | holds for **every** input; tens of times the largest logit seen |
    | `batch` | `max‖q_i‖·max‖k_j‖·scale` since the last step | holds for the batches seen; about twice the largest logit |
    | `exact` | what `record()` was given, by a kernel that returns it | as good as the kernel |

    Where a head's number U exceeds the limit, its rows of W_q and W_k (and biases) are multiplied by `√(limit/U)` after the step,
    as QK-clip does; where query heads share a key head, the queries alone by `limit/U`.

    Guarantee: ceilings bound the real numbers `q·k·scale` of the stored weights over all inputs, the rounding of the ceiling
    itself included. Not covered: the rounding of the network's own forward pass.

    Args:
        model: the network. Read off are `nn.MultiheadAttention`, and modules with `query` and `key` (BERT), `q_proj` and `k_proj`
            (Llama) or a packed `c_attn` (GPT-2).
        limit: largest `|q·k|·scale`.
        rung: which number is held.
        attentions: layers by name, instead of what is read off; `Attention` says what is needed.
        norms: the normalisation in front of a layer by its name: a module, or a bound of the length of the inputs. Read off are
            `ln_1` (GPT-2), `input_layernorm` (Llama) and `norm1` of torch's layers with `norm_first`.
        optimizer: attached at once.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    >>> guard = QKGuard(layer, limit=5.0, rung="weights")
    >>> guard.step()
    >>> max(guard.ceilings()["self_attn"]) <= 5.001
    True

    Reference: Kimi Team 2025 (QK-clip).
    """

    def __init__(
        self,
        model: nn.Module,
        limit: float = 100.0,
        rung: Rung = "batch",
        *,
        attentions: Mapping[str, Attention] | None = None,
        norms: Mapping[str, nn.Module | float] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        require_module(model)
        require_one_of(get_args(Rung), rung=rung)
        self.limit = require_number(limit, "limit", least=POSITIVE)
        self.rung = rung
        self.attentions = dict(attentions or find_attentions(model, norms or {}))
        if not self.attentions:
            raise InputError(
                "the model has no attention layer that is recognised; name them in attentions="
            )
        unknown = [name for name, layer in self.attentions.items() if layer.norm is None]
        if rung == "weights" and unknown:
            raise InputError(
                f"nothing is known of the inputs of {unknown[0]!r}: name the normalisation in front of it, or a bound of "
                f"their length, in norms={{{unknown[0]!r}: ...}}"
            )
        self.steps = 0
        self.rescaled = 0
        self._values: dict[str, Tensor] = {}
        self._lengths: dict[str, dict[str, Tensor]] = {}
        self._handles: list[Any] = []
        if rung == "batch":
            for name, layer in self.attentions.items():
                self._watch(name, layer)
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Check and rescale after every `step()` of these optimizers, until `detach()`."""
        for optimizer in optimizers:
            host = hooked_optimizer(optimizer)
            self._handles.append(host.register_step_post_hook(lambda *_: self.step()))

    def detach(self) -> None:
        """Let go of optimizers and of the forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def record(self, name: str, largest: Tensor) -> None:
        """What a kernel saw: the largest `|q·k|·scale` per head, for `rung="exact"`.

        Args:
            name: of the attention layer.
            largest: one number per head.
        """
        layer = self.attentions[name]
        if largest.shape != (layer.heads,):
            raise InputError(
                f"{name!r} has {layer.heads} heads, got numbers of shape {tuple(largest.shape)}"
            )
        self._keep(self._values, name, largest)

    def ceilings(self) -> dict[str, list[float]]:
        """A bound of every logit over all inputs, per layer and head, from the weights as they are now."""
        return {name: layer.ceilings() for name, layer in self.attentions.items()}

    def logits(self) -> dict[str, list[float]]:
        """The number that is held per layer and head: of all batches since the last step, or ceilings for `rung="weights"`."""
        if self.rung == "weights":
            return self.ceilings()
        numbers = dict(self._values)
        for name, lengths in self._lengths.items():
            if len(lengths) < 2:
                continue
            layer = self.attentions[name]
            keys = lengths["key"].repeat_interleave(layer.heads // len(lengths["key"]))
            # lengths were computed in single precision or better: a share of 1e-3 covers their rounding up to 10⁴ columns
            numbers[name] = lengths["query"] * keys * layer.factor() * (1 + 1e-3)
        return {name: values.tolist() for name, values in numbers.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Rescale heads whose number exceeds the limit: what happens after each step of an attached optimizer."""
        for name, values in self.logits().items():
            for head, value in enumerate(values):
                if not math.isfinite(value):
                    raise InputError(f"the logits of head {head} of {name!r} are not finite")
                if value > self.limit:
                    self._rescale(self.attentions[name], head, self.limit / value)
        self._values.clear()
        self._lengths.clear()
        self.steps += 1

    def scalars(self) -> dict[str, float]:
        """Numbers to log: `logits/NAME[h]` per head, `logits/largest` and how many heads were rescaled so far."""
        rows = {
            f"logits/{name}[{h}]": v for name, vs in self.logits().items() for h, v in enumerate(vs)
        }
        return {
            **rows,
            "logits/largest": max(rows.values(), default=0.0),
            "logits/rescaled": float(self.rescaled),
        }

    def _rescale(self, layer: Attention, head: int, share: float) -> None:
        self.rescaled += 1
        shared = (layer.key_heads or layer.heads) != layer.heads
        parts = [(layer.query, share if shared else math.sqrt(share))]
        if not shared:
            parts.append((layer.key, math.sqrt(share)))
        for part, factor in parts:
            for tensor in part.parts():
                if tensor is not None:
                    tensor.unflatten(0, (layer.heads, -1))[head].mul_(factor)

    def _keep(self, store: dict[str, Tensor], key: str, values: Tensor) -> None:
        values = values.detach().double().cpu()
        store[key] = torch.maximum(store[key], values) if key in store else values

    def _watch(self, name: str, layer: Attention) -> None:
        """Hooks that keep the largest length of queries and keys per head."""

        def keep(kind: str, y: Tensor) -> None:
            heads = layer.heads if kind == "query" else layer.key_heads or layer.heads
            lengths = y.detach().float().unflatten(-1, (heads, -1)).norm(dim=-1).flatten(0, -2)
            if len(lengths):
                self._keep(self._lengths.setdefault(name, {}), kind, lengths.amax(0))

        def packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = dict(zip(("query", "key"), args, strict=False)) | kwargs
            for kind, part in (("query", layer.query), ("key", layer.key)):
                keep(kind, nn.functional.linear(inputs[kind].detach(), *part.parts()))

        if isinstance(layer.query.module, nn.MultiheadAttention):
            self._handles.append(
                layer.query.module.register_forward_pre_hook(packed, with_kwargs=True)
            )
            return
        for kind, part in (("query", layer.query), ("key", layer.key)):

            def hook(
                module: nn.Module, _: Any, y: Tensor, kind: str = kind, part: Projection = part
            ) -> None:
                keep(kind, y[..., slice(*(part.outputs or (None,)))])

            self._handles.append(part.module.register_forward_hook(hook))


def find_attentions(
    model: nn.Module, norms: Mapping[str, nn.Module | float] | None = None
) -> dict[str, Attention]:
    """Attention layers whose structure is recognised, by name.

    Args:
        model: the network.
        norms: normalisations in front of layers, by the name of the layer, where they are not read off.
    """
    attentions = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        layer = _attention(module)
        if layer is None:
            continue
        parent: Any = modules.get(name.rpartition(".")[0])
        norm = (norms or {}).get(name)
        if norm is None:
            norm = getattr(parent, "ln_1", None) or getattr(parent, "input_layernorm", None)
        if norm is None and getattr(parent, "norm_first", False):
            norm = parent.norm1
        attentions[name] = replace(layer, norm=norm)
    return attentions


def _attention(module: Any) -> Attention | None:
    """Projections and heads of a module of known structure; None for other modules."""
    mha = isinstance(module, nn.MultiheadAttention)
    if mha:
        d = module.embed_dim
        if module.in_proj_weight is not None:
            query, key = (
                Projection(module, (i * d, (i + 1) * d), "in_proj_weight", "in_proj_bias")
                for i in range(2)
            )
        elif module.in_proj_bias is None:
            query, key = (Projection(module, None, f"{x}_proj_weight") for x in "qk")
        else:
            return None
        return Attention(query, key, module.num_heads)
    # products with normalised queries or with positions are another function of the weights
    relative = getattr(module, "position_embedding_type", "absolute") not in ("absolute", None)
    if relative or hasattr(module, "q_norm") or hasattr(module, "q_attn"):
        return None
    config = getattr(module, "config", None)
    heads = getattr(module, "num_attention_heads", None) or getattr(
        config, "num_attention_heads", getattr(module, "num_heads", None)
    )
    scale = getattr(module, "scaling", None)
    for q, k in (("query", "key"), ("q_proj", "k_proj")):
        first, second = getattr(module, q, None), getattr(module, k, None)
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear) and heads:
            keys = second.out_features // (first.out_features // heads)
            # whether rotary embeddings follow is not seen: the ceiling with them holds in both cases
            rotary = q == "q_proj"
            return Attention(
                Projection(first), Projection(second), heads, keys, rotary=rotary, scale=scale
            )
    packed: Any = getattr(module, "c_attn", None)
    if isinstance(getattr(packed, "weight", None), Tensor) and heads:
        d = packed.weight.shape[1] // 3
        scale = None if getattr(module, "scale_attn_weights", True) else 1.0
        return Attention(
            Projection(packed, (0, d)), Projection(packed, (d, 2 * d)), heads, scale=scale
        )
    return None
