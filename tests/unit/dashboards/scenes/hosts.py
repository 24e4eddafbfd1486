"""An engine on two hosts: each serves the numbers of its processes, and that of EngineCore all about requests."""

from kvobs.schema import signals
from kvobs.schema.signals import OPEN, SIGNALS, Kind, Signal
from tests.unit.dashboards.scenes.scene import BUILD, OLD, START, UP, Series

HEAD, OTHER = "gpu-1", "gpu-9"
"""The host with EngineCore, and one that has only ranks."""
ENGINE_UP = "kvobs_engine_up"
INFO = 'kvobs_connector_info{index="0",class="C",role="kv_both",load_policy="first",failure_policy="recompute"}'
RANKS: Series = {
    "up": UP, BUILD: UP, ENGINE_UP: UP, START: f"{OLD}x400", INFO: UP,
    "kvobs_link_bytes_per_second": "1000000000+0x400",
    'kvobs_call_duration_seconds_sum{hook="start_load_kv"}': "0+0.3x400",
    'kvobs_call_duration_seconds_count{hook="start_load_kv"}': "0+600x400",
    "kvobs_load_stall_seconds_sum": "0+0.3x400",
    "kvobs_load_stall_seconds_count": "0+600x400",
    'kvobs_overhead_seconds_total{stage="record"}': "0+1x400",
    'kvobs_gc_pause_seconds_total{process="worker"}': "0+0.01x400",
}  # fmt: skip
"""What a host with healthy ranks serves."""
OF_RANKS = (
    "KvobsEngineEnded", "KvobsCallHangs", "KvobsConnectorErrors", "KvobsCorruptLoads", "KvobsInternalErrors",
    "KvobsTelemetryMissing", "KvobsTelemetryDropping", "KvobsScrapedTwice",
)  # fmt: skip
"""Alerts that fire for such a host, too."""

BY_RANKS = frozenset({
    signals.CALL_DURATION, signals.CALL_ERRORS, signals.SLOW_CALLS, signals.LOAD_STALL, signals.SAVE_STALL,
    signals.BLOCK_COPY_DURATION, signals.BLOCK_COPY_BYTES, signals.VERIFIED_BLOCKS, signals.CORRUPT_BLOCKS,
    signals.INTERNAL_ERRORS,
    signals.OVERHEAD_SECONDS, signals.SPANS_DROPPED, signals.GC_PAUSES, signals.CALL_IN_PROGRESS,
    signals.ENGINE_ENDED,
})  # fmt: skip
"""What the processes of ranks count, and what is seen of them."""
BY_EACH_HOST = frozenset(
    {signals.CONNECTOR_INFO, signals.LINK_SPEED, signals.BUILD_INFO, signals.START_TIME, signals.ENGINE_UP}
)
"""What each host serves about the same engine."""


def of_all(which: frozenset[Signal] | None = None) -> dict[str, str]:
    """Return a series of each metric, or of these; all values of one label are there."""
    made: dict[str, str] = {}
    for signal in SIGNALS:
        if which is None or signal in which:
            several = next((name for name, values in signal.labels.items() if values is not OPEN), "")
            for value in signal.labels.get(several, ("",)):
                labels = {name: (values or ("x",))[0] for name, values in signal.labels.items()}
                labels |= {several: value} if several else {}
                labels.pop("connector", None)
                labels |= {"role": "kv_both"} if "role" in labels else {}
                made |= _series(signal, labels)
    return made


def _series(signal: Signal, labels: dict[str, str]) -> dict[str, str]:
    def named(suffix: str = "", **more: str) -> str:
        shown = ",".join(f'{name}="{value}"' for name, value in (labels | more).items())
        return f"{signal.name}{suffix}{{{shown}}}"

    if signal.kind is Kind.HISTOGRAM:
        bounds = [f"{bound:g}" for bound in signal.buckets[::8]]
        buckets = {named("_bucket", le=le): f"0+{6 * (i + 1)}x40" for i, le in enumerate([*bounds, "+Inf"])}
        return buckets | {named("_sum"): "0+9x40", named("_count"): f"0+{6 * len(bounds) + 6}x40"}
    return {named(): "0+6x40" if signal.kind is Kind.COUNTER else "1+0x40"}
