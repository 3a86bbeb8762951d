"""ONNX's attention, written out as products and a softmax."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from equipoise.onnx.operators import Fixed, operator
from equipoise.onnx.reading import Spec


@operator("Attention", fixed=(3,))
def _attention(spec: Spec, q: Tensor, k: Tensor, v: Tensor, mask: Fixed = None, *past: Tensor | None) -> Tensor:
    """`softmax(s·QKᵀ + M)·V` per head; heads of the keys are shared by groups of queries."""
    spec.only(
        "is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"
    )
    if any(p is not None for p in past) or len([o for o in spec.outputs if o]) > 1 or spec.get("softcap", 0.0):
        raise spec.refuse("past keys, further outputs and softcap are not supported")
    flat = q.dim() == 3
    if flat:
        heads, shared = spec.get("q_num_heads", 0), spec.get("kv_num_heads", 0)
        if not heads or not shared:
            raise spec.refuse("inputs of three dimensions need q_num_heads and kv_num_heads")
        q, k, v = _heads(q, heads), _heads(k, shared), _heads(v, shared)
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    score = torch.matmul(q, k.transpose(-2, -1)) * spec.get("scale", 1 / math.sqrt(q.shape[-1]))
    hidden = _hidden(spec, mask, score)
    score = score if hidden is None else score + hidden.to(score.dtype)
    result = torch.matmul(torch.softmax(score, -1), v)
    return result.transpose(1, 2).flatten(2) if flat else result


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def _hidden(spec: Spec, mask: Fixed, score: Tensor) -> Tensor | None:
    """What is added to the scores: the mask, and a number for which the softmax is 0 where a query must not look."""
    rows, columns = (int(n) for n in score.shape[-2:])
    least = float(np.finfo(np.float32).min) / 4
    added = np.zeros((rows, columns)) if mask is None else np.asarray(mask, dtype=np.float64)
    if mask is not None and mask.dtype.kind == "b":
        added = np.where(mask, 0.0, least)
    if spec.get("is_causal", 0):
        added = added + np.where(np.tril(np.ones((rows, columns), dtype=bool)), 0.0, least)
    if mask is None and not spec.get("is_causal", 0):
        return None
    added = np.maximum(added, 2 * least)
    if bool((added.max(-1) <= least).any()):
        raise spec.refuse("a query may look at nothing, so that its result is not defined")
    return torch.from_numpy(added)
