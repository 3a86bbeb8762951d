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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core import POSITIVE, InputError, require_module, require_number, require_one_of
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
        return W[self.rows], None if bias is None else bias.detach()[self.rows]

    @property
    def rows(self) -> slice:
        """Where its outputs are among those of the module."""
        return slice(*(self.outputs or (None,)))


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
        return abs(self.scale) if self.scale is not None else 1 / math.sqrt(width)

    @torch.no_grad()
    def ceilings(self) -> list[float]:
        """A bound of `|q·k|·scale` per head over all inputs; infinite where the norm is unknown."""
        if self.norm is None:
            return [math.inf] * self.heads
        with full_precision():
            queries = _folded(self.query, self.norm, self.heads)
            keys = _folded(self.key, self.norm, self.key_heads or self.heads)
            group = self.heads // len(keys)
            return [
                inflate(_ceiling(query, keys[h // group], self.rotary) * self.factor())
                for h, query in enumerate(queries)
            ]


@dataclass(frozen=True)
class Folded:
    """`Az + a` with `‖z‖ ≤ radius`, in float64: queries or keys of one head, the gain and shift of the norm folded in.

    `length` is at least that of every such vector, summed term by term: what rounding is relative to, since a shift and a bias
    may cancel.
    """

    A: Tensor
    a: Tensor
    radius: float
    length: float


def _folded(part: Projection, norm: Any, heads: int) -> list[Folded]:
    W, bias = part.parts()
    W = require_finite(W.double().cpu(), "weight of a projection")
    shift = torch.zeros(len(W), dtype=torch.float64) if bias is None else bias.double().cpu()
    terms = shift.abs()
    radius = norm
    if not isinstance(norm, float | int):
        width = W.shape[1]
        radius = inflate(math.sqrt(width))
        known = type(norm) in (nn.LayerNorm, nn.RMSNorm) or type(norm).__name__ in RMS_NORMS
        if not known or tuple(getattr(norm, "normalized_shape", (width,))) != (width,):
            raise InputError(
                f"{norm} is not a normalisation of {width} features whose gain is known; give a bound of the length of its "
                "outputs instead, or name an nn.LayerNorm or nn.RMSNorm"
            )
        if getattr(norm, "bias", None) is not None:
            beta = norm.bias.double().cpu()
            shift, terms = shift + W @ beta, terms + W.abs() @ beta.abs()
        if norm.weight is not None:
            W = W * norm.weight.double().cpu()
    rows = zip(*(x.unflatten(0, (heads, -1)) for x in (W, shift, terms)), strict=True)
    return [
        Folded(A, a, radius, radius * float(frobenius(A)) + float(frobenius(most[None])))
        for A, a, most in rows
    ]


def _ceiling(query: Folded, key: Folded, rotary: bool) -> float:
    """The ceiling of the module's header for one head, without the scale; sums of float64 are covered by a common slack."""
    A, B, radius = query.A, key.A, query.radius
    slack = gamma(8 * (A.shape[1] + 8), torch.float64)
    rounding = inflate(3 * slack * query.length * key.length)
    if rotary:
        q, k = (
            radius * float(spectral_norm(part.A).upper) + float(frobenius(part.a[None]))
            for part in (query, key)
        )
        return inflate(inflate(q * k) + rounding)
    ends = float(torch.linalg.vector_norm(A.mT @ key.a) + torch.linalg.vector_norm(B.mT @ query.a))
    value = radius**2 * _product_norm(A, B) + radius * ends + abs(float(query.a @ key.a))
    return inflate(inflate(value) + rounding)


def _product_norm(A: Tensor, B: Tensor) -> float:
    """A bound of `‖AᵀB‖` for wide A and B: `‖AᵀB‖² = ‖BᵀAAᵀB‖ ≤ ‖RB‖² + ‖AAᵀ − RᵀR‖‖B‖²` for every R, as that of `Aᵀ = QR`."""
    R = torch.linalg.qr(A.mT, mode="r").R
    slack = gamma(4 * sum(A.shape) + 8, torch.float64)
    a, b = float(frobenius(A)), float(frobenius(B))
    defect = float(frobenius(R.mT @ R - A @ A.mT)) + 4 * slack * a * a
    inner = float(spectral_norm(R @ B, rtol=1e-4).upper) + 2 * slack * a * b
    return inflate(math.hypot(inner, math.sqrt(defect) * b))


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
        self.attentions = dict(attentions or _read_attentions(model, norms or {}))
        if not self.attentions:
            raise InputError(
                "the model has no attention layer that is recognised; name them in attentions="
            )
        for name, layer in self.attentions.items():
            if rung == "weights" and layer.norm is None:
                raise InputError(
                    f"nothing is known of the inputs of {name!r}: name the normalisation in front of it, or a bound of "
                    f"their length, in norms={{{name!r}: ...}}"
                )
        self.steps = 0
        self.rescaled = 0
        #: largest numbers per head since the last step, by layer: lengths of queries and keys, or logits
        self._largest: dict[str, dict[str, Tensor]] = {}
        self._handles: list[Any] = []
        if rung == "batch":
            for name in self.attentions:
                self._watch(name, "query")
                self._watch(name, "key")
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
        self._keep(name, "logits", largest)

    def ceilings(self) -> dict[str, list[float]]:
        """A bound of every logit over all inputs, per layer and head, from the weights as they are now."""
        return {name: layer.ceilings() for name, layer in self.attentions.items()}

    def logits(self) -> dict[str, list[float]]:
        """The number that is held per layer and head: of all batches since the last step, or ceilings for `rung="weights"`."""
        if self.rung == "weights":
            return self.ceilings()
        numbers = {}
        for name, seen in self._largest.items():
            layer = self.attentions[name]
            if "logits" not in seen and len(seen) == 2:
                keys = seen["key"].repeat_interleave(layer.heads // len(seen["key"]))
                # lengths were computed in single precision or better: a share of 1e-3 covers their rounding up to 10⁴ columns
                seen = {"logits": seen["query"] * keys * layer.factor() * (1 + 1e-3)}
            if "logits" in seen:
                numbers[name] = seen["logits"].tolist()
        return numbers

    @torch.no_grad()
    def step(self) -> None:
        """Rescale heads whose number exceeds the limit: what happens after each step of an attached optimizer."""
        for name, values in self.logits().items():
            for head, value in enumerate(values):
                if not math.isfinite(value):
                    raise InputError(f"the logits of head {head} of {name!r} are not finite")
                if value > self.limit:
                    self._rescale(self.attentions[name], head, self.limit / value)
        self._largest.clear()
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
        parts = [layer.query, layer.key]
        if layer.key_heads not in (None, layer.heads):
            parts = [layer.query]
        for tensor in (t for part in parts for t in part.parts() if t is not None):
            tensor.unflatten(0, (layer.heads, -1))[head].mul_(share ** (1 / len(parts)))

    def _keep(self, name: str, kind: str, values: Tensor) -> None:
        store, values = self._largest.setdefault(name, {}), values.detach().double().cpu()
        store[kind] = torch.maximum(store.get(kind, values), values)

    def _watch(self, name: str, kind: str) -> None:
        """A hook that keeps the largest length of queries or keys per head."""
        layer = self.attentions[name]
        part = getattr(layer, kind)
        heads = (kind == "key" and layer.key_heads) or layer.heads

        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], y: Any) -> None:
            if isinstance(module, nn.MultiheadAttention):  # its projections are not modules
                inputs = dict(zip(("query", "key"), args, strict=False)) | named
                y = nn.functional.linear(inputs[kind].detach(), *part.parts())
            else:
                y = y.detach()[..., part.rows]
            lengths = y.float().unflatten(-1, (heads, -1)).norm(dim=-1).flatten(0, -2)
            if len(lengths):
                self._keep(name, kind, lengths.amax(0))

        self._handles.append(part.module.register_forward_hook(hook, with_kwargs=True))


def _read_attentions(
    model: nn.Module, norms: Mapping[str, nn.Module | float]
) -> dict[str, Attention]:
    """Attention layers whose structure is recognised, by name, with the normalisation in front of them where it is."""
    attentions = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        layer = _read_attention(module)
        if layer is not None:
            outer, _, own = name.rpartition(".")
            parent = modules.get(outer)
            first = "norm1" if getattr(parent, "norm_first", False) else ""
            # keys of cross-attention are of other inputs
            usual = ("ln_1", "input_layernorm", first) if own in ("attn", "self_attn") else ()
            in_front = (getattr(parent, x, None) for x in usual)
            norm = next((x for x in (norms.get(name), *in_front) if x is not None), None)
            attentions[name] = replace(layer, norm=norm)
    return attentions


def _read_attention(module: Any) -> Attention | None:
    """Projections and heads of a module of known structure; None for other modules."""
    packed = getattr(module, "c_attn", None)
    packed = packed if type(packed).__name__ == "Conv1D" else None  # others mix heads and parts
    names = ("weight", "bias")
    config = getattr(module, "config", None)
    counts = [getattr(x, "num_attention_heads", None) for x in (module, config)]
    heads = next((n for n in (*counts, getattr(module, "num_heads", None)) if n), None)
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        packed, names = module, ("in_proj_weight", "in_proj_bias")
    # products with normalised queries or with positions are another function of the weights, and a learned key is none of it
    relative = getattr(module, "position_embedding_type", "absolute") not in ("absolute", None)
    normalised = any("norm" in part for part in module._modules)
    learned = getattr(module, "bias_k", None) is not None
    if relative or normalised or learned or hasattr(module, "q_attn") or heads is None:
        return None
    if packed is not None:
        d = len(Projection(packed, None, *names).parts()[0]) // 3
        query, key = (Projection(packed, (i * d, (i + 1) * d), *names) for i in range(2))
        plain = getattr(module, "scale_attn_weights", True)
        return Attention(query, key, heads, scale=None if plain else 1.0)
    for q, k in (("query", "key"), ("q_proj", "k_proj")):
        first, second = getattr(module, q, module), getattr(module, k, module)
        if all(type(x).forward is nn.Linear.forward for x in (first, second)):
            keys = second.out_features * heads // first.out_features
            # whether rotary embeddings follow is not always seen: the ceiling with them holds in both cases
            turned = any("rotary" in part for part in (*vars(module), *module._modules))
            rotary, scale = turned or q == "q_proj", getattr(module, "scaling", None)
            return Attention(
                Projection(first), Projection(second), heads, keys, None, rotary, scale
            )
    return None
