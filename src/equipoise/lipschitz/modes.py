"""A forward while it is captured: what it can ask about how it is run, which tensors share memory, which writes are seen.

A network that branches on `torch.compiler.is_exporting()` shows the exporter another graph than the one that runs, and no
number of compared points tells them apart if they differ elsewhere. So the questions are answered «no» for as long as a
network is captured, for all code but PyTorch's and this package's own, by whatever name the function was imported. Gradients
and inference mode are another matter, since both answers are ordinary: `asked_about` tells what a network wants to know.
"""

import contextlib
import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.fx._symbolic_trace
from torch import fx
from torch.overrides import TorchFunctionMode

from equipoise.core.errors import Refused
from equipoise.lipschitz.places import where

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


_aten = torch.ops.aten
#: operations that may hand back their own input although their schema does not say so
_MAYBE_SAME = {
    _aten.reshape, _aten.contiguous, _aten.flatten, _aten.to, _aten.type_as, _aten.dropout, _aten.alpha_dropout,
    _aten.feature_dropout, _aten.feature_alpha_dropout, _aten.expand_as, _aten.view_as, _aten.movedim, _aten.unflatten,
    _aten.einsum, _aten.pixel_shuffle, _aten.pixel_unshuffle, _aten.channel_shuffle,
}  # fmt: skip


def written_arguments(node: fx.Node) -> list[Any]:
    """The arguments a node writes into: the first of `add_`, the last of `out=` variants."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [value for a, value in _given(node, schema) if a.alias_info is not None and a.alias_info.is_write]


def refuse_mutation(node: fx.Node, moving: set[fx.Node]) -> None:
    """An in-place operation on the input is fine if nothing reads the overwritten memory afterwards under another name."""
    targets: list[fx.Node] = []
    fx.node.map_arg(tuple(written_arguments(node)), targets.append)
    if not targets:
        return
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    own = {node} | {a for a in _aliases(node) if order[a] > order[node] and _descends(a, node)}
    for target in targets:
        aliases = _aliases(target)
        for alias in aliases - own:
            later = [u for u in alias.users if order[u] > order[node] and u not in own]
            if later:
                raise Refused(
                    f"{where(node)} overwrites memory that {later[0].name!r} reads afterwards; "
                    "write the operation out of place (e.g. torch.relu(x) for torch.relu_(x))"
                )
        if any(a.op in ("placeholder", "get_attr") and a not in moving for a in aliases):
            raise Refused(f"{where(node)} changes a parameter or buffer: the map differs from call to call")


def _given(node: fx.Node, schema: Any) -> list[tuple[Any, Any]]:
    """The schema's arguments with the values given for them."""
    return [
        (a, node.args[i] if i < len(node.args) else node.kwargs.get(a.name)) for i, a in enumerate(schema.arguments)
    ]


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Every node that may share memory with this one, as far as the schemas say."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        todo += [user for user in current.users if current in _shared(user)]
        todo += _shared(current)
    return seen


def _shared(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of a node may be, as far as the schemas say."""
    if node.target is operator.getitem:
        return _taken_from(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if getattr(node.target, "overloadpacket", None) in _MAYBE_SAME:
        return node.all_input_nodes[:1]
    if all(r.alias_info is None for r in schema.returns):
        return []
    found: list[fx.Node] = []
    fx.node.map_arg(tuple(v for a, v in _given(node, schema) if a.alias_info is not None), found.append)
    return found


def _taken_from(item: fx.Node) -> list[fx.Node]:
    """What one of several results may share memory with: all of them if they are views, else only itself taken again."""
    source = item.all_input_nodes[0]
    schema = getattr(source.target, "_schema", None)
    if schema is None or any(r.alias_info is not None for r in schema.returns):
        return [source]
    return [u for u in source.users if u.target is operator.getitem and u.args == item.args and u is not item]


def _descends(node: fx.Node, ancestor: fx.Node) -> bool:
    todo, seen = [node], set[fx.Node]()
    while todo:
        current = todo.pop()
        if current is ancestor:
            return True
        if current not in seen:
            seen.add(current)
            todo += _shared(current)
    return False
