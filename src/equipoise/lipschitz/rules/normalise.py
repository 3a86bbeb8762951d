"""Softmax and the normalisations whose statistics depend on the input."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.core.precision import inflate
from equipoise.lipschitz.operations import Normalised, Product
from equipoise.lipschitz.rules.registry import Call, Signal, Step, norm_of, rule

GLOBAL = "max|γ|/√ε, over the whole space"


@rule("aten.softmax.int", "aten._softmax.default", "aten._safe_softmax.default")
def softmax(call: Call) -> Step:
    """1/2, attained at (½, ½, 0, …); rows have norm at most 1 (Jacobian diag(p) − ppᵀ)."""
    x = call.signal("self")
    last = call["dim"] % max(1, len(x.shape)) == len(x.shape) - 1
    groups = x.numel // max(1, x.shape[call["dim"]])
    return Step(
        ((x, 0.5),), "softmax", map=Product(), norm=inflate(math.sqrt(groups)), row=1.0 if last else math.inf, peak=1.0, low=0.0,
        offset=inflate(math.sqrt(groups)),
    )  # fmt: skip


@rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(call: Call) -> Step:
    """√n over n entries: the Jacobian I − 1pᵀ at a vertex."""
    x = call.signal("self")
    n = x.shape[call["dim"]]
    return Step(
        ((x, inflate(math.sqrt(n)) if n > 1 else 0.0),),
        "log-softmax",
        offset=inflate(math.log(n + 1) * math.sqrt(x.numel)),
    )


@rule("aten.logsumexp.default")
def logsumexp(call: Call) -> Step:
    """1: the gradient is a probability vector."""
    x = call.signal("self")
    return Step(((x, 1.0),), "logsumexp", offset=inflate(math.log(x.numel + 1) * math.sqrt(math.prod(call.shape))))


def _normalised(
    x: Signal, weight: Tensor | None, bias: Tensor | None, eps: float, size: int, repeat: int, label: str
) -> Step:
    """Rows of `size` entries divided by √(var + ε) (or the root mean square), scaled by γ and shifted by β.

    The Jacobian of `x ↦ (x − mean)/√(var + ε)` has norm at most 1/√(var + ε); a normalised row has norm at most √size.
    """
    top = 1.0 if weight is None else float(weight.abs().max())
    rows = x.numel // size
    shift = 0.0 if bias is None else inflate(norm_of(bias) * math.sqrt(repeat))  # norm of β as it appears in one row
    shift_peak = 0.0 if bias is None else float(bias.abs().max())
    return Step(
        ((x, inflate(top / math.sqrt(eps))),), label, norm=inflate(math.sqrt(rows) * inflate(top * math.sqrt(size) + shift)),
        peak=inflate(top * math.sqrt(size) + shift_peak), offset=inflate(math.sqrt(rows) * shift), note=GLOBAL,
    )  # fmt: skip


def _positive(call: Call, eps: float) -> float:
    if not eps > 0:
        call.refuse("a normalisation with ε = 0 is not Lipschitz near constant inputs", "set eps > 0")
    return eps


@rule("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space; rows of the output are bounded, which is what attention needs."""
    x = call.signal("input")
    size = math.prod(call["normalized_shape"])
    weight, bias = call.constant("weight"), call.constant("bias")
    eps = _positive(call, float(call["eps"]))
    step = _normalised(x, weight, bias, eps, size, 1, "layer norm")
    return _with_rows(step, x, weight, bias, eps, centred=True) if size == x.shape[-1] else step


def _with_rows(step: Step, x: Signal, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool) -> Step:
    """What is known where the rows of the last dimension are normalised."""
    top = 1.0 if weight is None else float(weight.abs().max())
    row = inflate(inflate(top * math.sqrt(x.shape[-1])) + norm_of(bias))
    return replace(step, row=row, map=Normalised(top, eps, centred))


@rule("aten.rms_norm.default")
def rms_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space; without ε PyTorch takes the machine epsilon of the type."""
    x = call.signal("input")
    eps = call["eps"]
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    size = math.prod(call["normalized_shape"])
    weight = call.constant("weight")
    step = _normalised(x, weight, None, _positive(call, eps), size, 1, "RMS norm")
    return _with_rows(step, x, weight, None, eps, centred=False) if size == x.shape[-1] else step


@rule("aten.group_norm.default")
def group_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space."""
    x = call.signal("input")
    size = math.prod(x.shape[1:]) // int(call["num_groups"])
    weight, bias = call.constant("weight"), call.constant("bias")
    eps = _positive(call, float(call["eps"]))
    return _normalised(x, weight, bias, eps, size, math.prod(x.shape[2:]), "group norm")


@rule("aten.instance_norm.default")
def instance_norm(call: Call) -> Step:
    """With input statistics `max|γ|/√ε`; with running statistics it is a batch norm in evaluation."""
    if not call["use_input_stats"]:
        from equipoise.lipschitz.rules.affine import batch_norm

        return batch_norm(call)
    if call["running_mean"] is not None:
        call.refuse("instance norm updates its running statistics", "call model.eval() first")
    x = call.signal("input")
    weight, bias = call.constant("weight"), call.constant("bias")
    size = math.prod(x.shape[2:])
    return _normalised(x, weight, bias, _positive(call, float(call["eps"])), size, size, "instance norm")
