"""Which operations a stored program may call, and what their arguments may ask for.

A file may call the operations that have a Lipschitz rule, their in-place versions, and those listed here: compositions that
are written out before they are bounded, and operations that make or prepare constants. Kernels that trust indices or sizes
which a file can choose (the backward of pooling and of embeddings among them) write outside of their tensors: they are never
called, whoever registered a rule for them.
"""

import functools
import re
from typing import Any

import torch

from equipoise.core import Refused, flat_tensors

_TARGET = re.compile(r"^torch\.ops\.aten\.(\w+)\.(\w+)$", re.ASCII)

#: operations without a rule of their own that networks are exported with
_WRITTEN_OUT = frozenset({
    "__and__", "__or__", "__xor__", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_assert_tensor_metadata",
    "_conj", "_convolution", "_native_batch_norm_legit", "_prelu_kernel", "_unsafe_index", "_weight_norm", "absolute",
    "addcdiv", "addcmul", "addmm", "addmv", "adjoint", "all", "any", "arange", "baddbmm", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "broadcast_tensors", "chunk", "clip", "complex", "concatenate", "conj",
    "cosine_similarity", "cumsum",
    "diag", "diff", "divide", "dot", "einsum", "embedding", "eye", "fft_fft", "fft_fft2", "fft_ifft", "fft_ifft2",
    "fft_irfft", "fft_irfft2", "fft_rfft", "fft_rfft2", "fill", "frobenius_norm", "full", "full_like", "greater",
    "greater_equal", "gru", "gru_cell", "hstack", "imag", "inner", "inverse", "less", "less_equal", "lift",
    "lift_fresh", "linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh", "linalg_householder_product", "linalg_inv",
    "linalg_inv_ex", "linalg_matmul", "linalg_matrix_exp", "linalg_matrix_norm", "linalg_norm", "linalg_pinv",
    "linalg_qr", "linalg_solve", "linalg_solve_ex", "linalg_solve_triangular", "linalg_svd", "linspace",
    "logical_and", "logical_or", "logical_xor", "lstm", "lstm_cell", "mH", "matrix_H", "matrix_exp", "meshgrid",
    "moveaxis", "multiply", "native_dropout", "negative", "new_full", "new_ones", "new_zeros", "norm_except_dim",
    "not_equal", "one_hot", "ones", "ones_like", "outer", "positive", "qr", "real", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "resolve_conj", "resolve_neg", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "scalar_tensor",
    "scaled_dot_product_attention", "split", "split_with_sizes", "std_mean", "subtract", "sum_to_size", "svd", "swapdims",
    "take_along_dim",
    "tensordot", "tril_indices", "triu_indices", "true_divide", "unbind", "unsafe_split", "var_mean", "vdot", "view_as_complex",
    "view_as_real",
    "vstack", "zero", "zeros", "zeros_like",
})  # fmt: skip
#: operations that take as many steps as one of their dimensions is long
_UNROLLED = frozenset({"lstm", "gru", "rnn_relu", "rnn_tanh"})
#: arguments that PyTorch passes as whole numbers, and whose kernels trust them
_ENUMERATIONS = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
_LONGEST_SPLIT = 65_536
_LONGEST_SEQUENCE = 4_096


@functools.cache
def _allowed() -> frozenset[str]:
    # imported here: rules take half a second to import, and only files need them
    from equipoise.lipschitz.rules import known_operations

    ruled = {name.split(".")[1] for name in known_operations() if name.startswith("aten.")}
    return _WRITTEN_OUT | ruled


def find_operation(target: str) -> torch._ops.OpOverload:
    """The operation that a file calls by this name.

    Args:
        target: the name in the file, e.g. `torch.ops.aten.relu.default`.

    Raises:
        Refused: where it is not one of the operations that a file may call; nothing is looked up under that name.
    """
    match = _TARGET.match(target)
    operation, overload = match.groups() if match else ("", "")
    plain = operation if operation.startswith("__") else operation.removesuffix("_")
    if plain not in _allowed() or "backward" in operation:
        raise Refused(
            f"it calls {target[:80]!r}, which is not among the tensor operations that a file may call: those with a "
            "Lipschitz rule and compositions of them; export the model again without decompositions"
        )
    call = getattr(getattr(torch.ops.aten, operation, None), overload, None)
    if not isinstance(call, torch._ops.OpOverload):
        raise Refused(f"it calls {target!r}, which is not an operation of this PyTorch")
    if not all(
        str(returned.type) in ("Tensor", "List[Tensor]") for returned in call._schema.returns
    ):
        raise Refused(f"it calls {target!r}, which does not give tensors")
    return call


def check_arguments_of(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    """Refuse arguments that make an operation unbounded work, or make its kernel compute places outside of its tensors.

    Args:
        target: the operation.
        args: its positional arguments, with tensors without numbers.
        kwargs: its keyword arguments.
    """
    operation = target._schema.name.removeprefix("aten::")
    names = [argument.name for argument in target._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in target._schema.arguments:
        kind = _ENUMERATIONS.get(
            str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        )
        value = values.get(argument.name)
        if kind is not None and value is not None and not isinstance(value, kind):
            raise Refused(
                f"{operation} has {str(value)[:40]!r} as {argument.name}, expected a {kind.__name__}"
            )

    tensors = flat_tensors((args, kwargs))
    if any(str(returned.type) == "List[Tensor]" for returned in target._schema.returns):
        counts = [abs(value) for value in args if type(value) is int]
        sizes = [size for tensor in tensors for size in tensor.shape]
        if tensors and max([*sizes, *counts], default=0) > _LONGEST_SPLIT:
            raise Refused(f"{operation} may make more than {_LONGEST_SPLIT:,} tensors")

    if operation in _UNROLLED and max(tensors[0].shape[:-1], default=0) > _LONGEST_SEQUENCE:
        raise Refused(
            f"{operation} takes more than the {_LONGEST_SEQUENCE:,} steps that are read from a file"
        )

    # resizing kernels compute places from the stated scales, also where these do not fit the stated size
    scales = [value for name, value in values.items() if name.startswith("scale")]
    if "upsample" in operation and values.get("output_size") and any(scales):
        raise Refused(f"{operation} has a size and scales: export it with one of the two")

    # two kernels that read as far as one of their arguments says
    if "attention" in operation and values["key"].shape[:-1] != values["value"].shape[:-1]:
        raise Refused(f"{operation} has keys and values of different lengths")
    if (
        operation == "_weight_norm"
        and args[1].numel() != args[0].shape[args[2] if len(args) > 2 else 0]
    ):
        raise Refused(
            f"{operation} has {args[1].numel()} sizes for weights of shape {list(args[0].shape)}"
        )
