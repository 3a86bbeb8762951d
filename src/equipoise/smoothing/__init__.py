"""Certificates: Lipschitz margins, randomized smoothing, and both together.

The names below are what a user types; everything else is imported from its module: radii in `radii`, confidence bounds and
e-processes in `intervals`, noise in `noise`, simplex maps in `simplex`, deterministic margins in `margins`.
"""

from equipoise.core import average_certified_radius, certified_accuracy
from equipoise.smoothing.certificates import Certificates, read_log
from equipoise.smoothing.classifier import Denoised, SmoothedClassifier
from equipoise.smoothing.conformal import RobustConformal
from equipoise.smoothing.derive import certify_counts, certify_scores
from equipoise.smoothing.intervals import betting, clopper_pearson, empirical_bernstein, hoeffding
from equipoise.smoothing.margins import margin_radius
from equipoise.smoothing.noise import Stream
from equipoise.smoothing.procedures import PROCEDURES, Option, Procedure, Split
from equipoise.smoothing.radii import radius_mono, radius_multi, radius_multi_lipschitz
from equipoise.smoothing.simplex import SimplexMap, choose_map
from equipoise.smoothing.stopping import certify_adaptive
from equipoise.smoothing.tokens import (
    AblatedClassifier,
    AblationCertificates,
    ablation_substitutions,
    certified_substitutions,
)

__all__ = [
    "PROCEDURES", "AblatedClassifier", "AblationCertificates", "Certificates",
    "Denoised", "Option", "Procedure", "RobustConformal", "SimplexMap", "SmoothedClassifier",
    "Split", "Stream", "ablation_substitutions", "average_certified_radius", "betting", "certified_accuracy",
    "certified_substitutions", "certify_adaptive", "certify_counts",
    "certify_scores", "choose_map", "clopper_pearson", "empirical_bernstein", "hoeffding", "margin_radius",
    "radius_mono", "radius_multi", "radius_multi_lipschitz", "read_log",
]  # fmt: skip
