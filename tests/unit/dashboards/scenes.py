"""The scenes that each alert goes through: what its series look like when all is well, when it must fire, and after.

A scrape gap, a new Prometheus, 64 engines and two clusters follow from these, for every alert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Series = Mapping[str, str]
"""What samples each series has, one every 30 s, in promtool's notation: a+bxN is a, and N more, b apart."""

OF_CHILD = "disk on engine 0 of gpu-1:8000 (org/model a&b)"
OF_ENGINE = "engine 0 of gpu-1:8000 (org/model a&b)"


@dataclass(frozen=True)
class Fires:
    """Series that fire, when, and what the alert says; ``more`` are labels beside those of what it is about.

    ``until`` is a second moment at which it still fires, and what it says then.
    """

    series: Series
    at: str
    says: str
    more: Mapping[str, str] = field(default_factory=dict)
    until: tuple[str, str] | None = None


@dataclass(frozen=True)
class Scenes:
    """For one alert: healthy traffic, what fires, and what doesn't, at any time."""

    healthy: Series
    fires: tuple[Fires, ...]
    ended: Series
    """It fires in the 45th minute, and the trouble ends in the 50th: nothing fires from the 70th minute on."""
    idle: Series
    """All stands still, after trouble long ago: looked at from the 40th minute on."""
    restart: Series
    quiet: tuple[Series, ...] = ()


NOTHING: Series = {}
UP, UNKNOWN = "1+0x400", "_x400"


def rare(metric: str, says: str, more: Mapping[str, str] = NOTHING, beside: Series = NOTHING) -> Scenes:
    """Something that must not happen at all, and whose series begins with its first event."""
    return Scenes(
        healthy=beside,
        fires=(
            Fires({metric: "_x40 1+0x20"}, "22m", says.format("1"), more),
            Fires({metric: "1+0x100 2+0x20"}, "52m", says.format("1"), more),
            Fires({metric: "3+0x60 _x2 1+0x20"}, "34m", says.format("1"), more),  # the first after a restart
            # The first, a minute after the engine's start: a new pod.
            Fires({metric: "_x42 1+0x20", "up": "_x40 1+0x100", BUILD: "_x40 1+0x100"}, "23m", says.format("1"), more),
            # The first, while nothing was scraped for ten minutes, which began after the engine.
            Fires({metric: "_x60 1+0x40", BUILD: "1+0x40 _x19 1+0x100"}, "32m", says.format("1"), more),
        ),
        ended={metric: "_x88 1+0x300"},
        idle={metric: "3+0x400"},
        restart={metric: "3+0x100 _x4", BUILD: "1+0x100 _x4 1+0x300"},
        quiet=(
            {metric: "3+0x40 _x70 3+0x290", BUILD: "1+0x40 _x70 1+0x290"},  # Prometheus was away for 35 minutes,
            {metric: "3+0x40 _x40 3+0x320", BUILD: "1+0x40 _x40 1+0x320"},  # for 20,
            {metric: "_x40 50+0x360", BUILD: "_x40 1+0x360"},  # or had not begun
        ),
    )


def loads(failed: str, ok: str, policy: str = "recompute") -> Series:
    of = {"failed": failed, "ok": ok, "aborted": "0+50x400"}
    counted = {f'kvobs_loads_total{{mode="async",outcome="{outcome}"}}': values for outcome, values in of.items()}
    return {**counted, f'kvobs_connector_info{{index="0",failure_policy="{policy}"}}': UP}


def failing(policy: str, ending: str) -> Scenes:
    """A connector whose loads fail, of engines with this ``failure_policy``."""

    def of(failed: str, ok: str) -> Series:
        return loads(failed, ok, policy)

    says = f"{{}} of the loads from {OF_CHILD} failed in the last five minutes. {ending}"
    other = "fail" if policy == "recompute" else "recompute"
    return Scenes(
        healthy=of("0+1x400", "0+99x400"),
        fires=(
            Fires(of("0+1x400", "0+9x400"), "20m", says.format("10%")),
            Fires(of("_x20 1+1x400", "0+0x400"), "20m", says.format("100%")),
            Fires(of("_x20 " + "1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 5 5 5 5 6 6 6 6 7 7 7 7 8 8 8 8", "0+0x400"), "25m",
                  says.format("100%")),  # one in two minutes
        ),
        ended=of("0+10x100 1000+0x300", "0+90x100 9000+100x300"),
        idle=of("500+0x400", "500+0x400"),
        restart=of("0+1x60 0+1x300", "0+99x60 0+99x300"),
        quiet=(
            of("0+0x40 1+0x360", "0+0x400"),  # one failure, and no other load
            of("0+0x40 1+0x360", "0+0x50 1+0x350"),  # one of two
            of("0+0x40 1+0x8 2+0x352", "0+1x400"),  # two of 24
            of(ONE_IN_FOUR_MINUTES, "0+0x400"),  # alone
            loads("0+1x400", "0+9x400", other),  # another alert's
        ),
    )  # fmt: skip


ONE_IN_FOUR_MINUTES = " ".join(f"{number}x7" for number in range(50))


def engines(policy: str, *numbers: tuple[str, str]) -> Series:
    """Return failed and good loads of several engines: of the one that the scene is about, and of others."""
    found: dict[str, str] = {}
    for place, (failed, ok) in enumerate(numbers):
        other = f',instance="gpu-{100 + place}:8000"}}' if place else "}"  # beyond those of any test
        found |= {name.replace("}", other): values for name, values in loads(failed, ok, policy).items()}
    return found


def many_failing(policy: str, ending: str) -> Scenes:
    """Many engines of a cluster whose loads fail, with this ``failure_policy``."""
    well, bad = ("0+1x400", "0+99x400"), ("0+1x400", "0+9x400")
    thin = [(ONE_IN_FOUR_MINUTES, ok) for ok in ("0+0x400", "0+0.125x400", "0+0.25x400")]
    worse = [("0+2x400", "0+8x400"), ("0+3x400", "0+7x400")]
    says = (
        f"On {{}} of the engines of job kvobs that load from disk, these loads fail. {ending} "
        "What the engines share may be the cause: the store, the network, a new version. Worst: {}."
    )
    worst = "gpu-102:8000/0 gpu-101:8000/0 gpu-1:8000/0"
    other = "fail" if policy == "recompute" else "recompute"
    return Scenes(
        healthy=engines(policy, well),
        fires=(
            Fires(engines(policy, bad, *worse, *[well] * 9), "20m", says.format("25%", worst)),
            # Idle engines do not hide it, nor do those that never had a load.
            Fires(
                engines(policy, bad, *worse, *[("5+0x400", "90+0x400"), ("_x400", "_x400")] * 9),
                "20m",
                says.format("100%", worst),
            ),
            # No engine has enough of them for an alert of its own.
            Fires(
                engines(policy, *thin),
                "30m",
                says.format("100%", "gpu-1:8000/0 gpu-101:8000/0 gpu-102:8000/0"),
            ),
        ),
        ended=engines(policy, *[("0+1x100 100+0x300", "0+9x100 900+10x300")] * 3),
        idle=engines(policy, *[("500+0x400", "500+0x400")] * 3),
        restart=engines(policy, *[("0+1x60 0+1x300", "0+99x60 0+99x300")] * 3),
        quiet=(
            engines(policy, bad, bad),  # alerts of their own are enough
            engines(policy, *[bad] * 3, *[well] * 12),  # a fifth
            engines(policy, *[("0+0x40 1+0x360", "0+0x400")] * 9),  # one load each
            engines(policy, *[(f"0+0x{20 * i + 1} 1+1x20 21+0x400", "0+10x400") for i in range(5)]),  # in turn
            engines(other, *[bad] * 3),  # another alert's
        ),
    )


def load_times(within_second: str, total: str, tokens: str) -> Series:
    bounds = {"0.268435456": "0+0x400", "1.073741824": within_second, "4.294967296": total, "+Inf": total}
    buckets = {f'{LOAD_TIME}_bucket{{mode="async",le="{le}"}}': values for le, values in bounds.items()}
    loaded = {'kvobs_loads_total{mode="async",outcome="ok"}': total, "kvobs_load_tokens_total": tokens}
    return {**buckets, f'{LOAD_TIME}_count{{mode="async"}}': total, **loaded}


def ranks(first: str, second: str, skew: str, count: str) -> Series:
    return {
        'kvobs_slowest_rank_total{rank="0"}': first,
        'kvobs_slowest_rank_total{rank="1"}': second,
        'kvobs_rank_skew_seconds_sum{kind="load"}': skew,
        'kvobs_rank_skew_seconds_count{kind="load"}': count,
    }


def tokens(unused: str, offered: str, admitted: str = "0+1000x400") -> Series:
    return {
        'kvobs_unused_hit_tokens_total{reason="other_chosen"}': unused,
        "kvobs_offered_tokens_total": offered,
        "kvobs_admitted_tokens_total": admitted,
    }


def paying(slower: str, loads: str) -> Series:
    return {
        "kvobs_loads_slower_than_computing_total": slower,
        'kvobs_loads_total{mode="async",outcome="ok"}': loads,
    }


def cost(record: str, merge: str = "0+0.1x400", ranks: int = 0) -> Series:
    return {
        'kvobs_self_seconds_total{where="record"}': record,
        'kvobs_self_seconds_total{where="merge"}': merge,
        **{f'kvobs_slowest_rank_total{{connector="x",rank="{rank}"}}': UP for rank in range(ranks)},
    }


def quarantined(values: str, steps: str = "0+0.01x400") -> Series:
    return {"kvobs_quarantined": values, 'kvobs_self_seconds_total{where="record"}': steps}


def scheduler_times(lookups: str, steps: str = "0+0.3x400", of_a_worker: str = "0+29x400") -> Series:
    """Return seconds in three hooks; 30 of a sample's seconds are the whole time."""
    return {
        'kvobs_call_duration_seconds_sum{hook="get_num_new_matched_tokens"}': lookups,
        'kvobs_call_duration_seconds_sum{hook="build_connector_meta"}': steps,
        'kvobs_call_duration_seconds_sum{hook="start_load_kv"}': of_a_worker,
    }


def scheduler_share(healthy: str, bad: str, share: str, says: str, *quiet: Series) -> Scenes:
    return Scenes(
        healthy=scheduler_times(healthy),
        fires=(
            Fires(
                scheduler_times(f"0{bad}x100"), "20m", f"The scheduler spent {share} of the last five minutes {says}"
            ),
        ),
        ended=scheduler_times(f"0{bad}x100 {int(bad[1:]) * 100}{healthy[1:]}"),
        idle=scheduler_times("400+0x400", "5+0x400", "5+0x400"),
        restart=scheduler_times("0+0.3x100 _x4 0+0.3x300", "0+0.3x100 _x4 0+0.3x300", "0+0.3x100 _x4 0+0.3x300"),
        quiet=quiet,
    )


def unfinished(kind: str, says: str, restart: str, *quiet: Series) -> Scenes:
    """Return the scenes of what has been in progress for long, by the time at which the oldest began."""
    oldest = OLDEST.replace("save", kind)
    return Scenes(
        healthy={oldest: "0+30x400"},
        fires=(Fires({oldest: "0+0x400"}, "20m", f"The oldest {kind} of {OF_CHILD} {says}", {"kind": kind}),),
        ended={oldest: "1200+0x100 NaN+0x300"},
        idle={oldest: "NaN+0x400"},
        restart={oldest: restart},
        quiet=quiet,
    )


LOAD_TIME = "kvobs_load_duration_seconds"
OLDEST = 'kvobs_oldest_in_flight_timestamp_seconds{kind="save"}'
OLDEST_LOAD = OLDEST.replace("save", "load")
OLDEST_LOOKUP = OLDEST.replace("save", "lookup")
IN_CALLS = f"in calls into {OF_CHILD}. No step runs during such a call"
DROPPED = 'kvobs_spans_dropped_total{where="queue"}'
BUILD = 'kvobs_build_info{version="0.1.0",vllm_version="0.32.0"}'
AGAIN = 'kvobs_build_info{version="0.1.0",vllm_version="0.32.0",job="vllm"}'
ENGINE_UP = "kvobs_engine_up"
STUCK = 'kvobs_stuck_transfers_total{rank="1"}'
RANK_1 = {"rank": "1"}

GONE = "gpu-1:8000 of job kvobs can't be scraped. No other kvobs alert can fire for this server."
NO_JOB = "The job kvobs has no target. No other kvobs alert can fire there."
STUCK_SAYS = (
    f"Rank 1 has not reported {{}} transfers of {OF_CHILD} that other ranks finished more than `stuck_after_s` ago, in "
    "the last fifteen minutes or longer ago and still unfinished. Their requests wait, or their blocks stay held."
)
_STUCK = rare(STUCK, STUCK_SAYS, RANK_1)
SLOW_SAYS = (
    f"The p99 of async loads from {OF_CHILD} is about 2.684s (thresholds: 1.073741824 s, and 0.1 s per 1000 tokens of "
    "an average load). Requests wait that long for their first token."
)

SCENES = {
    "KvobsEnginesFailingRequests": many_failing("fail", "Their requests fail: kv_load_failure_policy is fail."),
    "KvobsRequestsFailing": failing("fail", "Their requests fail: kv_load_failure_policy is fail."),
    "KvobsFailedSyncLoads": rare(
        "kvobs_failed_sync_loads_total",
        f"{{}} synchronous loads from {OF_CHILD} failed in the last fifteen minutes. Blocks that other connectors "
        "saved in the same step may be wrong, and so are answers that use them. Other connectors: cpu.",
        beside={"kvobs_connector_info": UP},
    ),
    "KvobsStuckTransfers": Scenes(
        healthy={},
        fires=(
            *_STUCK.fires,
            # For as long as it is unfinished, and no longer.
            Fires(
                {STUCK: "_x40 1+0x400", OLDEST_LOAD: "_x30 900+0x400"},
                "30m",
                STUCK_SAYS.format("1"),
                RANK_1,
                until=("110m", STUCK_SAYS.format("1")),
            ),
        ),
        ended={STUCK: "_x40 1+0x400", OLDEST_LOAD: "_x30 900+0x70 NaN+0x300"},
        idle={STUCK: "3+0x400", OLDEST_LOAD: "NaN+0x400"},
        restart={STUCK: "3+0x100 _x4", OLDEST_LOAD: "NaN+0x100 _x4 NaN+0x300"},
        quiet=(
            *_STUCK.quiet,
            {STUCK: "3+0x400", OLDEST_LOAD: "0+0x400"},  # something else is old
        ),
    ),
    "KvobsLoadUnfinished": unfinished(
        "load",
        "has been in progress for 20m 0s. Its request waits until all ranks have reported it.",
        "0+0x6 NaN+0x2 _x4 420+30x300",
        {OLDEST: "0+0x400"},
        {OLDEST_LOOKUP: "0+0x400"},
    ),
    "KvobsConnectorBlocksEngine": scheduler_share(
        "0+0.3x400",
        "+18",
        "61%",
        f"{IN_CALLS}: all requests of this engine wait.",
        scheduler_times("0+12x400"),
    ),
    "KvobsEnginesFailing": many_failing("recompute", "Their tokens are recomputed."),
    "KvobsConnectorFailing": failing("recompute", "Their tokens are recomputed."),
    "KvobsConnectorBlocksScheduler": scheduler_share(
        "0+0.3x400",
        "+6",
        "21%",
        f"{IN_CALLS}.",
        scheduler_times("0+0.3x40 12+18x2 48+0.3x300"),  # a minute of it
        scheduler_times("0+0.3x400", of_a_worker="0+100x400"),
    ),
    "KvobsLookupUnanswered": unfinished(
        "lookup",
        "has been answered 'not yet' for 20m 0s. Its request waits for the answer.",
        "0+0x4 NaN+0x4 _x4 420+30x300",
        {OLDEST: "0+0x400"},
        {OLDEST_LOAD: "1200+30x400"},
    ),
    "KvobsConnectorQuarantined": Scenes(
        healthy=quarantined("0+0x400"),
        fires=(
            Fires(
                quarantined("0+0x20 1+0x40"),
                "20m",
                f"{OF_CHILD} was in quarantine for 100% of the last five minutes, because it fails. Requests are "
                "served without this cache.",
            ),
            Fires(
                quarantined("1 1 0 1 1 1 0 1 1 1 1 0 1 1 1 0 1 1 1 1 1 1 0 1 1 1 0 1 1 1"),  # trials
                "10m",
                f"{OF_CHILD} was in quarantine for 81.82% of the last five minutes, because it fails. Requests are "
                "served without this cache.",
            ),
        ),
        ended=quarantined("0+0x40 1+0x60 0+0x300"),
        idle=quarantined("1+0x400", "5+0x400"),  # no request, no probation
        restart=quarantined("0+0x20 1+0x2 _x2 0+0x360"),
        quiet=(
            quarantined("0+0x20 1+0x3 0+0x60"),
            quarantined("0+0x20 1+0x300", "0+0.01x20 0.2+0x300"),  # the last request brought it into quarantine
        ),
    ),
    "KvobsConnectorErrors": rare(
        'kvobs_call_errors_total{hook="get_num_new_matched_tokens",error_type="TimeoutError"}',
        f"{OF_CHILD} raised {{}} exceptions in the last fifteen minutes. If it is not in the option isolate, one "
        "exception can end the engine.",
    ),
    "KvobsLoadsSlow": Scenes(
        healthy=load_times("0+99.5x400", "0+100x400", "0+100000x400"),
        fires=(
            Fires(load_times("0+98x400", "0+100x400", "0+100000x400"), "30m", SLOW_SAYS, {"mode": "async"}),
            # Nearly all of 20 thousand tokens, which is 0.13 s a thousand.
            Fires(load_times("0+98x400", "0+100x400", "0+2000000x400"), "30m", SLOW_SAYS, {"mode": "async"}),
        ),
        ended=load_times("0+98x100 9800+100x300", "0+100x100 10000+100x300", "0+100000x100 10000000+100000x300"),
        idle=load_times("100+0x400", "1000+0x400", "1000+0x400"),
        restart=load_times("0+99.5x60 0+99.5x300", "0+100x60 0+100x300", "0+100000x60 0+100000x300"),
        quiet=(
            load_times("0+0x400", "0+1x400", "0+1000x400"),  # all slow, ten in five minutes
            load_times("0+0x400", "0+100x400", "0+12000000x400"),  # all, of 120 thousand tokens
        ),
    ),
    "KvobsSaveBacklog": Scenes(
        healthy={OLDEST: "0+30x400"},
        fires=(
            Fires(
                {OLDEST: "0+0x400"},
                "20m",
                f"The oldest promised save of {OF_CHILD} has been in progress for 20m 0s. Other requests cannot "
                "use its blocks.",
                {"kind": "save"},
            ),
        ),
        ended={OLDEST: "1200+0x100 NaN+0x300"},
        idle={OLDEST: "NaN+0x400"},
        restart={OLDEST: "0+0x8 NaN+0x2 _x4 480+30x100"},
        quiet=({OLDEST_LOAD: "0+0x400"},),
    ),
    "KvobsSlowestRank": Scenes(
        healthy=ranks("0+10x400", "0+10x400", "0+4x400", "0+20x400"),
        fires=(
            Fires(
                ranks("0+1x400", "0+19x400", "0+4x400", "0+20x400"),
                "60m",
                f"Rank 1 was last in 95% of the loads and saves of {OF_CHILD} in the last fifteen minutes; all "
                "other ranks waited for it.",
                RANK_1,
            ),
        ),
        ended=ranks("0+1x100 100+10x300", "0+19x100 1900+10x300", "0+4x400", "0+20x400"),
        idle=ranks("10+0x400", "1000+0x400", "500+0x400", "1000+0x400"),
        restart=ranks("0+10x60 0+10x300", "0+10x60 0+10x300", "0+4x60 0+4x300", "0+20x60 0+20x300"),
        quiet=(
            ranks("0+1x400", "0+19x400", "0+0.2x400", "0+20x400"),  # the others hardly wait
            ranks("0+0x400", "0+0.5x400", "0+4x400", "0+0.5x400"),  # 15 transfers
        ),
    ),
    "KvobsJobMissing": Scenes(
        healthy={"up": UP},
        fires=(
            Fires({"up": "1+0x20 stale", BUILD: "1+0x20 stale"}, "40m", NO_JOB),
            Fires({"up": UNKNOWN, BUILD: UNKNOWN}, "20m", NO_JOB),
        ),
        ended={"up": "1+0x20 stale _x78 1+0x300", BUILD: "1+0x20 stale _x78 1+0x300"},
        idle={"up": "0+0x400"},  # another alert's
        restart={"up": "1+0x20 _x10 1+0x360", BUILD: "1+0x20 _x10 1+0x360"},
        quiet=({"up": UNKNOWN, AGAIN: UP}, {"up": "1+0x20 stale", AGAIN: UP}),  # another job has the metrics
    ),
    "KvobsTelemetryMissing": Scenes(
        healthy={"up": UP, BUILD: UP},
        fires=(
            Fires(
                {"up": UP, BUILD: UNKNOWN},
                "30m",
                "gpu-1:8000 of job kvobs is scraped but has no kvobs metrics. No other kvobs alert can fire for this "
                "server.",
            ),
            Fires({"up": "1+0x20 0+0x80", BUILD: "1+0x20 stale"}, "35m", GONE),  # the server, or
            Fires({"up": "1+0x20 0+0x80", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x20 stale"}, "35m", GONE),  # exporter
            Fires(
                {"up": UP, BUILD: UP, ENGINE_UP: "1+0x20 0+0x80"},
                "35m",
                "gpu-1:8000 of job kvobs is an exporter whose engine is gone. No other kvobs alert can fire for this "
                "server.",
            ),
            # The engine is gone for three minutes, and then its exporter: one alert, since the engine's end.
            Fires({"up": "1+0x25 0+0x80", BUILD: "1+0x25 stale", ENGINE_UP: "1+0x19 0+0x5 stale"}, "31m", GONE),
        ),
        ended={"up": "1+0x20 0+0x79 1+0x300", BUILD: "1+0x20 stale _x78 1+0x300"},
        idle={"up": UP, BUILD: UP},
        restart={
            "up": "1+0x20 0+0x34 1+0x345",
            BUILD: "1+0x20 stale _x34 1+0x345",
            ENGINE_UP: "1+0x18 0+0x1 stale _x34 1+0x345",
        },
        quiet=(
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale"},  # the target is gone for good
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x18 0+0x1 stale"},
            {"up": UP, BUILD: UP, ENGINE_UP: UP},
            {"up": "0+0x36 1+0x300", BUILD: "_x37 1+0x300"},  # a start of 18 minutes
            {"up": "1+0x400", BUILD: "_x37 1+0x300"},
        ),
    ),
    "KvobsScrapedTwice": Scenes(
        healthy={BUILD: UP},
        fires=(
            Fires(
                {BUILD: UP, AGAIN: UP},
                "20m",
                f"2 jobs scrape kvobs metrics of {OF_ENGINE}. Boards show multiples of the real rates, and alerts fire "
                "once per job.",
            ),
        ),
        ended={BUILD: UP, AGAIN: "1+0x100 stale"},
        idle={BUILD: UP, AGAIN: UNKNOWN},
        restart={BUILD: "1+0x20 stale _x2 1+0x300"},
        quiet=({BUILD: "1+0x20 stale", BUILD.replace("0.1.0", "0.1.1"): "_x20 1+0x300"},),  # an update
    ),
    "KvobsInternalErrors": rare(
        'kvobs_internal_errors_total{where="merge"}',
        f"{{}} contained errors in merge in the last fifteen minutes on {OF_ENGINE}. Numbers or spans are lost; "
        "serving is not affected.",
        {"where": "merge"},
    ),
    "KvobsTelemetryDropping": Scenes(
        healthy={DROPPED: "0+1x400"},
        fires=(
            Fires(
                {DROPPED: "0+30x400"},
                "30m",
                f"1 spans a second are lost on {OF_ENGINE}. Traces have gaps; metrics are complete.",
            ),
        ),
        ended={DROPPED: "0+30x100 3000+0x300"},
        idle={DROPPED: "100000+0x400"},
        restart={DROPPED: "0+1x60 0+1x300"},
        quiet=({DROPPED: "0+0x40 500+0x360"},),  # a burst
    ),
    "KvobsLoadsDontPay": Scenes(
        healthy=paying("0+10x400", "0+100x400"),
        fires=(
            Fires(
                paying("0+75x400", "0+100x400"),
                "50m",
                f"For 75% of the loads from {OF_CHILD} requests waited longer than computing the same tokens would "
                "have taken.",
            ),
        ),
        ended=paying("0+75x100 7500+0x300", "0+100x400"),
        idle=paying("75+0x400", "100+0x400"),
        restart=paying("0+10x60 0+10x300", "0+100x60 0+100x300"),
        quiet=(paying("0+1x400", "0+1x400"),),  # few
    ),
    "KvobsUnusedHitTokens": Scenes(
        healthy=tokens("0+1000x400", "0+10000x400"),
        fires=(
            Fires(
                tokens("0+5000x400", "0+10000x400"),
                "50m",
                f"50% of the tokens offered by {OF_CHILD} were not loaded but computed, because a connector with fewer "
                "tokens was chosen.",
            ),
        ),
        ended=tokens("0+5000x100 500000+0x300", "0+10000x400"),
        idle=tokens("9000+0x400", "10000+0x400", "1000+0x400"),
        restart=tokens("0+1000x60 0+1000x300", "0+10000x60 0+10000x300"),
        quiet=(
            tokens("0+100x400", "0+100x400"),
            tokens("0+10000x400", "0+10000x400", "0+0x400"),  # isolated, with synchronous loads: never chosen
        ),
    ),
    "KvobsTelemetryCost": Scenes(
        healthy=cost("0+1x400"),
        fires=tuple(
            Fires(series, "40m", f"Telemetry uses 30% of one core in one process of {OF_ENGINE}.")
            for series in (cost("0+9x400"), cost("0+0.1x400", "0+9x400"), cost("0+36x400", ranks=4))
        ),
        ended=cost("0+9x100 900+0x300"),
        idle=cost("100000+0x400"),
        restart=cost("0+1x60 0+1x300"),
        quiet=(cost("0+7.7x400", ranks=64),),  # of 0.4 % each
    ),
}
"""By alert, in the order of the rules."""
