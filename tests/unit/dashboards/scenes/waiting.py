"""Scenes of what is in progress for long: transfers, lookups, calls, and ranks that are waited for."""

from tests.unit.dashboards.scenes.scene import OF_DISK, OF_ENGINE, OLD, START, Fires, Scenes, Series, rare

OLDEST = 'kvobs_oldest_in_flight_seconds{kind="save"}'
OLDEST_LOAD = OLDEST.replace("save", "load")
OLDEST_LOOKUP = OLDEST.replace("save", "lookup")
OLDEST_RESUME = OLDEST.replace("save", "awaiting_schedule")
STEPS = "kvobs_step_seconds_total"
LOADED, RUNNING = 'vllm:num_requests_kv_fetch_by_stage{stage="completed_waiting"}', "vllm:num_requests_running"
ASKED = {'kvobs_in_flight{kind="lookup"}': "4+0x400"}
STUCK = 'kvobs_stuck_transfers_total{rank="1"}'
RANK_1 = {"rank": "1"}
STUCK_SAYS = (
    f"Rank 1 has not reported {{}} transfers of {OF_DISK} that other ranks finished more than `stuck_after_s` ago. "
    "These became stuck in the last fifteen minutes, or earlier and are still open. Their requests wait, or their "
    "blocks stay held."
)
_STUCK = rare(STUCK, STUCK_SAYS, RANK_1)


def ranks(first: str, second: str, skew: str, count: str) -> dict[str, str]:
    return {
        'kvobs_slowest_rank_total{rank="0"}': first,
        'kvobs_slowest_rank_total{rank="1"}': second,
        'kvobs_rank_skew_seconds_sum{kind="load"}': skew,
        'kvobs_rank_skew_seconds_count{kind="load"}': count,
    }


def saves_and_events(saves: str, stored: str) -> Series:
    return {
        'kvobs_saves_total{outcome="ok"}': saves,
        'kvobs_kv_events_total{type="stored",medium="cpu"}': stored,
        'kvobs_kv_events_total{type="removed",medium="cpu"}': "0+1x400",
    }


def of_eight(each: str) -> dict[str, str]:
    return {f'kvobs_slowest_rank_total{{rank="{rank}"}}': each for rank in range(2, 8)}


def scheduler_times(lookups: str, steps: str = "0+0.3x400", of_a_worker: str = "0+29x400") -> Series:
    """Return seconds in three hooks; 30 of a sample's seconds are the whole time."""
    return {
        'kvobs_call_duration_seconds_sum{hook="get_num_new_matched_tokens"}': lookups,
        'kvobs_call_duration_seconds_count{hook="get_num_new_matched_tokens"}': "0+5000x400",  # 1 or 4 ms each
        'kvobs_call_duration_seconds_sum{hook="build_connector_meta"}': steps,
        'kvobs_call_duration_seconds_sum{hook="start_load_kv"}': of_a_worker,
    }


def scheduler_share(healthy: str, bad: str, says: str, *quiet: Series) -> Scenes:
    return Scenes(
        healthy=scheduler_times(healthy),
        fires=(Fires({**scheduler_times(f"0{bad}x100"), **ASKED, STEPS: "0+1x100"}, "20m", says),),
        ended=scheduler_times(f"0{bad}x100 {int(bad[1:]) * 100}{healthy[1:]}"),
        idle=scheduler_times("400+0x400", "5+0x400", "5+0x400"),
        quiet=(*quiet, {**scheduler_times(f"0{bad}x400"), **ASKED, STEPS: "9+0x400"}),
    )


ONE_IN_EIGHT_MISSED = " stale ".join(["0+30x5", *(f"{begin}+30x6" for begin in range(210, 12_000, 240))])


def unfinished(kind: str, says: str, *quiet: str, at: int = 2, what: str = "") -> Scenes:
    """Return the scenes of what has been in progress for long, by its age; others in progress are quiet."""
    oldest = OLDEST.replace("save", kind)
    says = f"The oldest {what or kind} of {OF_DISK} {says}"
    return Scenes(
        healthy={oldest: "5+0x400"},
        fires=tuple(
            Fires({oldest: ages}, f"{at}m", says.format(f"{at}m 0s"), {"kind": kind})
            for ages in ("0+30x400", ONE_IN_EIGHT_MISSED)
        ),
        ended={oldest: "0+30x100 0+0x300"},
        idle={oldest: "0+0x400"},
        # The last one: a pod that is gone without a mark.
        quiet=(*({other: "0+30x400"} for other in quiet), {oldest: "0+0x40 20+15x2"}),
    )


def not_resumed(age: str, steps: str, loaded: str = "0+0x400", running: str = "5+0x400") -> Series:
    return {OLDEST_RESUME: age, STEPS: steps, LOADED: loaded, RUNNING: running}


CALL = 'kvobs_call_in_progress_seconds{hook="wait_for_save",rank="1"}'
ENDED = 'kvobs_engine_ended{hook="wait_for_save",reason="SIGKILL"}'
ENDED_SAYS = f"{OF_ENGINE} ended within the last fifteen minutes"

SCENES = {
    "KvobsCallHangs": Scenes(
        healthy={CALL: "5+0x400"},
        fires=(Fires(
            {CALL: "0+30x100"}, "2m",
            f"wait_for_save of {OF_DISK} has been in progress for 2m 0s (rank: 1). The engine runs no "
            "step until the call returns, so all its requests wait.", {"hook": "wait_for_save", "rank": "1"},
        ),),
        ended={CALL: "_x40 0+30x58 stale _x300"}, idle={},
        quiet=(
            {'kvobs_call_in_progress_seconds{hook="other",rank="1"}': "0+30x400"},
            {CALL: "_x40 20+30x1"},  # over, without a mark that says so
        ),
    ),
    "KvobsRequestsNotResumed": Scenes(
        healthy=not_resumed("5+0x400", "0+20x400"),
        fires=(
            Fires(
                not_resumed("0+30x400", "50+0x400"), "4m",
                f"{OF_ENGINE} runs no step that computes anything. A request whose load has finished (disk) has "
                "waited for 4m 0s, because the blocks it needs are not freed.",
                {"connector": "disk", "kind": "awaiting_schedule"},
            ),
            Fires(
                not_resumed("0+0x400", "50+0x400", "2+0x400", "0+0x400"), "4m",
                f"{OF_ENGINE} runs no step that computes anything. A request whose load has finished has waited for "
                "two minutes, according to vLLM's own metrics, because the blocks it needs are not "
                "freed.", {"host": "gpu-1"},
            ),
        ),
        ended=not_resumed("0+30x100 0+0x300", "50+0x100 50+20x300"),
        idle=not_resumed("0+0x400", "50+0x400", running="0+0x400"),
        quiet=(
            not_resumed("0+30x400", "0+20x400"),  # others run
            not_resumed("0+0x400", "50+0x400", "2+0x400"),
            not_resumed("0+0x400", "50+0x400", "0+0x40 2+0x2 0+0x350", "0+0x400"),
            not_resumed("0+0x400", "50+0x400", "_x40 2+0x2 0+0x350", "_x40 0+0x360"),  # seen for a minute
        ),
    ),
    "KvobsEngineEnded": Scenes(
        healthy={},
        fires=(
            Fires(
                {ENDED: "_x40 1 stale _x300"},  # seen by one scrape only
                "20m", f"{ENDED_SAYS} during wait_for_save of disk: SIGKILL.",
                {"connector": "disk", "hook": "wait_for_save", "reason": "SIGKILL"},
                until=("34m", f"{ENDED_SAYS} during wait_for_save of disk: SIGKILL."),
            ),
            Fires(
                {'kvobs_engine_ended{connector="",hook="",reason="exit 1"}': "_x40 1+0x1 stale _x300"}, "21m",
                f"{ENDED_SAYS} outside any connector's call: exit 1.", {"reason": "exit 1"},
            ),
        ),
        ended={ENDED: "_x90 1 2+0x28 stale _x300"}, idle={},  # the next life reports it for fifteen minutes
    ),
    "KvobsStuckTransfers": Scenes(
        healthy={},
        fires=(
            *_STUCK.fires,
            # For as long as it is unfinished, and no longer.
            Fires(
                {STUCK: "_x40 1+0x400", OLDEST_LOAD: "_x30 0+30x400"}, "30m", STUCK_SAYS.format("1"), RANK_1,
                until=("110m", STUCK_SAYS.format("1")),
            ),
        ),
        ended={STUCK: "_x40 1+0x400", OLDEST_LOAD: "_x30 0+30x70 0+0x300"},
        idle={STUCK: "3+0x400", OLDEST_LOAD: "0+0x400"},
        quiet=(
            *_STUCK.quiet,
            {STUCK: "3+0x400", OLDEST_LOAD: "0+30x400"},  # something else is old
            # A rank of the last life, and then all ranks of this one, or a slow save.
            {STUCK: "3+0x4 _x4", START: f"{OLD}x4 _x4 200+0x400", OLDEST_LOAD: "900+30x4 _x4 0+30x400"},
        ),
    ),
    "KvobsLoadUnfinished": unfinished(
        "load", "has been in progress for {}. Its request waits until all ranks have reported the load.", OLDEST,
        OLDEST_LOOKUP,
    ),
    "KvobsConnectorBlocksEngine": scheduler_share(
        "0+0.3x400", "+18", f"The scheduler spent 61% of the last 90 seconds in calls into {OF_DISK}. The engine "
        "runs no step during such a call, so all its requests wait.", scheduler_times("0+12x400"),
        scheduler_times("0+0.3x40 12+18x1 48+0.3x300"),  # half a minute of it
    ),
    "KvobsConnectorBlocksScheduler": scheduler_share(
        "0+0.3x400", "+6", f"The scheduler spends 21% of its time in calls into {OF_DISK}. This share was too high "
            "for more than five of the last ten minutes. The engine runs no step during such a call.",
        scheduler_times("0+0.3x40 12+9x5 57+0.3x300"),  # 30 % for three minutes
        scheduler_times("0+0.3x40 12+18x2 48+0.3x300"),  # a minute of it
        scheduler_times("0+0.3x400", of_a_worker="0+100x400"),
    ),
    "KvobsLookupUnanswered": unfinished(
        "lookup", "has been answered with 'not yet' for {}. Its request waits for the final "
            "answer.", OLDEST, OLDEST_LOAD
    ),
    "KvobsSaveBacklog": unfinished(
        "save", "has been in progress for {}. Other requests cannot use its blocks.", OLDEST_LOAD, at=20,
        what="promised save",
    ),
    "KvobsKvEventsStopped": Scenes(
        healthy=saves_and_events("0+2x400", "0+9x400"),
        fires=(Fires(
            saves_and_events("0+2x400", "0+9x40 360+0x360"), "50m",
            f"{OF_DISK} completed 60 saves in the last fifteen minutes without publishing a KV cache event. "
            "Routers no longer send requests to the engine that has their prefix.",
        ),),
        ended=saves_and_events("0+2x400", "0+0x99 0+9x300"), idle=saves_and_events("200+0x400", "900+0x400"),
        quiet=(
            saves_and_events("0+2x400", "_x400"),  # it never has events
            saves_and_events("0+0.5x400", "0+9x40 360+0x360"),  # 15 saves
        ),
    ),
    "KvobsSlowestRank": Scenes(
        healthy=ranks("0+10x400", "0+10x400", "0+4x400", "0+20x400"),
        fires=tuple(
            Fires(
                series, "60m",
                f"Rank 1 was the slowest in {share} of the loads and saves of {OF_DISK} in the last fifteen minutes; "
                "all other ranks waited for it.", RANK_1,
            )
            for series, share in (
                (ranks("0+1x400", "0+19x400", "0+4x400", "0+20x400"), "95%"),
                (ranks("0+1x400", "0+12x400", "0+4x400", "0+20x400") | of_eight("0+1x400"), "63.16%"),
                (ranks("_x400", "0+20x400", "0+4x400", "0+20x400"), "100%"),  # the others never
            )
        ),
        ended=ranks("0+1x100 100+10x300", "0+19x100 1900+10x300", "0+4x400", "0+20x400"),
        idle=ranks("10+0x400", "1000+0x400", "500+0x400", "1000+0x400"),
        quiet=(
            ranks("0+1x400", "0+19x400", "0+0.2x400", "0+20x400"),  # the others hardly wait
            ranks("0+0x400", "0+0.5x400", "0+4x400", "0+0.5x400"),  # 15 transfers
            ranks("0+6x400", "0+14x400", "0+4x400", "0+20x400"),  # one of two in 70 %: by chance
            ranks("0+7x400", "0+7x400", "0+4x400", "0+20x400") | of_eight("0+1x400"),  # one of eight in 35 %
            ranks("_x400", "_x400", "0+10x400", "0+24x400") | of_eight("0+4x400"),  # six of eight in turn
        ),
    ),
}  # fmt: skip
