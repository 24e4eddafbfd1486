"""Scenes of loads that work and are not worth it: slow ones, those that do not pay, hits that nobody loads."""

from tests.unit.dashboards.scenes.scene import OF_DISK, Fires, Scenes, Series

LOAD_TIME = "kvobs_load_duration_seconds"
SLOW_SAYS = (
    f"Most async loads from {OF_DISK}, or one in a hundred for ten minutes, take about 2.594s or longer "
    "(thresholds: 1 s, and 0.1 s per 1000 tokens of "
    "an average load). Requests wait that long for their first token."
)


def load_times(within_second: str, total: str, tokens: str) -> dict[str, str]:
    bounds = {"0.25": "0+0x400", "1.0": within_second, "2.37841423": within_second, "2.828427125": total, "+Inf": total}
    buckets = {f'{LOAD_TIME}_bucket{{mode="async",le="{le}"}}': values for le, values in bounds.items()}
    loaded = {'kvobs_loads_total{mode="async",outcome="ok"}': total, "kvobs_load_tokens_total": tokens}
    return {**buckets, f'{LOAD_TIME}_count{{mode="async"}}': total, **loaded}


BLOCKED = {'kvobs_call_duration_seconds_sum{connector="cpu",hook="get_num_new_matched_tokens"}': "0+20x400"}
"""Another connector takes two thirds of the scheduler's time, and makes this one late."""


def paces(seconds: str, tokens: str = "0+100000x400", loads: str = "0+100x400") -> dict[str, str]:
    return {
        f'{LOAD_TIME}_sum{{mode="async"}}': seconds,
        f'{LOAD_TIME}_count{{mode="async"}}': loads,
        "kvobs_load_tokens_total": tokens,
    }


def over_link(
    seconds: str,
    moved: str = "0+10000000000x400",
    at_once: str = "1+0x400",
    loads: str = "0+10x400",
    mode: str = "async",
) -> dict[str, str]:
    """Return loads of a GB, ten in 30 s, over a link of 400 Gbit/s."""
    return {
        "kvobs_link_bytes_per_second": "50000000000+0x400",
        "kvobs_load_bytes_total": moved,
        'kvobs_in_flight{kind="load"}': at_once,
        f'{LOAD_TIME}_sum{{mode="{mode}"}}': seconds,
        f'kvobs_loads_total{{mode="{mode}",outcome="ok"}}': loads,
    }


def paying(slower: str, loads: str) -> Series:
    return {"kvobs_loads_slower_than_computing_total": slower, 'kvobs_loads_total{mode="async",outcome="ok"}': loads}


def tokens(unused: str, offered: str, admitted: str = "0+1000x400") -> Series:
    return {
        'kvobs_unused_hit_tokens_total{reason="other_chosen"}': unused,
        "kvobs_offered_tokens_total": offered,
        "kvobs_admitted_tokens_total": admitted,
    }


def evicting(reused: str, followed: str = "0+100x400", evicted: str = "0+6000x400") -> Series:
    """Return a store in memory that is full: what it evicts, and what is asked for of the samples."""
    of_memory = {"save": "0+6000x400", "evicted": evicted, "evicted_followed": followed, "evicted_reused": reused}
    return {f'kvobs_{name}_tokens_total{{medium="cpu"}}': values for name, values in of_memory.items()}


LOADABLE, REUSE, ADMITTED = (
    "kvobs_loadable_tokens_total",
    "kvobs_reuse_distance_tokens_count",
    "kvobs_admitted_tokens_total",
)


def stored(
    admitted: str | None,
    loadable: str = "0+30000x400",
    prompts: str = "0+100000x400",
    *,
    asked: str = "0+30x400",
    role: str = "kv_both",
    of_class: str = "LMCacheConnectorV1",
    outcome: str = "miss",
) -> dict[str, str]:
    """Return a connector that is asked, beside an engine's prompts of which vLLM has forgotten a part."""
    info = f'index="0",class="{of_class}",role="{role}",load_policy="first",failure_policy="recompute"'
    return {
        f"kvobs_connector_info{{{info}}}": "1+0x900",
        f'kvobs_lookups_total{{outcome="{outcome}"}}': asked,
        LOADABLE: loadable,
        REUSE: prompts,
        **({ADMITTED: admitted} if admitted is not None else {}),
    }


NEVER_SERVES = (
    f"1 requests per second looked up {OF_DISK}, but none loaded from it in 3 hours. Prompts evicted from vLLM's own "
    "cache recur: they are recomputed, or loaded from another connector."
)

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
        quiet=(
            load_times("0+0x400", "0+1x400", "0+1000x400"),  # all slow, ten in five minutes
            load_times("0+0x400", "0+100x400", "0+12000000x400"),  # all, of 120 thousand tokens
            load_times("0+98x400", "0+100x400", "0+100000x400") | BLOCKED,
        ),
    ),
    "KvobsLoadsSlowed": Scenes(
        healthy=paces("0+3x400"),
        fires=(Fires(
            paces("0+90x400"),  # from 30 ms to 900 ms
            "30m", f"Loads from {OF_DISK} take 30 times as long as they did a day ago, for the same number of tokens.",
        ),),
        ended=paces("0+90x100 9000+3x300"), idle=paces("500+0x400", "500+0x400", "500+0x400"),
        quiet=(
            paces("0+10.5x400"),  # 3.5 times
            paces("0+90x400", "0+3000000x400"),  # of more tokens
            paces("0+0.9x400", loads="0+1x400"),  # few
            paces("0+90x400", loads="0+1000x400", tokens="0+100000x400"),  # still short
            paces("0+90x400") | BLOCKED,
        ),
        day_before={f"{LOAD_TIME}_sum": "0+3x399 _x2480", "kvobs_load_tokens_total": "0+100000x399 _x2480"},
    ),
    "KvobsLoadsBelowLink": Scenes(
        healthy=over_link("0+0.3x400"),
        fires=(Fires(
            over_link("0+10x400"), "60m",
            f"While loads from {OF_DISK} were in progress in the last fifteen minutes, they used at most 2% of the "
            "bandwidth of its links (link_gbps). Check that they use RDMA, not TCP.",
        ),),
        ended=over_link("0+10x100 1000+0.3x300"),
        idle=over_link("1000+0x400", "1000000000000+0x400", "0+0x400", "1000+0x400"),
        quiet=(
            over_link("0+10x400", at_once="1+0x20 16+0x20 1+0x20 16+0x20 1+0x20 16+0x20 1+0x280"),  # they share it
            over_link("0+10x400", "0+1000000000x400"),  # of 100 MB: they end when a step does
            over_link("0+0.5x400", "0+500000000x400", loads="0+0.5x400"),  # 15 loads
            over_link("0+10x400", mode="sync"),
            {name: v for name, v in over_link("0+10x400").items() if "link" not in name},
            over_link("0+10x400") | BLOCKED,
        ),
    ),
    "KvobsLoadsDontPay": Scenes(
        healthy=paying("0+10x400", "0+100x400"),
        fires=(Fires(
            paying("0+75x400", "0+100x400"), "50m",
            f"For 75% of the loads from {OF_DISK}, requests waited longer than computing the same tokens would "
            "have taken.",
        ),),
        ended=paying("0+75x100 7500+0x300", "0+100x400"), idle=paying("75+0x400", "100+0x400"),
        quiet=(paying("0+1x400", "0+1x400"),),  # few
    ),
    "KvobsStoreTooSmall": Scenes(
        healthy=evicting("0+10x400"),
        fires=(Fires(
            evicting("0+40x400"), "65m",
            f"Prompts ask again for 40% of the tokens that {OF_DISK} evicts, and vLLM's own cache does not have them. "
            "They are computed again, or loaded from another connector.",
        ),),
        ended=evicting("0+40x100 4000+0x300"), idle=evicting("9000+0x400", "10000+0x400", "90000+0x400"),
        quiet=(
            evicting("0+40x400", evicted="0+100x400"),  # few
            {**evicting("0+40x400"), 'kvobs_save_tokens_total{medium="storage"}': "0+5000x400"},  # it has them on disk
        ),
    ),
    "KvobsUnusedHitTokens": Scenes(
        healthy=tokens("0+1000x400", "0+10000x400"),
        fires=(Fires(
            tokens("0+5000x400", "0+10000x400"), "50m",
            f"50% of the tokens that {OF_DISK} offered were computed instead of loaded, because a connector with "
            "fewer tokens was chosen.",
        ),),
        ended=tokens("0+5000x100 500000+0x300", "0+10000x400"), idle=tokens("9000+0x400", "10000+0x400", "1000+0x400"),
        quiet=(
            tokens("0+100x400", "0+100x400"),
            tokens("0+10000x400", "0+10000x400", "0+0x400"),  # isolated, with synchronous loads: never chosen
        ),
    ),
    "KvobsNeverServes": Scenes(
        healthy=stored("0+3000x400"),
        fires=(
            Fires(stored(None), "45m", NEVER_SERVES),  # a series begins with its first token
            Fires(stored(None, outcome="hit"), "45m", NEVER_SERVES),  # another one is chosen
        ),
        ended=stored("_x100 3000+3000x300"),
        idle=stored("5000+0x400", "30000+0x400", "100000+0x400", asked="30+0x400"),
        quiet=(
            stored("_x60 3000+0x340"),  # one load, half an hour ago
            stored(None, "0+5000x400"),  # vLLM has nearly all that repeats
            stored(None, "0+0x400"),
            stored(None, "0+300x400", "0+1000x400"),  # few tokens
            stored(None, asked="0+0x400"),
            stored(None, asked="0+0x400") | {'kvobs_lookups_total{outcome="not_read"}': "0+30x400"},  # evaluation
            stored(None, role="kv_producer"), stored(None, role="kv_consumer"),
            stored(None, of_class="NixlConnector"), stored(None, of_class="MooncakeConnector"),  # a prefill engine
        ),
        day_before={"kvobs_lookups_total": "0+30x2879"},
    ),
}  # fmt: skip
