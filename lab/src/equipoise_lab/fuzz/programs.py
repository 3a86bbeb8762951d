"""Random programs as Python source: what the adversary bounds, attacks, shrinks and prints.

A `Program` is text from the start, so that a violation is a script: the statements of `forward`, the parameters they name, the
shapes and the type of the inputs. Parameters are drawn by their own seeds: dropping a statement leaves the others as they were.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

#: what every program may use; it stands at the head of every script
PREAMBLE = '''import torch
import torch.nn.functional as F
from torch import nn

import equipoise.nn


def noise(shape, seed, kind="gaussian", scale=1.0):
    """Numbers drawn from their own generator."""
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "positive":
        t = t.abs() + 0.1
    if kind == "signs":
        t = t.sign()
    if kind == "sparse":
        t = t * (torch.rand(shape, generator=g) < 0.4)
    return t * scale


def fill(module, seed, kind="gaussian", scale=1.0):
    """Give a module parameters and statistics drawn from their own generators."""
    module = module.double().eval()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            width = p[0].numel() if p.dim() > 1 else 1
            p.copy_(noise(p.shape, seed + i, kind, scale / width**0.5))
        for i, (name, b) in enumerate(module.named_buffers()):
            if "running_mean" in name:
                b.copy_(noise(b.shape, seed + 50 + i))
            if "running_var" in name:
                b.copy_(noise(b.shape, seed + 50 + i, "positive").square())
    return module
'''


@dataclass(frozen=True)
class Statement:
    """One line of `forward`; `target` is the name it binds and `source` the one that can stand in for it."""

    text: str
    target: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Program:
    """A network as source code, with the shapes and type of its inputs and the typical size of their entries."""

    setup: tuple[str, ...]
    body: tuple[Statement, ...]
    returns: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    scales: tuple[float, ...] = (1.0,)
    ball: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(f"x{i}" for i in range(len(self.inputs)))

    @property
    def source(self) -> str:
        """The class as text; parameters that no statement reads are left out.

        >>> body = (Statement("v1 = F.relu(self.m0(x0))", "v1", "x0"),)
        >>> program = Program(("m0 = fill(nn.Linear(3, 2), 7)", "m1 = fill(nn.Linear(9, 9), 8)"), body, ("v1",), ((1, 3),))
        >>> print(program.source)
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.m0 = fill(nn.Linear(3, 2), 7)
        <BLANKLINE>
            def forward(self, x0):
                v1 = F.relu(self.m0(x0))
                return v1
        """
        lines = [s.text for s in self.body]
        read = set(re.findall(r"self\.(\w+)", "\n".join(lines)))
        setup = [f"self.{line}" for line in self.setup if line.split(" ", 1)[0] in read]
        forward = [*lines, f"return {', '.join(self.returns)}"]
        return "\n".join(
            ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()"]
            + [f"        {line}" for line in setup]
            + ["", f"    def forward(self, {', '.join(self.names)}):"]
            + [f"        {line}" for line in forward]
        )

    def build(self) -> nn.Module:
        """The network in evaluation mode, in the program's type."""
        space = namespace()
        exec(compile(self.source, "<program>", "exec"), space)
        network: nn.Module = space["Network"]()
        return network.eval().to(getattr(torch, self.dtype)).requires_grad_(False)

    def draw(self, seed: int, scale: float = 1.0, batch: int = 1) -> tuple[Tensor, ...]:
        """Inputs of the program's type, Gaussian; `batch` of them where there is a batch dimension."""
        g = torch.Generator().manual_seed(seed)
        shapes = [(batch, *s[1:]) if len(s) > 1 else s for s in self.inputs]
        dtype = getattr(torch, self.dtype)
        return tuple(
            (scale * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype) for s in shapes
        )


def namespace() -> dict[str, Any]:
    """A fresh module namespace with the preamble run in it."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(PREAMBLE, "<preamble>", "exec"), space)
    return space


def runs(program: Program) -> bool:
    """Whether the program builds, runs and returns finite floating tensors."""
    try:
        with torch.no_grad():
            out = program.build().double()(*(x.double() for x in program.draw(0)))
    except Exception:  # noqa: BLE001 – text put together at random may fail in any way
        return False
    leaves, _ = torch.utils._pytree.tree_flatten(out)
    return bool(leaves) and all(
        isinstance(t, Tensor)
        and t.is_floating_point()
        and t.numel() > 0
        and bool(torch.isfinite(t).all())
        for t in leaves
    )


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the boldest cuts first: early returns, fewer outputs, a statement left out."""
    bound = [(i, s.target) for i, s in enumerate(program.body) if s.target is not None]
    for i, target in bound[:-1]:
        yield replace(program, body=program.body[: i + 1], returns=(str(target),))
    if len(program.returns) > 1:
        for kept in program.returns:
            yield replace(program, returns=(kept,))
    for i in reversed(range(len(program.body))):
        yield without(program, i)


def without(program: Program, index: int) -> Program:
    """The program without one statement; what it bound is replaced by what it was made of."""
    dropped = program.body[index]
    rest = (*program.body[:index], *program.body[index + 1 :])
    if dropped.target is None or dropped.source is None:
        return replace(program, body=rest)

    def renamed(text: str) -> str:
        return re.sub(rf"\b{dropped.target}\b", str(dropped.source), text)

    body = tuple(
        replace(s, text=renamed(s.text), source=None if s.source is None else renamed(s.source))
        for s in rest
    )
    return replace(program, body=body, returns=tuple(renamed(r) for r in program.returns))


def shrunk(program: Program, still: Callable[[Program], bool], trials: int = 60) -> Program:
    """The smallest program found by dropping statements while `still(program)` holds."""
    progress = True
    while progress and trials > 0:
        progress = False
        for candidate in smaller(program):
            trials -= 1
            if trials <= 0:
                break
            if runs(candidate) and still(candidate):
                program, progress = candidate, True
                break
    return program
