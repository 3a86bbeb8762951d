"""The table of 1-Lipschitz layers: one row adds a layer to `test_every_family.py` and `test_rescaling_attack.py`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import equipoise.nn as eqn

Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class LayerCase:
    """A layer that claims to be 1-Lipschitz.

    `build(kind, inputs, outputs, **options)` with kind in `kinds` (linear, conv1d, conv2d, conv3d, transpose2d) makes it.
    `square`: it needs as many outputs as inputs; `affine`: it is one affine map, so its operator can be materialised;
    `strides`, `paddings`, `groups`: what the convolution accepts; `strided_circle`: also a stride on a circle it does not divide.
    `orthogonal`: kinds that keep lengths, for `test_orthogonal_layers.py`; `lowest`: the smallest singular value that its
    convolution claims on a circle (None: it claims none).
    """

    name: str
    build: Builder
    kinds: tuple[str, ...] = ("linear", "conv2d")
    square: bool = False
    affine: bool = True
    strides: tuple[int, ...] = (1, 2)
    paddings: tuple[str, ...] = ("zeros", "circular")
    groups: tuple[int, ...] = (1, 2)
    strided_circle: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    orthogonal: tuple[str, ...] = ()
    lowest: float | None = None

    def make(self, kind: str, inputs: int = 4, outputs: int = 4, **options: Any) -> nn.Module:
        """The layer; convolutions are 3×3 (or 3) with padding 1 unless told otherwise."""
        if kind not in ("linear", "tokens"):
            options = {"kernel_size": 3, "padding": 1, **options}
        if kind == "transpose2d" and options.get("stride", 1) > 1:
            options["output_padding"] = options["stride"] - 1
        return self.build(kind, inputs, outputs, **{**self.options, **options})


_SUFFIX = {f"conv{d}d": f"Conv{d}d" for d in (1, 2, 3)} | {"linear": "Linear", "transpose2d": "ConvTranspose2d"}


def by_name(prefix: str) -> Builder:
    """The classes `eqn.<prefix>Linear`, `eqn.<prefix>Conv2d`, …"""
    return lambda kind, inputs, outputs, **options: getattr(eqn, prefix + _SUFFIX[kind])(inputs, outputs, **options)


ALL_KINDS = tuple(_SUFFIX)
FLAT = tuple(kind for kind in ALL_KINDS if kind != "conv3d")
BOTH = ("linear", "conv2d")
BLOCK: dict[str, Any] = {"square": True, "affine": False, "strides": (1,)}

CASES: list[LayerCase] = [
    LayerCase("sn", by_name("SN"), ALL_KINDS),
    LayerCase("aol", by_name("AOL"), ALL_KINDS),
    LayerCase("sr1", by_name("SR"), FLAT, options={"t": 1}),
    LayerCase("sr2", by_name("SR"), ALL_KINDS, options={"t": 2}),
    LayerCase("sr4", by_name("SR"), FLAT, options={"t": 4}),
    LayerCase("aol-out", by_name("AOL"), ("linear",), options={"side": "output"}),
    LayerCase("sr2-out", by_name("SR"), ("linear",), options={"t": 2, "side": "output"}),
    LayerCase("cpl", by_name("CPL"), **BLOCK),
    LayerCase("sll", by_name("SLL"), **BLOCK),
    LayerCase("sll-sr", by_name("SLL"), options={"rescaling": "sr", "t": 3}, **BLOCK),
    LayerCase("sll-tanh", by_name("SLL"), options={"activation": nn.Tanh()}, **BLOCK),
    # even circles there
    LayerCase("bcop", by_name("BCOP"), ALL_KINDS, strided_circle=False, orthogonal=BOTH, lowest=1 - 1e-5),
    LayerCase("rko", by_name("RKO"), ALL_KINDS, strided_circle=False, orthogonal=BOTH),
    LayerCase("bjorck", by_name("Bjorck"), strided_circle=False, orthogonal=BOTH),
    LayerCase("soc", by_name("SOC"), (*BOTH, "transpose2d"), strided_circle=False, orthogonal=BOTH, lowest=1 - 1.1e-3),
    # weights of these convolutions depend on the image size
    LayerCase(
        "cayley", by_name("Cayley"), (*BOTH, "transpose2d"), strided_circle=False, orthogonal=BOTH, lowest=1 - 1e-5
    ),
    LayerCase("bro", by_name("BRO"), strided_circle=False, orthogonal=BOTH, lowest=1 - 1e-5),
]


def inputs_for(kind: str, channels: int = 4, size: int = 6, batch: int = 3, dtype: torch.dtype = torch.float32):
    """A batch of random inputs for a layer of this kind."""
    if kind == "tokens":
        return torch.randn(batch, size, channels, dtype=dtype)
    shape = {"linear": (), "conv1d": (size,), "conv3d": (size - 2, size - 2, size - 1)}.get(kind, (size, size + 1))
    return torch.randn(batch, channels, *shape, dtype=dtype)


def rows(affine: bool | None = None) -> list[tuple[LayerCase, str]]:
    """Every (case, kind), all or only (non-)affine ones."""
    return [(case, kind) for case in CASES if affine in (None, case.affine) for kind in case.kinds]


def quick(case: LayerCase, kind: str) -> bool:
    """Whether the row belongs to the normal run: dense and convolution of each layer, one row of each other kind."""
    if case.name in ("sr1", "sr4", "sll-tanh"):
        return False
    few = {"aol": "conv1d", "sr2": "transpose2d", "bcop": "conv3d", "soc": "transpose2d"}
    return kind in ("linear", "conv2d") or few.get(case.name) == kind


def marked_rows(few: tuple[tuple[str, str], ...] = ()) -> list[Any]:
    """Every (case, kind) as parameters of a test; those that repeat the others are slow, or all but `few`."""
    found = []
    for case, kind in rows():
        normal = (case.name, kind) in few if few else quick(case, kind)
        found.append(pytest.param(case, kind, marks=() if normal else pytest.mark.slow, id=f"{case.name}-{kind}"))
    return found


def geometries(case: LayerCase, kind: str) -> list[dict[str, Any]]:
    """Padding mode × stride × groups as far as the case accepts them; one empty row for dense layers."""
    if kind == "linear":
        return [{}]
    modes = case.paddings if kind != "transpose2d" else ("zeros",)
    return [
        {"stride": stride, "padding_mode": mode, "groups": groups}
        for stride, mode, groups in itertools.product(case.strides, modes, case.groups)
        if case.strided_circle or stride == 1 or mode == "zeros"
    ]
