"""All experiments by chapter; a new one is a module and a line here. Modules are loaded when their experiment is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable

from equipoise.core.errors import InputError
from equipoise.experiments.experiment import Experiment

#: id → module below `equipoise.experiments`, each with a constant `EXPERIMENT`
MODULES: dict[str, str] = {
    "dense-convergence": "norms.dense_convergence",
    "dense-error-time": "norms.dense_error_time",
    "dense-dimension": "norms.dense_dimension",
    "readouts": "norms.readouts",
    "conv-kernel": "norms.conv_kernel",
    "conv-channels": "norms.conv_channels",
    "conv-input": "norms.conv_input",
    "resnet18-layers": "norms.resnet18_layers",
    "zero-padding": "norms.zero_padding",
    "gradient-memory": "norms.gradient_memory",
    "bound-factor": "norms.bound_factor",
    "pub-ratio": "networks.pub_ratio",
    "reg-histogram": "networks.reg_histogram",
    "local-vs-pub": "networks.local_vs_pub",
    "training-stability": "networks.training_stability",
    "sr-conditioning": "networks.sr_conditioning",
    "weierstrass-gradient": "certified.weierstrass_gradient",
    "quantile-gradient": "certified.quantile_gradient",
    "sll-aol-sr": "certified.sll_aol_sr",
    "rs-new-bound": "certified.rs_new_bound",
    "simplex-mass": "certified.simplex_mass",
    "multi-vs-multilip": "certified.multi_vs_multilip",
    "mono-vs-multi": "certified.mono_vs_multi",
    "cpm": "certified.cpm",
    "bonferroni-counterexample": "certified.bonferroni_counterexample",
    "lvm-rs": "certified.lvm_rs",
    "concentration": "certified.concentration",
    "simplex-maps": "certified.simplex_maps",
    "variance-hardmax": "certified.variance_hardmax",
    "reg-accuracy": "generalisation.reg_accuracy",
    "hessian-bound": "generalisation.hessian_bound",
    "ad-mlp": "generalisation.ad_mlp",
    "ad-width": "generalisation.ad_width",
    "ad-asam": "generalisation.ad_asam",
    "ad-label-noise": "generalisation.ad_label_noise",
    "ad-baek": "generalisation.ad_baek",
    "ad-montecarlo": "generalisation.ad_montecarlo",
    "ad-mixer": "generalisation.ad_mixer",
    "ad-text": "generalisation.ad_text",
}


def find(identifier: str) -> Experiment:
    """The experiment of this identifier; a misspelt one is answered with the nearest."""
    if identifier not in MODULES:
        near = difflib.get_close_matches(identifier, MODULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`equipoise reproduce --list` shows all"
        raise InputError(f"there is no experiment {identifier!r}; {hint}")
    found = importlib.import_module(f"equipoise.experiments.{MODULES[identifier]}").EXPERIMENT
    assert isinstance(found, Experiment)
    assert found.id == identifier
    return found


def every(identifiers: Iterable[str] = ()) -> list[Experiment]:
    """The experiments named, or all of them, in the order of the table."""
    wanted = list(identifiers)
    return [find(name) for name in (wanted or MODULES)]
