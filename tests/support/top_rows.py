"""Engines and connectors as kvobs top shows them."""

from dataclasses import replace

import hypothesis.strategies as st

from kvobs.export.connector_rows import ConnectorRow, Server
from kvobs.probe.recorder import Recorder
from kvobs.schema import __version__, signals
from kvobs.schema.signals import slot
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
    ConnectorRow, st.sampled_from(("0", "1", "10")), NAMES, NAMES, AMOUNTS, SHARES, *[AMOUNTS] * 3, MAYBE, MAYBE,
    st.none() | COUNTS, st.none() | COUNTS, AMOUNTS, MAYBE, MAYBE, MAYBE, st.floats(0, 1), AMOUNTS, AMOUNTS, AMOUNTS,
    COUNTS, GAINS, AMOUNTS, AMOUNTS, MAYBE, st.none() | st.sampled_from(("0", "127")), SHARES, COUNTS, COUNTS, AMOUNTS,
    st.booleans(), st.none() | NAMES, MAYBE, st.sampled_from([state.name for state in STATES]), NAMES, AMOUNTS,
)  # fmt: skip

SERVERS = st.lists(
    st.builds(
        Server, NAMES, st.none() | NAMES, NAMES, st.just("0.32.0"), st.just("0.1.0"), MAYBE, MAYBE, COUNTS,
        st.none() | COUNTS, st.none() | COUNTS, MAYBE, MAYBE, st.lists(ROWS, max_size=6).map(tuple),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


# fmt: off
CPU = ConnectorRow(
    "0", "cpu", "OffloadingConnector", lookups_per_s=3, hit_share=0.4, loads_per_s=1.2, load_tokens_per_s=224,
    load_bytes_per_s=919e3, save_tokens_per_s=None, evicted_tokens_per_s=None,
    stored_tokens=None, capacity_tokens=None, lost_to_shorter_offer_per_s=0, load_p50_s=0.067, load_p99_s=0.521,
    load_mean_s=0.091, scheduler_s_per_s=0.002, load_stall_s_per_s=0.00005, save_stall_s_per_s=0,
    estimated_loads_per_s=1.2, prefills_seen=90, gain_s_per_s=0.04, failed_loads_per_s=0, exceptions_per_s=0,
    skew_p99_s=0.064, slowest_rank="0", slowest_rank_share=0.67, loads_open=0, saves_held=0, oldest_s=0,
    quarantined=False, call=None, call_s=None,
)
DISK = replace(
    CPU, connector="disk", hit_share=0.27, loads_per_s=0.8, load_tokens_per_s=48, load_bytes_per_s=199e3,
    load_p50_s=0.201, load_p99_s=0.267, load_mean_s=0.205, load_stall_s_per_s=0.0022, estimated_loads_per_s=0.8,
    gain_s_per_s=-0.05, skew_p99_s=None, slowest_rank=None, loads_open=1, oldest_s=0.187,
)
REMOTE = replace(
    CPU, connector="remote", hit_share=0.18, loads_per_s=0.54, load_tokens_per_s=79, load_bytes_per_s=323e3,
    load_p50_s=1.6, load_p99_s=4.2, load_mean_s=1.8, load_stall_s_per_s=0.00051, estimated_loads_per_s=0.54,
    gain_s_per_s=-1.2, skew_p99_s=4.2, slowest_rank="1",
    slowest_rank_share=0.75, saves_held=1, oldest_s=1.2, exceptions_per_s=0.19, state="Slow",
)
# fmt: on
SERVER = Server(
    "localhost:8000", None, "tiny", "0.32.0", __version__, 5.0, 0.0023, 0, 5, 1, 1.2, 4.6, (CPU, DISK, REMOTE)
)
"""What the page about `top` shows."""


def busy(recorder: Recorder) -> None:
    """Let the first connector be asked ten times and load four times, the second fail."""
    for outcome, n in (("hit", 6), ("miss", 1), ("timeout", 1), ("pending", 2)):
        count(recorder, 0, signals.LOOKUPS, n, outcome)
    count(recorder, 0, signals.LOADS, 4, "async", "ok")
    count(recorder, 0, signals.LOAD_TOKENS, 2048)
    count(recorder, 0, signals.LOAD_BYTES, 10**9)
    count(recorder, 0, signals.SAVE_TOKENS, 320, "cpu")
    count(recorder, 0, signals.SAVE_TOKENS, 64, "storage")
    count(recorder, 0, signals.EVICTED_TOKENS, 96, "cpu")
    for medium, tokens in (("cpu", 1000), ("storage", 24)):
        recorder.set_gauge(0, slot(signals.STORED_TOKENS, medium), tokens)
    recorder.set_gauge(0, slot(signals.CAPACITY_TOKENS), 1500)
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
