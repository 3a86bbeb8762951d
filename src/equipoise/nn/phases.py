"""Space-to-depth for kernels: a strided convolution is one of stride 1 on the input's phases (Senderovich et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.maps.geometry import Axis, Lattice, zero_lattice
from equipoise.nn.method import Kernel


class Phases:
    """The kernel of a layer as it acts on the phases of its input: `(g, co, ci, *k) ↔ (g, co, ci·phases, *lengths)`.

    Only zeros are added, and `join(split(K)) = K`. With zero padding the norms agree for every input size. With circular padding
    they do only where the stride divides the size; there the kernel is left alone: its symbol at stride 1 bounds every size.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.lattices: list[Lattice] = []
        for k, s, d in zip(kernel.shape[2:], kernel.stride, kernel.dilation, strict=True):
            lattice = zero_lattice(Axis(k, s if kernel.padding_mode == "zeros" else 1, d))
            assert lattice is not None
            self.lattices.append(lattice)
        self.channels = kernel.shape[1]
        for lattice in self.lattices:
            self.channels *= lattice.phases

    def split(self, K: Tensor) -> Tensor:
        """The kernel on the phases."""
        for dim, lattice in enumerate(self.lattices, start=3):
            if lattice.phases > 1:
                zero = K.new_zeros(()).expand(*K.shape[:dim], 1, *K.shape[dim + 1 :])
                places = [K.shape[dim]] * (lattice.phases * lattice.length)
                for a, (r, q) in enumerate(lattice.taps):
                    places[r * lattice.length + q] = a
                spread = torch.cat([K, zero], dim).index_select(dim, torch.tensor(places, device=K.device))
                K = spread.unflatten(dim, (lattice.phases, lattice.length)).movedim(dim, 3).flatten(2, 3)
        return K

    def join(self, K: Tensor) -> Tensor:
        """The kernel back from its phases."""
        for dim, lattice in reversed(list(enumerate(self.lattices, start=3))):
            if lattice.phases > 1:
                spread = K.unflatten(2, (-1, lattice.phases)).movedim(3, dim).flatten(dim, dim + 1)
                places = [r * lattice.length + q for r, q in lattice.taps]
                K = spread.index_select(dim, torch.tensor(places, device=K.device))
        return K
