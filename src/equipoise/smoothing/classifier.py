"""The smoothed classifier: keyed noise, constant memory, counts and moments in, certificates out.

`Denoised` puts a denoiser in front of a classifier. Votes of a batch are independent only if the network answers every row
by itself; `SmoothedClassifier` compares one row on its first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from scipy.special import betainc
from torch import Tensor, nn

from equipoise.core import (
    POSITIVE,
    Floats,
    InputError,
    Ints,
    Refused,
    as_upper,
    describe,
    floats,
    require_eval,
    require_images,
    require_module,
    require_number,
    require_one_of,
    require_tensor,
)
from equipoise.smoothing.bounds import Moments, bucket_scores
from equipoise.smoothing.certificates import ABSTAIN, Certificates
from equipoise.smoothing.derive import Scores, Votes, derive, joined
from equipoise.smoothing.noise import (
    Levels,
    NoiseName,
    NoiseSpec,
    Sigma,
    Stream,
    fresh_seed,
    is_image,
    noise_key,
    power_of_two,
)
from equipoise.smoothing.planning import Plan
from equipoise.smoothing.procedures import DEFAULT, find_procedure
from equipoise.smoothing.simplex import SimplexMap, choose_map, map_smoothness, plan_map, scores_of

Ids = Sequence[int | str]
Kind = TypeVar("Kind", bound="SmoothedClassifier")


class SmoothedClassifier:
    """`x → argmax_k E[τ_k(f(x + δ))]`, δ ~ N(0, σ²I), with certificates.

    Draws come in chunks of a fixed size; the network always sees exactly one full chunk. So the noise, the logits and
    the counts of draw i depend on (seed, input id, stream, i, chunk_size) only: not on n, on the other inputs, on the
    order or on a restart. Memory does not grow with n (with `interval="betting"`: one score per bucket and draw).

    Args:
        model: maps (batch, *shape) to logits (batch, num_classes), every row by itself; must be in evaluation mode.
        sigma: noise level, in the units of the model's input (put normalisation inside the model); a list has one level per
            channel: the radii are then ℓ2 by the smallest, and an ellipsoid is certified (see `noise`).
        num_classes: number of logits.
        seed: of the noise; default: drawn from the operating system. A seed of your own is stated in the certificates.
        chunk_size: draws per forward pass; part of the key of the noise.
        noise: "grid" draws exact integers on the grid of 8-bit images, or on a grid by a power of two for other data;
            "float" draws floating-point normals, which leaves a gap that certificates state. Default: "grid" if the
            first inputs seen are 8-bit images, else "float"; kept from then on.
        map: the simplex map of soft procedures, if known beforehand; `calibrate` sets it.
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: Sigma,
        num_classes: int,
        *,
        seed: int | None = None,
        chunk_size: int = 100,
        map: SimplexMap | None = None,
        noise: NoiseName | None = None,
    ) -> None:
        if noise is not None:
            require_one_of(("grid", "float"), noise=noise)
        self.model = require_module(model)
        self.levels = Levels.of(sigma)
        self.sigma = self.levels.sigma
        self.num_classes = int(require_number(num_classes, "num_classes", least=2, whole=True))
        self.chunk_size = int(require_number(chunk_size, "chunk_size", least=1, whole=True))

        self.seed = fresh_seed() if seed is None else int(require_number(seed, "seed", whole=True))
        self.user_seed = seed is not None
        self.map = map
        self.noise = noise
        self.noise_given = noise
        self.cells: float | None = None
        self.rowwise_checked = False

    # ---- sampling -------------------------------------------------------------------------------------------------

    def logits(self, x: Tensor, n: int, *, input_id: int | str, stream: Stream) -> Iterator[Tensor]:
        """Logits of n noisy copies of one input, chunk by chunk, `(≤ chunk_size, classes)` each.

        Args:
            x: the input, without batch.
            n: number of draws.
            input_id: key of the noise.
            stream: what the draws are for.
        """
        require_eval(self.model)
        require_number(n, "the number of draws", least=1, whole=True)
        law = self._law(x)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        buffer = torch.empty((self.chunk_size, *x.shape), dtype=dtype, device=x.device)
        for chunk in range(-(-n // self.chunk_size)):
            key = noise_key(self.seed, input_id, stream, chunk)
            # not around the yield: the mode would leak into the caller
            with torch.inference_mode():
                noisy = law.fill(buffer, x, key).to(x.dtype)
                out = self._answer(noisy)
            if out.untyped_storage().data_ptr() == noisy.untyped_storage().data_ptr():
                # the model handed its input back, and the buffer is about to be overwritten
                out = out.clone()
            out = out[: n - chunk * self.chunk_size]
            if not torch.isfinite(out).all():
                raise Refused(
                    f"the network returned NaN or infinity for noisy copies of input {input_id!r}"
                )
            yield out

    def _answer(self, noisy: Tensor) -> Tensor:
        """Logits of a batch; the first one is used to check that rows are answered one by one."""
        if not self.rowwise_checked:
            require_rowwise(self.model, noisy)
            self.rowwise_checked = True
        out = self.model(noisy)
        wanted = (self.chunk_size, self.num_classes)
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.shape != wanted:
            raise InputError(
                f"the model returned {describe(out)}, expected logits: a tensor of real numbers of shape {wanted}"
            )
        return out

    def counts(self, x: Tensor, n: int, *, input_id: int | str, stream: Stream) -> Ints:
        """Votes per class in n draws: all that hard procedures need, and it adds up over chunks.

        Args:
            x: the input, without batch.
            n: number of draws.
            input_id: key of the noise.
            stream: what the draws are for.
        """
        total = torch.zeros(self.num_classes, dtype=torch.int64, device=x.device)
        for out in self.logits(x, n, input_id=input_id, stream=stream):
            total += count_votes(out)
        return total.cpu().numpy()

    def moments(
        self,
        x: Tensor,
        n: int,
        plan: Plan,
        simplex: SimplexMap,
        *,
        input_id: int | str,
        keep: bool = False,
    ) -> tuple[Moments, Floats | None]:
        """Bucket moments of one input's estimation sample under its plan, and the bucket scores if kept.

        Args:
            x: the input.
            n: estimation draws.
            plan: of this input alone.
            simplex: the map.
            input_id: key of the noise.
            keep: whether to return the bucket scores (1, n, B) too.
        """
        sums = np.zeros(())
        samples: list[Floats] = []
        for out in self.logits(x, n, input_id=input_id, stream=Stream.ESTIMATION):
            scores = bucket_scores(scores_of(simplex, out).cpu().numpy()[None], plan.partition)
            part = Moments.of(scores, plan.shift)
            sums = sums + np.stack([part.first, part.second, part.cross])
            if keep:
                samples.append(scores)
        kept = np.concatenate(samples, axis=1) if keep else None
        return Moments(np.array([float(n)]), plan.shift, *sums), kept

    # ---- answers --------------------------------------------------------------------------------------------------

    def predict(
        self, x: Tensor, n: int = 1000, alpha: float = 1e-3, *, ids: Ids | None = None
    ) -> Ints:
        """The majority vote at each input of the batch, or −1: `P(answer ∉ {−1, true majority class}) ≤ alpha`.

        Two-sided binomial test of the two largest counts (Hung & Fithian 2019; Cohen et al. 2019, Predict). On a grid of
        variation v the n draws differ from n exact ones with probability at most `n·v`, which is taken off alpha; there
        the answer is that of the classifier that rounds its input to the grid first, as certificates have it.

        Args:
            x: a batch.
            n: draws per input.
            alpha: risk of a wrong answer per input.
            ids: keys of the noise, default 0 … N − 1.
        """
        if self.map is not None and not self.map.votes:
            raise Refused(
                f"predict tests votes, but this classifier smooths {self.map}: use certify"
            )
        rows = [
            self.counts(xi, n, input_id=i, stream=Stream.PREDICTION)
            for xi, i in self.inputs(x, ids)
        ]
        return predict_counts(np.stack(rows), alpha, n * self.noise_spec(x).variation)

    def calibrate(
        self, x: Tensor, *, n0: int = 100, n: int = 10_000, alpha: float = 1e-3, procedure: str = DEFAULT,
        lipschitz: Any = None, grid: Sequence[SimplexMap] | None = None, ids: Ids | None = None,
    ) -> SimplexMap:  # fmt: skip
        """Fix the simplex map once for all, as the best on average over calibration inputs; sets and returns `map`.

        Args:
            x: calibration inputs.
            n0: calibration draws per input.
            n: estimation draws to plan for.
            alpha: risk to plan for.
            procedure: to plan for.
            lipschitz: sound bound of Lip(f).
            grid: candidate maps, default `map_grid()`.
            ids: keys of the noise.
        """
        logits = self.suited(lipschitz).selection(x, n0, ids, Stream.CALIBRATION)
        network = self.round_constant(lipschitz)
        self.map = choose_map(
            logits, n, self.sigma, alpha, procedure=procedure, lipschitz=network, grid=grid
        )[0]
        return self.map

    def certify(
        self,
        x: Tensor,
        n0: int = 100,
        n: int = 10_000,
        alpha: float = 1e-3,
        procedure: str = DEFAULT,
        *,
        lipschitz: Any = None,
        map: Literal["global", "per-input"] | SimplexMap | None = None,
        interval: Literal["bernstein", "betting"] = "bernstein",
        grid: Sequence[SimplexMap] | None = None,
        ids: Ids | None = None,
    ) -> Certificates:
        """Certificates for a batch (N, *shape), each wrong with probability at most alpha.

        Args:
            x: the inputs.
            n0: selection draws (class, buckets, map, strategy).
            n: estimation draws, independent of the former.
            alpha: risk per input.
            procedure: a row of `PROCEDURES`; the default takes votes, or scores where there is a map.
            lipschitz: sound bound of Lip(f), f: input → logits in ℓ2; gives the Lipschitz-aware radius of soft scores.
            map: "global": the classifier's `map` if set (see `calibrate`), else the best on the pooled selection
                samples of this call; "per-input": the best at each input (thesis); or a map. None: the classifier's
                own, else what the procedure takes by default (votes for "rivals").
            interval: of the soft scores.
            grid: candidate maps, default `map_grid()`.
            ids: keys of the noise, default 0 … N − 1.
        """
        row = find_procedure(procedure)
        require_one_of(("bernstein", "betting"), interval=interval)
        network = self.round_constant(lipschitz)
        if not row.soft and network is not None:
            raise InputError(
                f"{procedure!r} counts votes, which have no Lipschitz constant: use 'rivals', 'lvm' or 'direct'"
            )
        source = self.suited(lipschitz)
        spec = source.noise_spec(x)
        default = map is None and network is None and self.map is None
        logits = np.empty((len(x), 0, self.num_classes))
        maps = [SimplexMap("hardmax")] * len(x)
        about = f"the majority vote of the network under {spec}"
        if row.soft and not (default and row.map == "hardmax"):
            logits = source.selection(x, n0, ids, Stream.SELECTION)
            maps, origin = self._maps(logits, map or "global", n, alpha, procedure, network, grid)
            about = f"the classifier smoothed with {spec} and {origin}"
        setting = spec.setting(alpha, about)
        parts = []
        for k, (xi, name) in enumerate(source.inputs(x, ids)):
            simplex = maps[k]
            sample: Votes | Scores
            if simplex.votes:
                first, second = (
                    source.counts(xi, draws, input_id=name, stream=stream)[None].astype(np.float64)
                    for draws, stream in ((n0, Stream.SELECTION), (n, Stream.ESTIMATION))
                )
                sample = Votes(first, second, np.array([float(n)]))
            else:
                plan = plan_map(
                    simplex, logits[k : k + 1], procedure, n, setting.noise, alpha, network
                )
                moments, kept = source.moments(
                    xi, n, plan, simplex, input_id=name, keep=interval == "betting"
                )
                sample = Scores(
                    plan, moments, map_smoothness(simplex, self.num_classes, network), kept
                )
            parts.append(([k], derive(sample, row, setting)))
        whole = joined(parts, len(x), row.name, setting)
        whole.details["maps"] = [str(m) for m in maps]
        if network is not None:
            whole.details["lipschitz"] = network
        return whole

    def _maps(
        self, logits: Floats, map: str | SimplexMap, n: int, alpha: float, procedure: str, network: float | None,
        grid: Sequence[SimplexMap] | None,
    ) -> tuple[list[SimplexMap], str]:  # fmt: skip
        """The map of every input, and where it comes from in words."""
        if isinstance(map, SimplexMap):
            return [map] * len(logits), f"{map}, given by the caller"
        require_one_of(("global", "per-input"), map=map)
        if map == "global" and self.map is not None:
            return [self.map] * len(logits), f"{self.map}, fixed beforehand"
        own = map == "per-input" or len(logits) == 1
        maps = choose_map(
            logits,
            n,
            self.sigma,
            alpha,
            procedure=procedure,
            lipschitz=network,
            grid=grid,
            per_input=own,
        )
        if not own:
            return (
                maps,
                f"{maps[0]}, chosen on the pooled selection samples of this call; deploy this very map",
            )
        return maps, (
            "the map chosen at each input on its own selection sample: a deployed classifier that chooses anew at x' may use "
            "another map there, and nothing is certified about it"
        )

    def selection(self, x: Tensor, n0: int, ids: Ids | None, stream: Stream) -> Floats:
        """Logits (N, n0, c) of a selection or calibration sample, in float64.

        Args:
            x: a batch.
            n0: draws per input.
            ids: keys of the noise, default 0 … N − 1.
            stream: what the draws are for.
        """
        rows = [
            torch.cat(
                [out.double().cpu() for out in self.logits(xi, n0, input_id=i, stream=stream)]
            ).numpy()
            for xi, i in self.inputs(x, ids)
        ]
        return np.stack(rows)

    def inputs(self, x: Tensor, ids: Ids | None) -> Iterator[tuple[Tensor, int | str]]:
        """The inputs of a batch with the keys of their noise.

        Args:
            x: a batch.
            ids: one key per input, default 0 … N − 1.
        """
        require_images(x)
        names = range(len(x)) if ids is None else ids
        if len(names) != len(x):
            raise InputError(f"got {len(names)} ids for {len(x)} inputs")
        return zip(x, names, strict=True)

    def noise_spec(self, x: Tensor) -> NoiseSpec:
        """The noise law at a batch of inputs, for the setting of their certificates."""
        self._choose_noise(require_images(x))
        size = x[0].numel()
        return NoiseSpec(
            self.levels, self.noise, self.cells, size, self.chunk_size, self.seed, self.user_seed
        )

    def like(self, kind: type[Kind], **changes: Any) -> Kind:
        """The same classifier as another kind, or with some settings changed."""
        names = ("seed", "chunk_size", "map", "noise")
        settings = {name: getattr(self, name) for name in names} | changes
        made = kind(self.model, self.levels.channels or self.sigma, self.num_classes, **settings)
        if made.noise == self.noise:
            made.cells = self.cells
        made.user_seed = self.user_seed
        made.rowwise_checked = self.rowwise_checked
        return made

    def suited(self, lipschitz: Any) -> SmoothedClassifier:
        """The classifier that a Lipschitz constant can be used with: itself without one, else one with float noise."""
        if lipschitz is None or self.noise == "float":
            return self
        if self.noise_given == "grid":
            raise Refused(
                "the Lipschitz-aware radius needs Lipschitz scores, and rounding to the grid is not Lipschitz: use "
                "noise='float', whose gap the certificate states, or leave the constant out"
            )
        return self.like(SmoothedClassifier, noise="float")

    def _choose_noise(self, x: Tensor) -> None:
        """Fix the law of the noise by the first inputs."""
        if self.noise == "float" or self.cells is not None:
            return
        image = x.is_floating_point() and is_image(x.detach().cpu().double().numpy())
        if self.noise is None:
            self.noise = "grid" if image else "float"
        if self.noise == "grid":
            self.cells = 255.0 if image else power_of_two(self.sigma)

    def _law(self, x: Tensor) -> NoiseSpec:
        spec = self.noise_spec(require_tensor(x, "the input")[None])
        self.levels.require_channels(x.shape)
        return spec

    def round_constant(self, lipschitz: Any) -> float | None:
        """The constant in the coordinates in which the noise is round."""
        if lipschitz is None:
            return None
        return as_upper(lipschitz, "Lipschitz constant of the network") * self.levels.stretch


def require_rowwise(model: nn.Module, batch: Tensor) -> None:
    """Refuse a model whose answer to one row depends on the other rows of the batch, or that changes its own buffers.

    Batch norm without running statistics, a mean over the batch or a forward pass that changes buffers make all draws of a
    batch agree, and a binomial bound of such votes means nothing. A check on one batch, not a proof: the middle row is asked
    again beside other rows (draws like the first ones), from the same state of the random generator.

    Args:
        model: the network.
        batch: inputs; the model sees copies of them.
    """
    row = len(batch) // 2
    last = len(batch) - 1
    others = last - torch.arange(len(batch), device=batch.device) % (len(batch) - row)
    others[row] = row
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    answers = []
    for rows in (batch.clone(), batch[others]):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            answers.append(model(rows))
    if not all(
        isinstance(out, Tensor) and out.is_floating_point() and out.dim() for out in answers
    ):
        return  # no logits: refused where they are read

    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(buffer.nan_to_num(), before[name].nan_to_num()):
            raise Refused(
                f"the forward pass changes the buffer {name!r} in evaluation mode, so that no two draws see the same "
                "network; fix its state before certifying"
            )
    one, other = (out[row].double() for out in answers)
    size = float(one.nan_to_num(posinf=0, neginf=0).abs().max())
    if ((one - other).abs() > 100 * torch.finfo(answers[0].dtype).eps * size).any():
        raise Refused(
            "the model's answer to one row depends on the other rows of its batch (batch norm without running statistics, "
            "or a mean over dimension 0?), so its votes are not independent draws and certify nothing"
        )


class Denoised(nn.Sequential):
    """`x → classifier(denoiser(x))`: to smoothing just another network, so every certificate holds for the pair.

    The denoiser maps a noisy batch to a batch of the same shape. Its time is part of every forward pass, its weights part
    of the model's hash. Reference: Salman et al. (2020); Carlini et al. (2023).

    >>> import torch
    >>> pair = Denoised(nn.Identity(), nn.Linear(3, 2)).eval()
    >>> pair(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, denoiser: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.denoiser = require_module(denoiser, "the denoiser")
        self.classifier = require_module(classifier, "the classifier")
        self.training = denoiser.training or classifier.training


def predict_counts(counts: Any, alpha: float, variation: float = 0.0) -> Ints:
    """Class of the largest count where a two-sided binomial test at level alpha tells it from the second, else −1.

    Args:
        counts: votes (..., classes).
        alpha: risk of a wrong answer.
        variation: total variation between the law of *all* draws behind a row and that of exact ones: the risk of any answer
            grows by at most that, so the test is made at `alpha − variation`.

    >>> predict_counts([[60, 40, 0], [95, 3, 2]], 0.001).tolist()
    [-1, 0]
    """
    require_number(alpha, "alpha", least=POSITIVE, most=1)
    array = floats(counts)
    ordered = np.sort(array, axis=-1)
    most = ordered[..., -1]
    next_most = ordered[..., -2]
    # P(Bin(m, ½) ≥ most) = I_½(most, next + 1), doubled, and rounded up
    tail = np.where(most > 0, betainc(np.maximum(most, 1), next_most + 1, 0.5), 1.0)
    sure = 2 * tail * (1 + 1e-10) <= np.nextafter(alpha - variation, -1.0)
    return np.where(sure, array.argmax(axis=-1), ABSTAIN)


def count_votes(out: Tensor) -> Tensor:
    """How many rows have their largest logit in each class."""
    return torch.bincount(out.argmax(dim=1), minlength=out.shape[1])
