import os
from pathlib import Path

import pytest

from equipoise.core import InputError
from equipoise.smoothing import certify_counts, read_log

DATA = Path(os.environ.get("EQUIPOISE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CERTIFY = DATA / "cohen2019" / "data" / "certify"
needs_logs = pytest.mark.skipif(not CERTIFY.exists(), reason="Cohen's published logs are not here (EQUIPOISE_DATA)")

HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"

# certified accuracy in the table the authors publish next to their logs, at ε = 0.25, 0.5, …, 1.5 (two decimals)
LEVELS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
PUBLISHED = {
    "cifar10/resnet110/noise_0.12/test/sigma_0.12": [0.59, 0.00, 0.00, 0.00, 0.00, 0.00],
    "cifar10/resnet110/noise_0.25/test/sigma_0.25": [0.60, 0.43, 0.27, 0.00, 0.00, 0.00],
    "cifar10/resnet110/noise_0.50/test/sigma_0.50": [0.55, 0.41, 0.32, 0.23, 0.15, 0.09],
    "cifar10/resnet110/noise_1.00/test/sigma_1.00": [0.39, 0.34, 0.28, 0.22, 0.17, 0.14],
}


@needs_logs
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tables(name):
    assert read_log(CERTIFY / name).accuracy(LEVELS).round(2).tolist() == PUBLISHED[name]


@needs_logs
def test_largest_radius_is_that_of_unanimous_votes():
    """100,000 equal votes give the largest radius of the log, at α = 0.01. (The paper says α = 0.001: that would be
    0.953.)"""
    log = read_log(CERTIFY / "cifar10/resnet110/noise_0.25/test/sigma_0.25")
    most = float(certify_counts([100, 0], [100_000, 0], 0.25, 0.01, "cohen").radius)
    assert log.radius.max() == pytest.approx(most, abs=6e-4)


@pytest.mark.parametrize(("text", "message"), [
    ("", "header"),
    ("a\tb\n", "header"),
    (HEADER, "no rows"),
    (HEADER + "0\t1\t2\n", "row"),
    (HEADER + "0\t1\t1\t0.5\t1\tx\n1\tone\t1\t0.5\t1\tx\n", "row 1"),
    (HEADER + "0\t1\t1\t-0.5\t1\tx\n", "radius"),
    (HEADER + "0\t1\t1\tnan\t1\tx\n", "radius"),
    (HEADER + "0\t1\t1\t0.5\t7\tx\n", "correct"),
    (b"\xff\x00", "is not a text file"),
    (None, "cannot read"),
])  # fmt: skip
def test_malformed_logs_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "log").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        read_log(tmp_path / "log")
