"""ONNX's recurrent networks, step by step over the length of the sequence."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equipoise.onnx.operators import Fixed, operator
from equipoise.onnx.reading import Spec

State = tuple[Tensor, ...]
#: longer sequences are not unrolled
LONGEST = 1_000
_DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _checked(spec: Spec, x: Tensor, lengths: Fixed) -> list[bool]:
    """The directions to run in, false for backwards."""
    spec.only("activations", "direction", "hidden_size", "layout", "linear_before_reset", "input_forget")
    ways = {"forward": [True], "reverse": [False], "bidirectional": [True, False]}
    chosen = ways.get(spec.get("direction", "forward"))
    if chosen is None or spec.get("layout", 0) or spec.get("input_forget", 0):
        raise spec.refuse("only layout 0, without coupled gates, in one of ONNX's directions is supported")
    if spec.get("activations", _DEFAULT[spec.kind] * len(chosen)) != _DEFAULT[spec.kind] * len(chosen):
        raise spec.refuse(f"only the activations {_DEFAULT[spec.kind]} are supported")
    if lengths is not None and any(int(n) != x.shape[0] for n in lengths.reshape(-1)):
        raise spec.refuse("sequences of different lengths are not supported")
    if x.dim() != 3 or x.shape[0] > LONGEST:
        raise spec.refuse(f"an input of shape {tuple(x.shape)}; at most {LONGEST} steps are unrolled")
    return chosen


def _rnn(spec: Spec, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
    def step(x: Tensor, state: State) -> State:
        return (torch.tanh(x @ w.T + state[0] @ r.T + b + c),)

    return step


def _gru(spec: Spec, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
    n = r.shape[1]

    def step(x: Tensor, state: State) -> State:
        (h,) = state
        gates = torch.sigmoid(x @ w[: 2 * n].T + h @ r[: 2 * n].T + b[: 2 * n] + c[: 2 * n])
        z, reset = gates[:, :n], gates[:, n:]
        if spec.get("linear_before_reset", 0):
            inner = reset * (h @ r[2 * n :].T + c[2 * n :])
        else:
            inner = (reset * h) @ r[2 * n :].T + c[2 * n :]
        new = torch.tanh(x @ w[2 * n :].T + b[2 * n :] + inner)
        return (z * (h - new) + new,)

    return step


def _lstm(spec: Spec, w: Tensor, r: Tensor, b: Tensor, c: Tensor) -> Callable[[Tensor, State], State]:
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
    *states: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if len(states) > 2 and states[2] is not None:
        raise spec.refuse("peepholes are not supported")
    ways, size = _checked(spec, x, lengths), r.shape[-1]
    given = [*states[:2], None, None][: 2 if spec.kind == "LSTM" else 1]
    outputs, ends = [], []
    for way, forwards in enumerate(ways):
        both = torch.zeros(2 * w.shape[1], dtype=x.dtype, device=x.device) if bias is None else bias[way]
        step = _CELLS[spec.kind](spec, w[way], r[way], *both.split(w.shape[1]))
        blank = torch.zeros(x.shape[1], size, dtype=x.dtype, device=x.device)
        state: State = tuple(blank if s is None else s[way] for s in given)
        seen = []
        for row in x.unbind(0) if forwards else x.unbind(0)[::-1]:
            state = step(row, state)
            seen.append(state[0])
        outputs.append(torch.stack(seen if forwards else seen[::-1]))
        ends.append(state)
    return torch.stack(outputs, 1), *(torch.stack(parts) for parts in zip(*ends, strict=True))
