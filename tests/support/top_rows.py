"""Engines and connectors as kvobs top shows them."""

import hypothesis.strategies as st

from kvobs.cli.top.rows import ConnectorRow, Server
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.verdicts import STATES
from tests.support.top_engines import count

MS = 10**6
SHARES = st.none() | st.floats(0, 1)
AMOUNTS = st.floats(0, 8e8)
MAYBE = st.none() | AMOUNTS
GAINS = st.none() | st.floats(-8e8, 8e8)
COUNTS = st.integers(0, 10**6)
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=40)
ROWS = st.builds(
    ConnectorRow, st.sampled_from(("0", "1", "10")), NAMES, NAMES, AMOUNTS, SHARES, *[AMOUNTS] * 4, MAYBE, MAYBE,
    st.floats(0, 1), AMOUNTS, AMOUNTS, GAINS, AMOUNTS, AMOUNTS, MAYBE, st.none() | st.sampled_from(("0", "127")),
    SHARES, COUNTS, COUNTS, AMOUNTS, st.booleans(), st.none() | NAMES, MAYBE,
    st.sampled_from([state.name for state in STATES]), NAMES, AMOUNTS,
)  # fmt: skip

SERVERS = st.lists(
    st.builds(
        Server, NAMES, st.none() | NAMES, NAMES, st.just("0.32.0"), st.just("0.1.0"), MAYBE, MAYBE, COUNTS,
        st.none() | COUNTS, st.none() | COUNTS, MAYBE, MAYBE, st.lists(ROWS, max_size=6).map(tuple),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


def busy(recorder: Recorder) -> None:
    """Let the first child be asked ten times and load four times, the second fail."""
    for outcome, n in (("hit", 6), ("miss", 1), ("timeout", 1), ("pending", 2)):
        count(recorder, 0, signals.LOOKUPS, n, outcome)
    count(recorder, 0, signals.LOADS, 4, "async", "ok")
    count(recorder, 0, signals.LOAD_TOKENS, 2048)
    count(recorder, 0, signals.LOAD_BYTES, 10**9)
    count(recorder, 1, signals.UNUSED_HIT_TOKENS, 64, "other_chosen")
    for ms in (1, 3, 3, 100):
        recorder.observe(0, signals.LOAD_DURATION, ms * MS, "async")
    for hook in ("get_num_new_matched_tokens", "build_connector_meta", "start_load_kv", "reset_cache"):
        recorder.add_call(0, hook, 0, 100 * MS)  # two in the engine's loop, one in a worker's, one in neither
    recorder.observe(0, signals.LOAD_STALL, 10 * MS)
    recorder.observe(0, signals.SAVE_STALL, 30 * MS)
    count(recorder, 0, signals.PREFILL_SAVED, 50 * MS)
    count(recorder, 0, signals.LOAD_WAITED, 80 * MS)
    recorder.observe(0, signals.RANK_SKEW, 3 * MS, "load")
    recorder.observe(0, signals.RANK_SKEW, 3 * MS, "save")
    count(recorder, 1, signals.LOADS, 3, "sync", "failed")
    count(recorder, 1, signals.LOADS, 5, "async", "aborted")


RANKS = [["kvobs_slowest_rank_total", 0, "0", 1], ["kvobs_slowest_rank_total", 0, "1", 3]]
ERRORS = [["kvobs_call_errors_total", 1, hook, "OSError", 2] for hook in ("start_load_kv", "wait_for_save")]
NOW_NS = 1000 * 10**9
GAUGES = {
    (0, signals.IN_FLIGHT, "load"): 2,
    (0, signals.IN_FLIGHT, "save"): 3,
    (0, signals.OLDEST_IN_FLIGHT, "load"): 990 * 10**9,
    (0, signals.OLDEST_IN_FLIGHT, "save"): 995 * 10**9,
    (1, signals.OLDEST_IN_FLIGHT, "load"): 0,
    (1, signals.QUARANTINED): 1,
}
