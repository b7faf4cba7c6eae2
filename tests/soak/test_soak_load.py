"""Short forms of `benchmarks.soak load` and `latency`: results are right and nobody starves; speed is not asserted."""

from benchmarks.report import Report
from benchmarks.soak_load import latency, load


def test_eight_sessions_at_once_get_right_results_and_each_its_share():
    rounds, wrong = load(Report("load"), sessions=8, processes=2, seconds=5.0, every=5.0)
    assert wrong == 0
    assert len(rounds) == 8
    mean = sum(rounds) / 8
    assert mean >= 2
    assert min(rounds) >= mean / 10


def test_small_reads_beside_uploads_are_right():
    report = Report("latency")
    _, wrong = latency(report, sessions=2, seconds=3.0, phases=1)
    assert wrong == 0
    assert report.figures[0].name == "one session's median read"
