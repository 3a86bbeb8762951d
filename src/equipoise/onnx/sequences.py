"""ONNX operators of sequences: recurrent networks, step by step over the length of the sequence."""

from typing import Any

import torch
from torch import Tensor

from equipoise.onnx.operators import operator
from equipoise.onnx.reading import Spec

State = tuple[Tensor, ...]
#: longer sequences are not unrolled
LONGEST = 1_000
#: the activations of a cell, which must be these
_ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
#: whether the sequence is read from its beginning, for each direction
_DIRECTIONS = {"forward": [True], "reverse": [False], "bidirectional": [True, False]}


def _step(kind: str, x: Tensor, state: State, weights: list[Tensor], linear: int) -> State:
    """The states after one entry of the sequence, by the equations of ONNX's documents."""
    w, r, b, c = weights
    h = state[0]
    if kind == "GRU":
        gates = 2 * r.shape[1]
        update = x @ w[:gates].T + h @ r[:gates].T + b[:gates] + c[:gates]
        z, reset = torch.sigmoid(update).chunk(2, 1)
        rest, shift = r[gates:].T, c[gates:]
        inner = reset * (h @ rest + shift) if linear else (reset * h) @ rest + shift
        new = torch.tanh(x @ w[gates:].T + b[gates:] + inner)
        return (z * (h - new) + new,)
    total = x @ w.T + h @ r.T + b + c
    if kind == "RNN":
        return (torch.tanh(total),)
    i, o, f, g = total.chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


@operator("RNN", "GRU", "LSTM")
def _recurrent(
    spec: Spec,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: list[int] | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    *,
    direction: str = "forward",
    activations: Any = None,
    layout: int = 0,
    input_forget: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    """All hidden states, and the last states of each direction."""
    if layout or input_forget or direction not in _DIRECTIONS:
        raise spec.refuse(
            "only layout 0 without coupled gates, forward, reverse or bidirectional, is supported"
        )
    directions = _DIRECTIONS[direction]
    if activations is not None and activations != _ACTIVATIONS[spec.kind] * len(directions):
        raise spec.refuse(f"only the activations {_ACTIVATIONS[spec.kind]} are supported")
    if x.dim() != 3 or x.shape[0] > LONGEST:
        raise spec.refuse(
            f"an input of shape {tuple(x.shape)}; at most {LONGEST} steps are unrolled"
        )
    if any(length != x.shape[0] for length in lengths or []):
        raise spec.refuse("sequences of different lengths are not supported")

    outputs = []
    last_states = []
    for place, forwards in enumerate(directions):
        weights = [w[place], r[place]]
        if bias is None:
            weights += [x.new_zeros(w.shape[1])] * 2
        else:
            weights += bias[place].chunk(2)
        initial = [hidden, cell] if spec.kind == "LSTM" else [hidden]
        state: State = tuple(
            x.new_zeros(x.shape[1], r.shape[-1]) if s is None else s[place] for s in initial
        )

        rows = x.unbind(0) if forwards else x.unbind(0)[::-1]
        states = []
        for row in rows:
            state = _step(spec.kind, row, state, weights, linear_before_reset)
            states.append(state[0])
        outputs.append(torch.stack(states if forwards else states[::-1]))
        last_states.append(state)
    return torch.stack(outputs, 1), *(
        torch.stack(parts) for parts in zip(*last_states, strict=True)
    )
