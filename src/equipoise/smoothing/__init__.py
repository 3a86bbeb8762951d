"""Certificates: Lipschitz margins, randomized smoothing, and both together."""

from equipoise.core.accuracy import average_certified_radius, certified_accuracy
from equipoise.smoothing.adaptive import ScoreTest, log_e_value, lower_sequence, target_probability
from equipoise.smoothing.bounds import betting
from equipoise.smoothing.certificates import (
    ABSTAIN,
    NOT_COVERED,
    Certificates,
    CertificationLog,
    accuracy_table,
    read_log,
    write_log,
)
from equipoise.smoothing.classifier import SmoothedClassifier, predict_counts
from equipoise.smoothing.derive import certify_counts, certify_scores
from equipoise.smoothing.intervals import clopper_pearson, empirical_bernstein, hoeffding
from equipoise.smoothing.margins import (
    linear_error,
    margins,
    radius_coordinate,
    radius_global,
    radius_last_layer,
    radius_pairs,
)
from equipoise.smoothing.moments import Moments, Partition, class_partition
from equipoise.smoothing.noise import Stream, noise_key
from equipoise.smoothing.procedures import PROCEDURES, Option, Procedure, Split
from equipoise.smoothing.radii import (
    radius_mono,
    radius_mono_lipschitz,
    radius_multi,
    radius_multi_lipschitz,
    radius_per_class,
    radius_weak,
    radius_weak_global,
)
from equipoise.smoothing.rowwise import Denoised
from equipoise.smoothing.simplex import (
    SimplexMap,
    choose_map,
    component_constant,
    hardmax,
    map_grid,
    softmax,
    sparsemax,
    vector_constant,
)
from equipoise.smoothing.stopping import certify_adaptive
from equipoise.smoothing.weierstrass import (
    Estimate,
    Probit,
    component_bound,
    gap,
    gaussian_bound,
    lipschitz_local_bound,
    optimal_sigma,
    range_bound,
    salman_bound,
    smooth_gradient,
    smooth_value,
    vector_bound,
)

__all__ = [
    "ABSTAIN", "NOT_COVERED", "PROCEDURES", "Certificates", "CertificationLog", "Denoised", "Estimate", "Moments",
    "Option", "Partition", "Probit", "Procedure", "ScoreTest", "SimplexMap", "SmoothedClassifier", "Split",
    "Stream", "accuracy_table", "average_certified_radius", "betting", "certified_accuracy", "certify_adaptive",
    "certify_counts", "certify_scores", "choose_map", "class_partition", "clopper_pearson", "component_bound",
    "component_constant", "empirical_bernstein", "gap", "gaussian_bound", "hardmax", "hoeffding", "linear_error",
    "lipschitz_local_bound", "log_e_value", "lower_sequence", "map_grid", "margins", "noise_key", "optimal_sigma",
    "predict_counts", "radius_coordinate", "radius_global", "radius_last_layer", "radius_mono",
    "radius_mono_lipschitz", "radius_multi", "radius_multi_lipschitz", "radius_pairs", "radius_per_class",
    "radius_weak", "radius_weak_global", "range_bound", "read_log", "salman_bound", "smooth_gradient",
    "smooth_value", "softmax", "sparsemax", "target_probability", "vector_bound", "vector_constant", "write_log",
]  # fmt: skip
