"""Scenes of what is in progress for long: transfers, lookups, calls, and ranks that are waited for."""

from tests.unit.dashboards.scenes.scene import OF_CHILD, OF_ENGINE, Fires, Scenes, Series, rare

OLDEST = 'kvobs_oldest_in_flight_timestamp_seconds{kind="save"}'
OLDEST_LOAD = OLDEST.replace("save", "load")
OLDEST_LOOKUP = OLDEST.replace("save", "lookup")
IN_CALLS = f"in calls into {OF_CHILD}. No step runs during such a call"
STUCK = 'kvobs_stuck_transfers_total{rank="1"}'
RANK_1 = {"rank": "1"}
STUCK_SAYS = (
    f"Rank 1 has not reported {{}} transfers of {OF_CHILD} that other ranks finished more than `stuck_after_s` ago, in "
    "the last fifteen minutes or longer ago and still unfinished. Their requests wait, or their blocks stay held."
)
_STUCK = rare(STUCK, STUCK_SAYS, RANK_1)


def ranks(first: str, second: str, skew: str, count: str) -> Series:
    return {
        'kvobs_slowest_rank_total{rank="0"}': first,
        'kvobs_slowest_rank_total{rank="1"}': second,
        'kvobs_rank_skew_seconds_sum{kind="load"}': skew,
        'kvobs_rank_skew_seconds_count{kind="load"}': count,
    }


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


CALL = 'kvobs_call_in_progress_seconds{hook="wait_for_save",rank="1"}'
ENDED = 'kvobs_engine_ended{hook="wait_for_save",reason="SIGKILL"}'
ENDED_SAYS = f"The last life of {OF_ENGINE} ended within the last fifteen minutes"

SCENES = {
    "KvobsCallHangs": Scenes(
        healthy={CALL: "5+0x400"},
        fires=(
            Fires(
                {CALL: "0+30x100"},
                "2m",
                f"wait_for_save of {OF_CHILD} has been in progress for 2m 0s (rank: 1). No step runs until it returns: "
                "all requests of this engine wait.",
                {"hook": "wait_for_save", "rank": "1"},
            ),
        ),
        ended={CALL: "_x40 0+30x58 stale _x300"},
        idle={},
        restart={CALL: "1+0x100 stale _x300"},
        quiet=({'kvobs_call_in_progress_seconds{hook="other",rank="1"}': "0+30x400"},),
    ),
    "KvobsEngineEnded": Scenes(
        healthy={},
        fires=(
            Fires(
                {ENDED: "_x40 1 stale _x300"},  # seen by one scrape only
                "20m",
                f"{ENDED_SAYS} in wait_for_save of disk: SIGKILL.",
                {"connector": "disk", "hook": "wait_for_save", "reason": "SIGKILL"},
                until=("34m", f"{ENDED_SAYS} in wait_for_save of disk: SIGKILL."),
            ),
            Fires(
                {'kvobs_engine_ended{connector="",hook="",reason="exit 1"}': "_x40 1+0x1 stale _x300"},
                "21m",
                f"{ENDED_SAYS}, in no connector's call: exit 1.",
                {"reason": "exit 1"},
            ),
        ),
        ended={ENDED: "_x80 1+0x18 stale _x300"},
        idle={},
        restart={},
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
                f"Rank 1 took longest in 95% of loads and saves of {OF_CHILD} in the last fifteen minutes; all "
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
}
