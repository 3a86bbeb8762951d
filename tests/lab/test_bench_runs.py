from equipoise.runs import open_run
from equipoise_lab.bench import runs as bench
from equipoise_lab.bench.smoothing import small_cnn


def test_rows_have_the_common_form():
    found = [
        bench.overhead_row("small CNN", small_cnn, (1, 28, 28), repeats=1, inputs=2, n=100),
        bench.overhead_row("soft", small_cnn, (1, 28, 28), repeats=1, inputs=2, n=100, procedure="lvm"),
        bench.reading_row(200),
    ]
    for row in found:
        assert set(row) == {"name", "ours", "baseline", "ratio", "goal"}
        assert row["ratio"] > 0


def test_the_made_up_run_is_a_run(tmp_path):
    bench.write_votes(tmp_path, 50, 4)
    run = open_run(tmp_path)
    assert run.finished
    assert len(run.certificates(alpha=0.01, procedure="cohen")) == 50
