"""Percentiles of durations are within 10 %, and every tool shows the same ones, with the mean."""

import math
import re
from bisect import bisect_left
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dashboards import looks
from dashboards.questions import SELECTION, by_engine
from dashboards.rules import RECORDINGS
from dashboards.site import Site
from kvobs.cli.running import look
from kvobs.cli.scrapes import fetch
from kvobs.export.connector_rows import server_row
from kvobs.export.summary import summarize
from kvobs.probe.recorder import Recorder
from kvobs.schema.percentiles import middle, percentile, quantile
from kvobs.schema.signals import LOAD_DURATION, LOAD_STALL, LOADS, RANK_SKEW, SIGNALS, slot
from kvobs.schema.verdicts import SLOW
from tests.support.promtool import answers
from tests.support.top_engines import exporting

LOAD_TIMES_S = {
    "constant in the demo": [1.24] * 92,
    "constant below the limit of Slow": [0.62] * 144,
    "constant above a bound": [0.2103] * 50,
    "constant below a bound": [1.189] * 50,
    "uniform": list(np.linspace(0.2, 3, 400)),
    "bimodal": [0.021] * 130 + [1.9] * 70,
    "a few late": [0.0043] * 197 + [38.0] * 3,
}


@pytest.mark.tools
@pytest.mark.parametrize("kind", LOAD_TIMES_S)
def test_every_tool_shows_the_true_percentiles_and_the_mean(kind: str, tmp_path: Path) -> None:
    times_s = LOAD_TIMES_S[kind]
    true_s = [sorted(times_s)[math.ceil(q * len(times_s)) - 1] for q in (0.5, 0.99)] + [sum(times_s) / len(times_s)]

    def record(recorder: Recorder) -> None:
        recorder.count(0, slot(LOADS, "async", "ok"), len(times_s))
        for seconds in times_s:
            recorder.observe(0, LOAD_DURATION, round(seconds * 1e9), "async")

    recorder = Recorder(1)
    record(recorder)
    at = recorder.page.layout
    logged = summarize(["cpu"], recorder.words[at.counts : at.rows].tolist(), {})["cpu"]
    with exporting(record, {}, [], ("cpu",)) as address:
        scrape = fetch(url := f"http://{address}/metrics")
        looked = look([url])
    (row,) = server_row("", None, scrape).connectors
    top = [value or 0 for value in (row.load_p50_s, row.load_p99_s, row.load_mean_s)]
    # Prometheus has the same series: none at first, then all of them.
    series = {
        name + "{" + ",".join(f'{k}="{v}"' for k, v in labels if k in {"connector", "mode", "le"}) + "}": f"0 {n:g}x10"
        for (name, labels), n in scrape.values.items()
        if name.startswith(LOAD_DURATION.name)
    }
    asked = [SELECTION.quantile(q, LOAD_DURATION, *by_engine) for q in (0.5, 0.99)]
    boards = [answers(tmp_path, series, expr, at="2m")["cpu"] for expr in asked]
    mean = answers(tmp_path, series, SELECTION.mean(LOAD_DURATION, *by_engine), at="2m")["cpu"]
    rule = RECORDINGS["connector_mode:kvobs_load_duration_seconds:p99_rate5m"]
    assert top == [pytest.approx(true_s[0], rel=0.1), pytest.approx(true_s[1], rel=0.1), pytest.approx(true_s[2])]
    assert [*boards, mean] == pytest.approx(top)
    assert answers(tmp_path, series, rule, at="2m")["cpu"] == pytest.approx(top[1])
    assert [logged["load_p99_ms"], logged["load_mean_ms"]] == pytest.approx([1e3 * n for n in top[1:]], rel=0.005)
    shown = re.findall(r"[\d.]+ m?s", looked.facts[url]["loads"])
    assert [float(n) / (1e3 if unit == "ms" else 1) for n, unit in map(str.split, shown)] == pytest.approx(
        top, rel=0.06
    )
    assert (row.state == "Slow") == (true_s[1] >= 1)
    assert [warning.found for warning in looked.warnings if "is slow" in warning.found] == (
        [f"connector cpu is slow: since the engine's start the p99 of its loads is {top[1]:.3g} s, "
         f"their mean {top[2]:.3g} s"] if true_s[1] >= 1 else []
    )  # fmt: skip


NARROW = (*LOAD_DURATION.buckets, math.inf)


@given(st.lists(st.floats(LOAD_DURATION.buckets[0] * 1.001, 64), min_size=1, max_size=300), st.floats(0.01, 1))
def test_a_percentile_is_within_10_percent_for_any_durations(times_s: list[float], q: float) -> None:
    counts = [0] * len(NARROW)
    for seconds in times_s:
        counts[bisect_left(NARROW, seconds)] += 1
    shown = percentile(LOAD_DURATION, dict(zip(NARROW, accumulate(counts), strict=True)), q)
    rank = q * len(times_s)
    assume(rank > 1e-3 and abs(rank - round(rank)) > 1e-3)
    assert shown == pytest.approx(sorted(times_s)[math.ceil(rank) - 1], rel=0.1)


def test_limits_of_percentiles_are_bounds_of_their_histograms() -> None:
    """Half of what lies in a bucket would otherwise have the wrong state or colour."""
    of_loads = {*SLOW.limits.values(), Site().slow_load_s, *(s.value for s in looks.LOAD_SECONDS.build().steps[1:])}
    assert of_loads <= {*LOAD_DURATION.buckets}
    assert {step.value for step in looks.STALL_SECONDS.build().steps[1:]} <= {*LOAD_STALL.buckets}
    assert [middle(bound) < bound < middle(1.001 * bound) for bound in LOAD_DURATION.buckets] == [True] * 65


def test_durations_of_requests_have_four_buckets_a_doubling() -> None:
    narrow = {signal.name: signal.buckets for signal in SIGNALS if signal.is_narrow}
    assert set(narrow) == {f"kvobs_{name}_seconds" for name in (
        "load_duration", "load_resume_delay", "save_hold", "lookup_delay")}  # fmt: skip
    for bounds in narrow.values():
        assert bounds[0] == pytest.approx(0.001, rel=0.03)
        assert bounds[-1] == 64
        assert [b / a for a, b in pairwise(bounds)] == pytest.approx([2**0.25] * 64, rel=1e-5)


WIDE = (*RANK_SKEW.buckets, math.inf)
COUNTS = st.lists(st.integers(0, 50), min_size=len(WIDE), max_size=len(WIDE))


@given(COUNTS, st.floats(0, 1))
def test_a_quantile_is_linear_between_the_bounds(counts: list[int], q: float) -> None:
    cumulative = [float(n) for n in accumulate(counts)]
    rank = q * cumulative[-1]
    assume(rank not in (0, *cumulative))  # else there may be two bounds to choose from
    buckets = dict(zip(WIDE, cumulative, strict=True))
    assert quantile(buckets, q) == pytest.approx(np.interp(rank, [0, *cumulative[:-1]], [0, *WIDE[:-1]]))
    assert percentile(RANK_SKEW, buckets, q) == quantile(buckets, q)


@pytest.mark.parametrize("buckets", [{}, {1.0: 0.0, math.inf: 0.0}, {1.0: 3.0}, {math.inf: 3.0}])
def test_without_observations_or_bounds_there_is_no_quantile(buckets: dict[float, float]) -> None:
    assert quantile(buckets, 0.5) is percentile(LOAD_DURATION, buckets, 0.5) is None
    assert quantile({1.0: 5.0, 2.0: 4.0, math.inf: 4.0}, 0.5) == 0.5, "a scrape in the middle of an update has one"
