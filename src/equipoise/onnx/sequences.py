"""ONNX operators of sequences and signals: recurrent networks, attention, Fourier transforms and their windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.onnx.operators import Fixed, bounded, number, operator
from equipoise.onnx.reading import DTYPES, Spec

# ---- recurrent networks, step by step over the length of the sequence -------------------------------------------------

State = tuple[Tensor, ...]
#: longer sequences are not unrolled
LONGEST = 1_000
_DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _directions(spec: Spec, x: Tensor, lengths: Fixed, direction: str, activations: list[str] | None) -> list[bool]:
    """The directions to run in, false for backwards."""
    ways = {"forward": [True], "reverse": [False], "bidirectional": [True, False]}
    chosen = ways.get(direction)
    if chosen is None:
        raise spec.refuse(f"its direction {direction!r} is none of ONNX's")
    if activations is not None and activations != _DEFAULT[spec.kind] * len(chosen):
        raise spec.refuse(f"only the activations {_DEFAULT[spec.kind]} are supported")
    if lengths is not None and any(int(n) != x.shape[0] for n in lengths.reshape(-1)):
        raise spec.refuse("sequences of different lengths are not supported")
    if x.dim() != 3 or x.shape[0] > LONGEST:
        raise spec.refuse(f"an input of shape {tuple(x.shape)}; at most {LONGEST} steps are unrolled")
    return chosen


def _rnn(linear: int, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
    def step(x: Tensor, state: State) -> State:
        return (torch.tanh(x @ w.T + state[0] @ r.T + b + c),)

    return step


def _gru(linear: int, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
    n = r.shape[1]

    def step(x: Tensor, state: State) -> State:
        (h,) = state
        gates = torch.sigmoid(x @ w[: 2 * n].T + h @ r[: 2 * n].T + b[: 2 * n] + c[: 2 * n])
        z, reset = gates[:, :n], gates[:, n:]
        rest, shift = r[2 * n :].T, c[2 * n :]
        inner = reset * (h @ rest + shift) if linear else (reset * h) @ rest + shift
        new = torch.tanh(x @ w[2 * n :].T + b[2 * n :] + inner)
        return (z * (h - new) + new,)

    return step


def _lstm(linear: int, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
    def step(x: Tensor, state: State) -> State:
        h, cell = state
        i, o, f, g = (x @ w.T + h @ r.T + b + c).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell

    return step


_CELLS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


@operator("RNN", "GRU", "LSTM", fixed=(4,))
def _recurrent(
    spec: Spec, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: np.ndarray | None = None,
    *states: Tensor | None, direction: str = "forward", activations: Any = None, layout: int = 0, input_forget: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    if layout or input_forget or (len(states) > 2 and states[2] is not None):
        raise spec.refuse("only layout 0, without coupled gates and peepholes, is supported")
    ways, size = _directions(spec, x, lengths, direction, activations), r.shape[-1]
    given = [*states[:2], None, None][: 2 if spec.kind == "LSTM" else 1]
    outputs, ends = [], []
    for way, forwards in enumerate(ways):
        both = torch.zeros(2 * w.shape[1], dtype=x.dtype, device=x.device) if bias is None else bias[way]
        step = _CELLS[spec.kind](linear_before_reset, w[way], r[way], *both.split(w.shape[1]))
        blank = torch.zeros(x.shape[1], size, dtype=x.dtype, device=x.device)
        state: State = tuple(blank if s is None else s[way] for s in given)
        seen = []
        for row in x.unbind(0) if forwards else x.unbind(0)[::-1]:
            state = step(row, state)
            seen.append(state[0])
        outputs.append(torch.stack(seen if forwards else seen[::-1]))
        ends.append(state)
    return torch.stack(outputs, 1), *(torch.stack(parts) for parts in zip(*ends, strict=True))


# ---- attention, written out as products and a softmax --------------------------------------------------------------------


@operator("Attention", fixed=(3,))
def _attention(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Fixed = None,
    *past: Tensor | None,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    scale: Any = None,
    softcap: float = 0.0,
) -> Tensor:
    """`softmax(s·QKᵀ + M)·V` per head; heads of the keys are shared by groups of queries."""
    if any(p is not None for p in past) or spec.further_results or softcap:
        raise spec.refuse("past keys, further outputs and softcap are not supported")
    flat = q.dim() == 3
    if flat:
        if not q_num_heads or not kv_num_heads:
            raise spec.refuse("inputs of three dimensions need q_num_heads and kv_num_heads")
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    score = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    hidden = _hidden(spec, mask, score, bool(is_causal))
    score = score if hidden is None else score + hidden.to(score.dtype)
    result = torch.matmul(torch.softmax(score, -1), v)
    return result.transpose(1, 2).flatten(2) if flat else result


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def _hidden(spec: Spec, mask: Fixed, score: Tensor, causal: bool) -> Tensor | None:
    """What is added to the scores: the mask, and a number for which the softmax is 0 where a query must not look."""
    rows, columns = (int(n) for n in score.shape[-2:])
    least = float(np.finfo(np.float32).min) / 4
    added = np.zeros((rows, columns)) if mask is None else np.asarray(mask, dtype=np.float64)
    if mask is not None and mask.dtype.kind == "b":
        added = np.where(mask, 0.0, least)
    if causal:
        added = added + np.where(np.tril(np.ones((rows, columns), dtype=bool)), 0.0, least)
    if mask is None and not causal:
        return None
    added = np.maximum(added, 2 * least)
    if bool((added.max(-1) <= least).any()):
        raise spec.refuse("a query may look at nothing, so that its result is not defined")
    return torch.from_numpy(added)


# ---- Fourier transforms, which are linear, and the windows they are used with -------------------------------------------


def _whole(spec: Spec, value: Fixed, what: str) -> int | None:
    """An input that holds one whole number."""
    found = number(spec, value, what)
    if found is not None and found != int(found):
        raise spec.refuse(f"{what} must be a whole number, it is {found}")
    return None if found is None else int(found)


def _complex(spec: Spec, x: Tensor) -> Tensor:
    """Numbers whose last dimension holds real and imaginary parts, or real parts alone."""
    if x.dim() < 2 or x.shape[-1] not in (1, 2):
        raise spec.refuse(f"the last dimension of its input must hold 1 or 2 parts, the shape is {tuple(x.shape)}")
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())


@operator("DFT", fixed=(1, 2))
def _dft(
    spec: Spec,
    x: Tensor,
    length: Fixed = None,
    given: Fixed = None,
    *,
    axis: Any = None,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    chosen = _whole(spec, given, "the axis")
    axis = (1 if spec.opset < 20 else -2) if axis is None else axis
    chosen = axis if chosen is None else chosen
    if not -x.dim() <= chosen < x.dim() or chosen % x.dim() == x.dim() - 1:
        raise spec.refuse(f"axis {chosen} of an input of shape {tuple(x.shape)} is not one of the signal's")
    dim, z, n = chosen % x.dim(), _complex(spec, x), _whole(spec, length, "the length")
    bounded(spec, [*x.shape[:-1], n or 1])
    if inverse:
        if onesided:
            return torch.fft.irfft(z, n, dim).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(z, n, dim))
    if onesided:
        if z.is_complex():
            raise spec.refuse("one half of a spectrum is that of a real signal, and its input is complex")
        return torch.view_as_real(torch.fft.rfft(z, n, dim))
    return torch.view_as_real(torch.fft.fft(z, n, dim))


@operator("STFT", fixed=(1, 3))
def _stft(
    spec: Spec, x: Tensor, step: Fixed = None, window: Tensor | None = None, length: Fixed = None, *, onesided: int = 1
) -> Tensor:
    by, size = _whole(spec, step, "the step"), _whole(spec, length, "the length of a frame")
    size = int(window.shape[0]) if size is None and window is not None else size
    z = x if x.dim() == 2 else _complex(spec, x)
    if z.dim() != 2 or not by or not size or by < 0 or not 0 < size <= z.shape[1]:
        raise spec.refuse(f"frames of {size} entries every {by} of an input of shape {tuple(x.shape)}")
    frames = z.unfold(1, size, by)
    frames = frames if window is None else frames * window
    if onesided and not z.is_complex():
        return torch.view_as_real(torch.fft.rfft(frames))
    if onesided:
        raise spec.refuse("one half of a spectrum is that of a real signal, and its input is complex")
    return torch.view_as_real(torch.fft.fft(frames))


_WINDOWS = {"HannWindow": (0.5, -0.5), "HammingWindow": (25 / 46, -21 / 46), "BlackmanWindow": (0.42, -0.5, 0.08)}


@operator(*_WINDOWS, fixed=(0,))
def _window(spec: Spec, length: np.ndarray, *, periodic: int = 1, output_datatype: int = 1) -> Tensor:
    n = bounded(spec, [_whole(spec, length, "the length") or 0])[0]
    period = max(1, n if periodic else n - 1)
    angle = 2 * math.pi / period * torch.arange(n, dtype=torch.float64)
    found = sum(c * torch.cos(k * angle) for k, c in enumerate(_WINDOWS[spec.kind]))
    assert isinstance(found, Tensor)
    return found.to(DTYPES.get(output_datatype, torch.float32))
