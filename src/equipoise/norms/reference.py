"""The slow, obviously right reference: materialise the operator by feeding it every unit vector, then take its SVD.

`norm2_toep`: Gram iteration on the kernel itself, for convolutions with zero padding and any input size.

`K_{t+1}[i1, i2] = Σ_j K_t[j, i1] ⋆ K_t[j, i2]` (self-correlation with full padding) is the kernel of the Gram operator, so
norms of the iterates bound σ₁ as in the dense case. The kernel size doubles, `k_t = 2^t(k − 1) + 1`, so memory grows like 4^t.
"""

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.core import (
    Bound,
    InputError,
    Kind,
    Refused,
    require_number,
    require_one_of,
    require_tensor,
    require_type,
)
from equipoise.core.precision import (
    frobenius,
    full_precision,
    gamma,
    inflate,
    ldexp_up,
    rescaled,
)


def operator_matrix(module: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Dense matrix `(outputs, inputs)` of an affine module in float64: `module(e_i) − module(0)` for every unit vector.

    `input_shape` is the shape of one input without the batch, e.g. `(3, 8, 8)`. The module itself is run, so padding
    mode, stride, groups, hooks and parametrisations are those really used. Memory is inputs × outputs: small cases only.

    Args:
        module: an affine module; a copy of it is run in float64.
        input_shape: shape of one input.

    >>> operator_matrix(nn.Linear(2, 1, bias=False).requires_grad_(False), (2,)).shape
    torch.Size([1, 2])
    """
    require_type(input_shape, (tuple, list), "input_shape")
    size = math.prod(input_shape)
    if size > 20_000:
        raise InputError(
            f"the reference materialises the operator; {size} inputs are too many (at most 20000)"
        )
    is_complex = any(p.is_complex() for p in module.parameters())
    dtype = torch.complex128 if is_complex else torch.float64
    module = copy.deepcopy(module).eval().to(dtype)
    with torch.no_grad():
        zero = module(torch.zeros(1, *input_shape, dtype=dtype)).flatten(1)
        rows = [
            module(part.reshape(-1, *input_shape)).flatten(1) - zero
            for part in torch.eye(size, dtype=dtype).split(1024)
        ]
    return torch.cat(rows).mT


def reference_norm(module: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Spectral norm of a small affine module by SVD of its dense float64 matrix.

    Args:
        module: an affine module.
        input_shape: shape of one input without the batch.

    >>> conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect", bias=False).requires_grad_(False)
    >>> _ = conv.weight.fill_(1 / 9)
    >>> reference_norm(conv, (1, 6, 6)) > 1
    True
    """
    return float(torch.linalg.matrix_norm(operator_matrix(module, input_shape), ord=2))


#: bytes that the columns of one convolution of an iterate with itself may take, and iterations at most
MOST_BYTES, MOST_ITERATIONS = 2**32, 6


def norm2_toep(K: Tensor, iterations: int = 3, readout: Literal["inf", "fro"] = "inf") -> Bound:
    """Upper bound on the norm of the 2-D convolution with `K (out, in, k1, k2)`, zero or circular padding, every input size.

    Read-outs of the last iterate, a square kernel with c channels:

        inf   (max_i Σ|K_t[·, i]|)^(2^-t)           the largest absolute row sum of the operator (Hermitian for t ≥ 1;
                                                    for t = 0 the root of largest row sum times largest column sum)
        fro   (√(k1_t·k2_t)·‖K_t‖_F)^(2^-t)          with the *current* kernel size k_t (the initial one falls below σ₁)

    Args:
        K: the weight.
        iterations: at most 6, since memory grows like 16^t.
        readout: see above.

    Guarantee: computed in float64 with `σ₁(K_t)² ≤ σ₁(computed K_{t+1}) + γ‖Σ|K_t|‖_F²`, so the bound also covers rounding.

    >>> float(norm2_toep(torch.ones(1, 1, 3, 3) / 9, 2)) >= 1
    True

    Reference: Delattre et al. 2024, *Spectral norm of convolutional layers with circular and zero paddings*; errata 2 and 3.
    """
    require_tensor(K, "K", dims=4)
    require_one_of(("inf", "fro"), readout=readout)
    require_number(iterations, "iterations", least=0, whole=True)
    with torch.no_grad(), full_precision():
        A = K.detach().double().cpu()
        if A.shape[0] < A.shape[1]:
            A = A.transpose(0, 1).flip(2, 3)  # the adjoint: fewer channels to iterate on
        c = A.shape[1]
        needed = (
            8.0
            * c
            * math.prod(
                (2**t * (k - 1) + 1) for k in A.shape[2:] for t in (iterations - 1, iterations)
            )
        )
        if iterations > MOST_ITERATIONS or needed > MOST_BYTES:
            raise Refused(
                f"{iterations} iterations on {c} channels need {needed:.1e} bytes at once (the kernel grows like 4^t); "
                f"use fewer (at most {MOST_ITERATIONS}), or spectral_norm, which works in the frequency domain"
            )
        history: list[tuple[int, float]] = []
        for _ in range(iterations):
            A, e = rescaled(A)
            mass = float(frobenius(A.abs().sum((2, 3))))
            history.append((e, inflate(gamma(2 * A[:, 0].numel() + 8, torch.float64) * mass**2)))
            k1, k2 = A.shape[2:]
            swapped = A.transpose(0, 1).contiguous()
            A = torch.conv2d(swapped, swapped, padding=(k1 - 1, k2 - 1))
        A, e = rescaled(A)
        value = _read(A, readout)
    value = inflate(ldexp_up(value, e))
    for e, error in reversed(history):
        value = inflate(ldexp_up(inflate(math.sqrt(value + error)), e))
    return Bound(value, Kind.UPPER, f"norm2_toep, {readout}, t = {iterations}")


def _read(A: Tensor, readout: str) -> float:
    slack = 1 + gamma(A.numel() + 8, torch.float64)
    if readout == "fro":
        return float(frobenius(A.flatten(1))) * math.sqrt(A.shape[2] * A.shape[3]) * slack
    rows, columns = (float(A.abs().sum(dims).max()) for dims in ((1, 2, 3), (0, 2, 3)))
    return math.sqrt(rows * columns) * slack
