"""An existing network made 1-Lipschitz and trained further: what it was, what it became, in one table."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.checkpoints import load_checkpoint
from equipoise.conversion import Conversion, make_lipschitz
from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down, format_up
from equipoise.core.digests import unsealed
from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write, make_folder, read_json
from equipoise.core.precision import deflate
from equipoise.nn.constants import known_constant
from equipoise.nn.models import MODELS
from equipoise.train.build import build_data, require_fit
from equipoise.train.config import Recipe, read_recipe
from equipoise.train.loop import Progress, Result, run_recipe
from equipoise.train.losses import cross_entropy
from equipoise.train.metrics import certified_bound, evaluate

_HOME = "equipoise.nn.models:"
#: what is trained unless a recipe says otherwise
_DEFAULT: dict[str, Any] = {
    "loss": {"kind": "lmt", "epsilon": 0.35, "start": 0.05, "temperature": 0.125, "lipschitz": 1.0},
    "optimizer": {"kind": "nadam", "lr": 2e-3, "clip": 3.0},
    "schedule": {"kind": "one-cycle"},
    "epochs": 10,
}


@dataclass(frozen=True)
class Robustified:
    """The finished training, what became of every module, and the figures of the network before and after."""

    result: Result
    conversion: Conversion
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [vars(row) for row in self.conversion.rows]
        return {
            "before": dict(self.before),
            "after": dict(self.after),
            "modules": rows,
            "name": self.result.recipe.name,
        }

    def markdown(self) -> str:
        """Before and after, and what became of every module."""
        lines = [f"# {self.result.recipe.name}", "", "| figure | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {a} | {b} |" for name, a, b in comparison(self.before, self.after)]
        lines += ["", "| module | was | now | |", "|---|---|---|---|"]
        lines += [f"| `{r.name}` | {r.was} | {r.now} | {r.action} {r.note} |" for r in self.conversion.rows]
        return "\n".join([*lines, ""])


def comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (figure, before, after), shares in per cent and rounded down.

    Args:
        before: `accuracy`, `certified_accuracy` by ε, `bound`.
        after: the same of the new network.
    """

    def share(value: float | None) -> str:
        return "–" if value is None else f"{percent(value)}%"

    def bound(value: float | None) -> str:
        return "refused" if value is None else f"≤ {format_up(value, 5)}"

    rows = [("accuracy", share(before.get("accuracy")), share(after.get("accuracy")))]
    one, two = before.get("certified_accuracy") or {}, after.get("certified_accuracy") or {}
    rows += [
        (f"certified at ε = {format_down(float(e), 4)}", share(one.get(e)), share(two.get(e))) for e in {**one, **two}
    ]
    return [*rows, ("Lipschitz constant (ℓ2, proved)", bound(before.get("bound")), bound(after.get("bound")))]


def robustify(
    folder: str | Path,
    run_dir: str | Path,
    *,
    method: str = "sr",
    data: str | None = None,
    recipe: str | Path | Mapping[str, Any] | None = None,
    changes: Iterable[str] = (),
    distill: float = 0.0,
    cpu: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Robustified:
    """Convert the network of a checkpoint (`make_lipschitz`), train it further, and measure both on the same data.

    The layers start from the weights they have; the certificate of the result is proved from its own weights. The run goes on
    where it stopped. `before-after.json` and `before-after.md` are written beside the network.

    Args:
        folder: a checkpoint of a network of `nn.models`, as `equipoise train` writes it.
        run_dir: the folder of the new run.
        method: of the layers: sr, aol, bcop, cayley, …
        data: as `data.path` of a recipe, where no recipe is given.
        recipe: how to train; its `model` is replaced.
        changes: `"epochs=5"` and the like.
        distill: weight of the distance to the original's answers in the loss, from 0 to below 1.
        cpu: do not use a GPU.
        progress: as in `run_recipe`.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"{folder} {what}: the network to start from is a checkpoint folder (config.json and weights), as `equipoise train` "
            "writes it, since it is built again with other layers; exported programs, ONNX files and state dicts do not say "
            "how: build one of equipoise.nn.models, load the weights, and save it with equipoise.checkpoints.save_checkpoint"
        )
    model, shape = load_checkpoint(folder)
    base, arguments = _named(folder)
    if shape is None:
        raise InputError(f"{folder / 'config.json'} does not say the shape of the inputs, so nothing can be bounded")
    options: dict[str, Any] = {"side": "smaller"} if method in ("sr", "aol") else {}  # wide dense layers cost less
    net = make_lipschitz(model, method=method, example_input=torch.zeros(1, *shape), **options)
    assert net.conversion is not None
    known = known_constant(net.module)
    if known is not None:  # a factor that holds for all weights, not only for those at the start
        net.factor.fill_(deflate(1 / max(known, 1.0)))
    start = run_dir / "state" / "start.safetensors"
    if not start.exists():
        from safetensors.torch import save

        make_folder(start.parent)
        weights = {name: value.detach().contiguous().clone() for name, value in net.state_dict().items()}
        atomic_write(start, save(weights))
    document = _document(folder, method, data, recipe, distill)
    document["model"] = {
        "factory": "equipoise.conversion:converted",
        "arguments": {"base": base, "arguments": arguments, "method": method, "options": options},
        "weights": str(start),
    }
    checked = read_recipe(document, changes)
    before = _figures(model, checked, shape, str(folder))
    result = run_recipe(checked, run_dir, cpu=cpu, progress=progress)
    final = result.final.get("test", result.final)
    after = {**{k: final.get(k) for k in ("accuracy", "certified_accuracy")}, "bound": result.final.get("bound")}
    robustified = Robustified(result, net.conversion, before, after)
    atomic_write(run_dir / "before-after.json", json.dumps(robustified.to_dict(), indent=1) + "\n")
    atomic_write(run_dir / "before-after.md", robustified.markdown())
    return robustified


def _named(folder: Path) -> tuple[str, dict[str, Any]]:
    """The builder of `nn.models` that made the checkpoint, and its arguments."""
    config = unsealed(read_json(folder / "config.json"), str(folder / "config.json"))
    name = str(config.get("factory")).removeprefix(_HOME)
    if name not in MODELS:
        raise InputError(
            f"--from takes checkpoints of networks of equipoise.nn.models, {folder} names {config.get('factory')!r}; "
            "convert a network in memory with equipoise.make_lipschitz"
        )
    return name, dict(config.get("arguments") or {})


def _document(
    folder: Path, method: str, data: str | None, recipe: str | Path | Mapping[str, Any] | None, distill: float
) -> dict[str, Any]:
    if not 0 <= distill < 1:
        raise InputError(f"distill must lie in [0, 1), got {distill}")
    if recipe is None:
        if data is None:
            raise InputError("what shall it be trained on? give --data (digits, a file or a folder), or a recipe")
        document: dict[str, Any] = {**_DEFAULT, "data": {"path": data}, "name": f"{folder.resolve().name}-{method}"}
    else:
        document = read_recipe(recipe).to_dict()
    if distill:
        document["noise"] = {"kind": "distillation", "teacher": str(folder), "weight": distill}
    return document


def _figures(model: nn.Module, recipe: Recipe, shape: tuple[int, ...], name: str) -> dict[str, Any]:
    """What the original reaches on the data that the result is measured on."""
    parts = build_data(recipe.data)
    part = parts.test if parts.test is not None else parts.validation
    if part is None:
        raise InputError("before and after are measured on a test split or a validation part: the recipe has neither")
    require_fit(model, part.source, name)
    asked = recipe.metrics
    certified = certified_bound(model, shape, asked.rtol)
    device = torch.device("cpu")
    figures = evaluate(model, part, cross_entropy(), device, asked.batch_size, asked.epsilons, certified)
    return {**{k: figures.get(k) for k in ("accuracy", "certified_accuracy")}, "bound": certified.upper}
