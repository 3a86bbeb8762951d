"""What a model makes of a batch: the example it is bounded on, its outputs one by one, and whether samples stay apart."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused

Examples = tuple[Tensor, ...]


@dataclass(frozen=True)
class Settled:
    """The tensors to capture a model on, what is to be said of them, and why there is no bound, if there is none.

    `single` are those of one sample, where the bound must hold for a batch and for one sample alike.
    """

    examples: Examples
    note: str = ""
    doubt: str = ""
    single: Examples | None = None


def settled(model: nn.Module, example_input: Any) -> Settled:
    """One sample, as a batch of one, where the model treats dimension 0 as a batch; else the whole example.

    The whole where there is no batch dimension, where the model does not run on one sample, and, next to one sample,
    where an output has no batch dimension (`x.mean()`): then the bound is the larger of both. There is no
    bound per sample where the samples of a batch mix.
    """
    examples = tuple(x.detach().clone() for x in as_examples(example_input))
    if all(x.dim() < 2 for x in examples):
        return Settled(examples, "the input has no batch dimension: the bound is for the input as a whole")
    single = tuple(x[:1].clone() for x in examples)
    alone = _outputs(model, single)
    count = examples[0].shape[0]
    several = count > 1 and _outputs(model, examples) is not None
    if alone is None:  # with a batch of one the capture says why
        whole = f"the bound is for the example as a whole, a batch of {count}"
        return Settled(examples, f"the model does not run on one sample of the example: {whole}" if several else "")
    generator = torch.Generator().manual_seed(0)
    other = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in single)
    together = _outputs(model, tuple(torch.cat([a, b]) for a, b in zip(single, other, strict=True)))
    lost = together is not None and any(
        a.dim() < 1 or t.dim() < 1 or len(t) != 2 * len(a) for t, a in zip(together, alone, strict=True)
    )
    if together is None or lost:
        what = "an output has no batch dimension" if lost else "the model does not run on two samples"
        if several:
            both = f"the bound is the larger of those for a batch of {count}, as a whole, and for one sample"
            return Settled(examples, f"{what}: {both}", single=single)
        return Settled(single, f"{what}: the bound is for a batch of one")
    poisoned = _outputs(model, tuple(torch.cat([a, a * float("nan")]) for a in single))
    return Settled(single, doubt=_MIXED if _mixed(alone, together, poisoned) else "")


_MIXED = (
    "the output of one sample depends on the other samples of its batch (a mean or reshape over dimension 0?); "
    "a Lipschitz bound per sample does not exist: make the model treat dimension 0 as the batch"
)


def _mixed(alone: list[Tensor], together: list[Tensor], poisoned: list[Tensor] | None) -> bool:
    """Whether a NaN in one sample reaches the other, or the values disagree: a check, not a proof.

    What is proved is the bound of the program for a batch of one.
    """
    for i, a in enumerate(alone):
        if a.numel() == 0:
            continue
        scale = 1e-3 * (1 + float(a.abs().nan_to_num().max()))
        leak = poisoned is not None and bool((poisoned[i][: len(a)].isnan() & ~a.isnan()).any())
        if leak or bool(((together[i][: len(a)] - a).abs() > scale).any()):
            return True
    return False


def _outputs(model: nn.Module, inputs: Examples) -> list[Tensor] | None:
    """The model's floating outputs, or None where it does not run on these inputs."""
    try:
        with torch.no_grad():
            return flat_outputs(model(*(x.clone() for x in inputs)))
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
        return None


def as_examples(example_input: Any) -> Examples:
    """The example as a tuple of floating tensors; anything else is refused with what came."""
    examples = example_input if isinstance(example_input, tuple | list) else (example_input,)
    for x in examples:
        if not isinstance(x, Tensor):
            raise InputError(f"example_input must be a tensor or a tuple of tensors, got {type(x).__name__}")
        if x.dtype not in (torch.float32, torch.float64):
            raise Refused(
                f"example_input has dtype {x.dtype}; the bound is for real-valued inputs: pass float32 or float64 "
                "(for tokens, bound the network that follows the embedding)"
            )
        if x.numel() == 0:
            raise InputError(f"example_input is empty (shape {tuple(x.shape)})")
    if len({x.shape[0] if x.dim() else 1 for x in examples}) > 1:
        raise InputError("the tensors of example_input must share their first (batch) dimension")
    return tuple(examples)


def flat_outputs(output: Any) -> list[Tensor]:
    """The floating tensors of a nested output, in order."""
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
