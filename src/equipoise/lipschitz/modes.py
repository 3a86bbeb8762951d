"""What a forward can ask about how it is being run, and the answers it gets while it is captured: those of an ordinary call.

A network that branches on `torch.compiler.is_exporting()` shows the exporter another graph than the one that runs, and no
number of compared points tells them apart if they differ elsewhere. So the questions are answered «no» for as long as a
network is captured, for all code but PyTorch's and this package's own, by whatever name the function was imported. Gradients
and inference mode are another matter, since both answers are ordinary: `asked_about` tells what a network wants to know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.fx._symbolic_trace
from torch.overrides import TorchFunctionMode

#: packages whose own branches do not change the map
_TRUSTED = frozenset({"torch", "equipoise"})
#: functions that are false in an ordinary call
_QUESTIONS: tuple[Any, ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch.jit._trace.is_tracing,
    torch._jit_internal.is_scripting,
    torch.onnx.is_in_onnx_export,
    torch.fx._symbolic_trace.is_fx_tracing,
    torch.fx._symbolic_trace.is_fx_symbolic_tracing,
)
_MODES = (torch.is_grad_enabled, torch.is_inference_mode_enabled)
#: attributes that are others where gradients are taken
_GRADIENTS = tuple(
    getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "grad", "output_nr")
)
_LOCK = threading.RLock()


def _questions() -> list[Any]:
    from torch._dynamo.external_utils import is_compiling  # loads the compiler, as every export does

    return list(dict.fromkeys((*_QUESTIONS, is_compiling)))


def _ask(answer: Callable[[], bool] = lambda: False) -> bool:
    return answer()


def _answer(question: FunctionType) -> Callable[[], bool]:
    """The question's own answer for trusted callers, «no» for others."""
    own = FunctionType(question.__code__, question.__globals__)

    def answer() -> bool:
        return _trusted(sys._getframe(2)) and bool(own())

    return answer


def _trusted(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _TRUSTED


@contextlib.contextmanager
def ordinary_answers() -> Iterator[None]:
    """Inside, code that is neither PyTorch's nor this package's is told that nothing is being traced, compiled or exported.

    >>> with ordinary_answers():
    ...     torch.compiler.is_exporting()
    False
    """
    with _LOCK:
        kept = [(f, f.__code__, f.__defaults__) for f in _questions()]
        answers = [_answer(question) for question, _, _ in kept]
        try:
            for (question, _, _), answer in zip(kept, answers, strict=True):
                question.__code__, question.__defaults__ = _ask.__code__, (answer,)
            yield
        finally:
            for question, code, defaults in kept:
                question.__code__, question.__defaults__ = code, defaults


@dataclasses.dataclass
class Asked:
    """What a forward wanted to know: whether gradients are taken, whether this is inference mode."""

    gradients: bool = False
    inference: bool = False


class _Attributes(TorchFunctionMode):
    """Notes the attributes of tensors that tell how the network is run."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _trusted(sys._getframe(1)):
            self.asked.gradients |= func in _GRADIENTS
            self.asked.inference |= func is torch.Tensor.is_inference
        return func(*args, **(kwargs or {}))


def asked_about(run: Callable[[], Any]) -> Asked:
    """What `run` asks outside trusted code, by torch's functions or by the attributes of a tensor."""
    asked = Asked()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument in _MODES and not _trusted(frame):
            asked.gradients |= argument is torch.is_grad_enabled
            asked.inference |= argument is torch.is_inference_mode_enabled

    before: Any = sys.getprofile()
    sys.setprofile(watch)
    try:
        with _Attributes(asked):
            run()
    finally:
        sys.setprofile(before if callable(before) else None)
        if before is not None and not callable(before):
            before.enable()  # cProfile, which is no function
    return asked
