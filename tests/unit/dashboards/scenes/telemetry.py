"""Scenes of kvobs's telemetry: what is not scraped, or twice, lost spans, internal errors, cost."""

from tests.unit.dashboards.scenes.scene import BUILD, OF_ENGINE, UNKNOWN, UP, Fires, Scenes, Series, rare

DROPPED = 'kvobs_spans_dropped_total{where="queue"}'
AGAIN = 'kvobs_build_info{version="0.1.0",vllm_version="0.32.0",job="vllm"}'
ENGINE_UP = "kvobs_engine_up"

GONE = "gpu-1:8000 of job kvobs cannot be scraped. No other kvobs alert can fire for this server."
NO_JOB = "The job kvobs has no targets. No other kvobs alert can fire there."


def cost(record: str, export: str = "0+0.1x400", ranks: int = 0) -> Series:
    return {
        'kvobs_overhead_seconds_total{stage="record"}': record,
        'kvobs_overhead_seconds_total{stage="export"}': export,
        **{f'kvobs_slowest_rank_total{{connector="x",rank="{rank}"}}': UP for rank in range(ranks)},
    }


SCENES = {
    "KvobsJobMissing": Scenes(
        healthy={"up": UP},
        fires=(
            Fires({"up": "1+0x20 stale", BUILD: "1+0x20 stale"}, "40m", NO_JOB),
            Fires({"up": UNKNOWN, BUILD: UNKNOWN}, "20m", NO_JOB),
        ),
        ended={"up": "1+0x20 stale _x78 1+0x300", BUILD: "1+0x20 stale _x78 1+0x300"},
        idle={"up": "0+0x400"},  # another alert's
        quiet=(
            {"up": "1+0x20 _x10 1+0x360", BUILD: "1+0x20 _x10 1+0x360"}, {"up": UNKNOWN, AGAIN: UP},
            {"up": "1+0x20 stale", AGAIN: UP},
        ),  # another job has the metrics
    ),
    "KvobsTelemetryMissing": Scenes(
        healthy={"up": UP, BUILD: UP},
        fires=(
            Fires(
                {"up": UP, BUILD: UNKNOWN}, "30m",
                "gpu-1:8000 of job kvobs is scraped but exposes no kvobs metrics. No other kvobs alert can fire for "
                "this server.",
            ),
            Fires({"up": "1+0x20 0+0x80", BUILD: "1+0x20 stale"}, "35m", GONE),  # the server, or
            Fires({"up": "1+0x20 0+0x80", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x20 stale"}, "35m", GONE),  # exporter
            Fires(
                {"up": UP, BUILD: UP, ENGINE_UP: "1+0x20 0+0x80"}, "35m",
                "gpu-1:8000 of job kvobs is an exporter whose engines have ended. No other kvobs alert can fire for "
                "this server.",
            ),
            # The engine is gone for three minutes, and then its exporter: one alert, since the engine's end.
            Fires({"up": "1+0x25 0+0x80", BUILD: "1+0x25 stale", ENGINE_UP: "1+0x19 0+0x5 stale"}, "31m", GONE),
        ),
        ended={"up": "1+0x20 0+0x79 1+0x300", BUILD: "1+0x20 stale _x78 1+0x300"}, idle={"up": UP, BUILD: UP},
        quiet=(
            {
                "up": "1+0x20 0+0x34 1+0x345", BUILD: "1+0x20 stale _x34 1+0x345",
                ENGINE_UP: "1+0x18 0+0x1 stale _x34 1+0x345",
            },
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale"},  # the target is gone for good
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x18 0+0x1 stale"},
            {"up": UP, BUILD: UP, ENGINE_UP: UP},
            {"up": UP, BUILD: UP, ENGINE_UP: "1+0x20 0+0x380", f'{ENGINE_UP}{{engine="2"}}': UP},  # others run
            {"up": "0+0x36 1+0x300", BUILD: "_x37 1+0x300"},  # a start of 18 minutes
            {"up": "1+0x400", BUILD: "_x37 1+0x300"},
        ),
    ),
    "KvobsScrapedTwice": Scenes(
        healthy={BUILD: UP},
        fires=(Fires(
            {BUILD: UP, AGAIN: UP}, "20m",
            f"2 jobs scrape the kvobs metrics of {OF_ENGINE}. Dashboards show multiples of the real rates, and alerts "
            "fire once per job.",
        ),),
        ended={BUILD: UP, AGAIN: "1+0x100 stale"}, idle={BUILD: UP, AGAIN: UNKNOWN},
        quiet=({BUILD: "1+0x20 stale", BUILD.replace("0.1.0", "0.1.1"): "_x20 1+0x300"},),  # an update
    ),
    "KvobsInternalErrors": rare(
        'kvobs_internal_errors_total{where="merge"}',
        f"kvobs contained {{}} internal errors (merge) on {OF_ENGINE} in the last fifteen minutes. Metrics or spans "
        "are lost; serving is not affected.", {"where": "merge"},
    ),
    "KvobsTelemetryDropping": Scenes(
        healthy={DROPPED: "0+1x400"},
        fires=(Fires(
            {DROPPED: "0+30x400"}, "30m",
            f"kvobs drops 1 spans per second on {OF_ENGINE}. Traces have gaps; metrics are complete.",
        ),),
        ended={DROPPED: "0+30x100 3000+0x300"}, idle={DROPPED: "100000+0x400"},
        quiet=({DROPPED: "0+0x40 500+0x360"},),  # a burst
    ),
    "KvobsTelemetryCost": Scenes(
        healthy=cost("0+1x400"),
        fires=tuple(
            Fires(series, "40m", f"Telemetry uses 30% of one core in one process of {OF_ENGINE}.")
            for series in (cost("0+9x400"), cost("0+0.1x400", "0+9x400"), cost("0+36x400", ranks=4))
        ),
        ended=cost("0+9x100 900+0x300"), idle=cost("100000+0x400"),
        quiet=(cost("0+7.7x400", ranks=64),),  # of 0.4 % each
    ),
}  # fmt: skip
