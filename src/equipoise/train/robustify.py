"""An existing network made 1-Lipschitz and trained further: what it was and what it became, in one table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.checkpoints import load_model
from equipoise.conversion import Conversion, Rescaled, export, make_lipschitz
from equipoise.core import InputError, deflate
from equipoise.core.files import read_json, write_json
from equipoise.nn.models import MODELS
from equipoise.nn.wrappers import known_constant
from equipoise.train.build import Part, build_data, require_fit
from equipoise.train.config import Plain, Recipe, read_recipe
from equipoise.train.loop import Report, Result, plan_recipe, run_recipe
from equipoise.train.losses import LOSSES
from equipoise.train.metrics import certified_bound, evaluate

#: how to train unless a recipe says otherwise
_DEFAULT: Plain = {
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

    def to_dict(self) -> Plain:
        """Plain data."""
        modules = [vars(row) for row in self.conversion.rows]
        name = self.result.recipe.name
        return {"name": name, "before": self.before, "after": self.after, "modules": modules}


def robustify(
    source: str | Path,
    run_dir: str | Path,
    *,
    minutes: float | None = None,
    cpu: bool = False,
    progress: Report | None = None,
    **task: Any,
) -> Robustified:
    """Convert a network (`make_lipschitz`), train it further, and measure both on the same data.

    The layers start from the weights they have; the certificate of the result is proved from its own weights. The run goes on
    where it stopped. `before-after.json` and `model.pt2`, the trained network with plain layers, are written beside it. The
    result of a checkpoint of a network of `nn.models` is such a checkpoint again; else `model.safetensors` belongs to
    `make_lipschitz(network, method)`.

    Args:
        source: a checkpoint folder as `equipoise train` writes it, a Hugging Face folder, or `package.module:factory`, your own
            code.
        run_dir: the folder of the new run.
        minutes: as in `run_recipe`.
        cpu: do not use a GPU.
        progress: as in `run_recipe`.
        **task: `weights`, safetensors for the factory's network; `method` of the layers: sr (the default), aol, bcop, cayley,
            …; `data`, as `data.path` of a recipe, where no recipe is given; `recipe`, how to train, its `model` is replaced;
            `changes`, `["epochs=5"]` and the like.
    """
    checked, part, model, net = _prepare(source, **task)
    shape = part.source.input_shape
    certified = certified_bound(model, shape, checked.metrics.rtol)
    before = evaluate(model, part, LOSSES["ce"](), torch.device("cpu"), checked.metrics, certified)
    before["bound"] = certified.upper

    constant = known_constant(net.module)
    if constant is not None:  # a factor that holds for all weights, not only for those at the start
        net.factor.fill_(deflate(1 / max(constant, 1.0)))
    result = run_recipe(checked, run_dir, model=net, minutes=minutes, cpu=cpu, progress=progress)
    after = {**result.final, **result.final.get("test", {})}
    # with plain layers, for one input: every command takes it
    program = torch.export.export(export(net.cpu()), (torch.zeros(1, *shape),))
    torch.export.save(program, Path(run_dir) / "model.pt2")

    assert net.conversion is not None
    names = ("accuracy", "certified_accuracy", "bound")
    columns = [{name: row.get(name) for name in names} for row in (before, after)]
    robustified = Robustified(result, net.conversion, *columns)
    write_json(Path(run_dir) / "before-after.json", robustified.to_dict())
    return robustified


def plan_robustify(source: str | Path, **task: Any) -> Plain:
    """What `robustify` would cost on this machine, as `plan_recipe` says it; nothing is trained.

    Args:
        source: as for `robustify`.
        **task: as for `robustify`.
    """
    checked, _, _, net = _prepare(source, **task)
    return plan_recipe(checked, net)


def _prepare(
    source: str | Path,
    weights: str | Path | None = None,
    method: str = "sr",
    data: str | None = None,
    recipe: str | Path | Mapping[str, Any] | None = None,
    changes: Iterable[str] = (),
) -> tuple[Recipe, Part, Any, Rescaled]:
    """The recipe, the data that the network is measured on, and the network before and after its conversion."""
    if not (Path(source).is_dir() or ":" in str(source)):
        raise InputError(
            f"{source}: expected a checkpoint folder as `equipoise train` writes it, a Hugging Face folder, or "
            "package.module:factory (with --weights); other files do not say how the network is built with other layers"
        )
    model: Any = load_model(source, weights).model
    name = f"{Path(str(source).replace(':', '-')).resolve().name}-{method}"
    default = {**_DEFAULT, "data": {"path": data}, "name": name}
    document = default if recipe is None else read_recipe(recipe).to_dict()
    # wide dense layers cost less
    options: Plain = {"side": "smaller"} if method in ("sr", "aol") else {}
    document["model"] = _converted(Path(source), method, options)
    checked = read_recipe(document, changes)

    parts = build_data(checked.data)
    part = parts.test or parts.validation
    if part is None:
        raise InputError(
            "before and after are measured on a test split or a validation part: the recipe has neither"
        )
    require_fit(model, part.source, str(source))
    example = torch.zeros(1, *part.source.input_shape)
    net = make_lipschitz(model, method=method, example_input=example, **options)
    return checked, part, model, net


def _converted(source: Path, method: str, options: Plain) -> Plain:
    """The recipe's model: for a checkpoint of a builder of `nn.models` the same builder, converted, else where it comes from."""
    config = read_json(source / "config.json") if source.is_dir() else {}
    name = str(config.get("factory")).removeprefix("equipoise.nn.models:")
    if name not in MODELS:
        return {"factory": "equipoise.checkpoints:load_model", "arguments": {"source": str(source)}}
    arguments = {"base": name, "arguments": config.get("arguments")}
    arguments |= {"method": method, "options": options}
    return {"factory": "equipoise.conversion:converted", "arguments": arguments}
