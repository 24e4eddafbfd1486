"""Scenes of loads that work and are not worth it: slow ones, those that do not pay, hits that nobody loads."""

from tests.unit.dashboards.scenes.scene import OF_CHILD, Fires, Scenes, Series

LOAD_TIME = "kvobs_load_duration_seconds"
SLOW_SAYS = (
    f"The p99 of async loads from {OF_CHILD} is about 2.684s (thresholds: 1.073741824 s, and 0.1 s per 1000 tokens of "
    "an average load). Requests wait that long for their first token."
)


def load_times(within_second: str, total: str, tokens: str) -> Series:
    bounds = {"0.268435456": "0+0x400", "1.073741824": within_second, "4.294967296": total, "+Inf": total}
    buckets = {f'{LOAD_TIME}_bucket{{mode="async",le="{le}"}}': values for le, values in bounds.items()}
    loaded = {'kvobs_loads_total{mode="async",outcome="ok"}': total, "kvobs_load_tokens_total": tokens}
    return {**buckets, f'{LOAD_TIME}_count{{mode="async"}}': total, **loaded}


def paying(slower: str, loads: str) -> Series:
    return {
        "kvobs_loads_slower_than_computing_total": slower,
        'kvobs_loads_total{mode="async",outcome="ok"}': loads,
    }


def tokens(unused: str, offered: str, admitted: str = "0+1000x400") -> Series:
    return {
        'kvobs_unused_hit_tokens_total{reason="other_chosen"}': unused,
        "kvobs_offered_tokens_total": offered,
        "kvobs_admitted_tokens_total": admitted,
    }


SCENES = {
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
}
