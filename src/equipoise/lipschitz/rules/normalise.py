"""Softmax and the normalisations whose statistics depend on the input."""

import math

import torch

from equipoise.core.precision import inflate
from equipoise.lipschitz.operations import Normalised, Opaque, Product
from equipoise.lipschitz.rules.affine import batch_norm
from equipoise.lipschitz.rules.registry import Call, Step, norm_of, rule

GLOBAL = "max|γ|/√ε, over the whole space"


@rule("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
def softmax(call: Call) -> Step:
    """1/2, attained at (½, ½, 0, …); rows have norm at most 1 (Jacobian diag(p) − ppᵀ)."""
    x = call.x
    last = call["dim"] % max(1, len(x.shape)) == len(x.shape) - 1
    groups = x.numel // max(1, x.shape[call["dim"]])
    return Step(
        ((x, 0.5),), "softmax", map=Product(), norm=inflate(math.sqrt(groups)), row=1.0 if last else math.inf, peak=1.0, low=0.0,
        offset=inflate(math.sqrt(groups)),
    )  # fmt: skip


@rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(call: Call) -> Step:
    """√n over n entries: the Jacobian I − 1pᵀ at a vertex."""
    x = call.x
    n = x.shape[call["dim"]]
    return Step(
        ((x, inflate(math.sqrt(n)) if n > 1 else 0.0),),
        "log-softmax",
        offset=inflate(math.log(n + 1) * math.sqrt(x.numel)),
    )


@rule("aten.logsumexp.default")
def logsumexp(call: Call) -> Step:
    """1: the gradient is a probability vector."""
    x = call.x
    return Step(((x, 1.0),), "logsumexp", offset=inflate(math.log(x.numel + 1) * math.sqrt(math.prod(call.shape))))


def _normalised(call: Call, size: int, repeat: int, label: str, centred: bool | None = None) -> Step:
    """Groups of `size` entries divided by √(var + ε) (or the root mean square), scaled by γ and shifted by β.

    The Jacobian of `x ↦ (x − mean)/√(var + ε)` has norm at most 1/√(var + ε); a normalised group has norm at most √size.

    Args:
        call: with γ as `weight` and β as `bias`, where they are.
        size: of a group.
        repeat: how often an entry of β appears in one group.
        label: for the report.
        centred: whether the mean is taken off, where groups may be the rows of the last dimension; None where they are not.
    """
    x, weight, bias = call.x, call.constant("weight"), call.constant("bias")
    eps = torch.finfo(x.dtype).eps if call["eps"] is None else float(call["eps"])
    if not eps > 0:
        call.refuse("a normalisation with ε = 0 is not Lipschitz near constant inputs", "set eps > 0")
    if x.dtype == torch.float32:
        eps = min(eps, float(torch.tensor(eps, dtype=torch.float32)))
    top = 1.0 if weight is None else float(weight.abs().max())
    length = inflate(top * math.sqrt(size))
    shift = 0.0 if bias is None else inflate(norm_of(bias) * math.sqrt(repeat))  # norm of β as it appears in one group
    by_rows = centred is not None and size == x.shape[-1]
    groups = math.sqrt(x.numel // size)
    return Step(
        ((x, inflate(top / math.sqrt(eps))),),
        label,
        offset=inflate(groups * shift),
        norm=inflate(groups * inflate(length + shift)),
        row=inflate(length + shift) if by_rows else math.inf,
        peak=inflate(length + (0.0 if bias is None else float(bias.abs().max()))),
        map=Normalised(top, eps, bool(centred)) if by_rows else Opaque(),
        note=GLOBAL,
    )


@rule("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space; rows of the output are bounded, which is what attention needs."""
    return _normalised(call, math.prod(call["normalized_shape"]), 1, "layer norm", centred=True)


@rule("aten.rms_norm.default")
def rms_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space; without ε PyTorch takes the machine epsilon of the type."""
    return _normalised(call, math.prod(call["normalized_shape"]), 1, "RMS norm", centred=False)


@rule("aten.group_norm.default")
def group_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space."""
    shape = call.x.shape
    return _normalised(call, math.prod(shape[1:]) // int(call["num_groups"]), math.prod(shape[2:]), "group norm")


@rule("aten.instance_norm.default")
def instance_norm(call: Call) -> Step:
    """With input statistics `max|γ|/√ε`; with running statistics it is a batch norm in evaluation."""
    if not call["use_input_stats"]:
        return batch_norm(call)
    if call["running_mean"] is not None:
        call.refuse("instance norm updates its running statistics", "call model.eval() first")
    size = math.prod(call.x.shape[2:])
    return _normalised(call, size, size, "instance norm")
