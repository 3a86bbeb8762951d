"""What every package builds on: bounds as types, errors, checks of arguments, floating-point arithmetic with error terms.

The names are imported from here; `core.files`, which needs pydantic, is imported by itself.
"""

from equipoise.core.accuracy import (
    Floats,
    Ints,
    Mask,
    average_certified_radius,
    certified_accuracy,
    certified_at,
    floats,
    percent,
    round_levels,
)
from equipoise.core.bounds import Bound, Bracket, Kind, Shape, as_upper, format_down, format_up
from equipoise.core.checks import (
    CLASS_NUMBERS,
    POSITIVE,
    describe,
    require_counts,
    require_eval,
    require_images,
    require_labels,
    require_module,
    require_number,
    require_one_of,
    require_positive,
    require_tensor,
    require_type,
)
from equipoise.core.errors import (
    EquipoiseError,
    InputError,
    Refused,
    did_you_mean,
    explained,
    guarded,
    one_line,
    optional,
    unlogged,
)
from equipoise.core.modules import (
    along,
    by_construction,
    constructed,
    evaluating,
    flat_outputs,
    flat_tensors,
    fresh_strides,
    hooked,
    is_unmodified,
    run_on,
    tensor_slots,
)
from equipoise.core.precision import (
    deflate,
    float64,
    frobenius,
    full_precision,
    gamma,
    inflate,
    or_one,
    proving,
    rescaled,
    root,
    row_lengths,
    safe_root,
    single_down,
    unit_roundoff,
)
