"""Scenes of loads that fail, of exceptions and of quarantine."""

from tests.unit.dashboards.scenes.scene import (
    BUILD,
    OF_DISK,
    OF_ENGINE,
    OLD,
    START,
    UP,
    Fires,
    Scenes,
    Series,
    rare,
)

ONE_IN_FOUR_MINUTES = " ".join(f"{number}x7" for number in range(50))


def loads(failed: str, ok: str, policy: str = "recompute") -> Series:
    of = {"failed": failed, "ok": ok, "aborted": "0+50x400"}
    counted = {f'kvobs_loads_total{{mode="async",outcome="{outcome}"}}': values for outcome, values in of.items()}
    return {**counted, f'kvobs_connector_info{{index="0",failure_policy="{policy}"}}': UP}


NIXL_FAILED, NIXL_EXPIRED = "vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_notifications_after_expiry_total"
MOONCAKE_FAILED = 'vllm:mooncake_store_operation_failed_keys_total{operation="load_get",status="error"}'


def hidden(own: str, failed: str = "0+0x400", *, of: str = NIXL_FAILED) -> Series:
    """Return a connector's own count of failures, beside its loads."""
    return {of: own, BUILD: UP, **loads(failed, "0+9x400")}


def failing(policy: str, ending: str) -> Scenes:
    """A connector whose loads fail, of engines with this ``failure_policy``."""

    def of(failed: str, ok: str) -> Series:
        return loads(failed, ok, policy)

    says = (
        f"{{}} of the loads from {OF_DISK} failed in the last five minutes (in the last six hours if there are few "
        f"loads). {ending}"
    )
    other = "fail" if policy == "recompute" else "recompute"
    return Scenes(
        healthy=of("0+1x400", "0+99x400"),
        fires=(
            Fires(of("0+1x400", "0+9x400"), "20m", says.format("10%")),
            Fires(of("_x20 1+1x400", "0+0x400"), "20m", says.format("100%")),
            Fires(of("_x20 " + "1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 5 5 5 5 6 6 6 6 7 7 7 7 8 8 8 8", "0+0x400"), "25m",
                  says.format("100%")),  # one in two minutes
            Fires(of(ONE_IN_FOUR_MINUTES, "0+0x400"), "30m", says.format("100%")),  # alone
            Fires(of("_x40 1+0x39 2+0x39 3+0x80", "_x400"), "67m", says.format("100%")),  # three in an hour
            # And more than two hours after the last good one.
            Fires(of("0+0x300 1+0x20 2+0x20 3+0x40", "0+0x20 1+0x380"), "178m", says.format("100%")),
        ),
        ended=of("0+10x100 1000+0x300", "0+90x100 9000+100x300"),
        idle=of("500+0x400", "500+0x400"),
        quiet=(
            of("0+0x40 1+0x360", "0+0x400"),  # one failure, and no other load
            of("0+0x40 1+0x360", "0+0x50 1+0x350"),  # one of two
            of("0+0x40 1+0x8 2+0x352", "0+1x400"),  # two of 24
            of(ONE_IN_FOUR_MINUTES, "1+0x400"),  # another one was well
            loads("0+1x400", "0+9x400", other),  # another alert's
        ),
    )  # fmt: skip


def engines(policy: str, *numbers: tuple[str, str]) -> Series:
    """Return failed and good loads of several engines: of the one that the scene is about, and of others."""
    found: dict[str, str] = {}
    for place, (failed, ok) in enumerate(numbers):
        other = f',instance="gpu-{100 + place}:8000"}}' if place else "}"  # beyond those of any test
        started = {f"{START}{{}}": f"{OLD}x400"} if len(numbers) > 1 else {}
        found |= {name.replace("}", other): values for name, values in {**loads(failed, ok, policy), **started}.items()}
    return found


def many_failing(policy: str, ending: str) -> Scenes:
    """Many engines of a cluster whose loads fail, with this ``failure_policy``."""
    well, bad = ("0+1x400", "0+99x400"), ("0+1x400", "0+9x400")
    thin = [(ONE_IN_FOUR_MINUTES, ok) for ok in ("0+0x400", "0+0.125x400", "0+0.25x400")]
    worse, idle = [("0+2x400", "0+8x400"), ("0+3x400", "0+7x400")], ("5+0x400", "90+0x400")
    says = (
        f"Loads from disk fail on {{}} of the engines of job kvobs that load from it. {ending} "
        "Check what the engines share: the store, the network, a new version. Worst: {}."
    )
    worst = "gpu-102:8000/0 gpu-101:8000/0 gpu-1:8000/0"
    other = "fail" if policy == "recompute" else "recompute"
    return Scenes(
        healthy=engines(policy, well),
        fires=(
            Fires(engines(policy, bad, *worse, *[well] * 9), "20m", says.format("25%", worst)),
            # Idle engines do not hide it, nor do those that never had a load.
            Fires(engines(policy, bad, *worse, *[idle, ("_x400", "_x400")] * 9), "20m", says.format("100%", worst)),
            # No engine has enough of them for an alert of its own.
            Fires(engines(policy, *thin), "30m", says.format("100%", "gpu-1:8000/0 gpu-101:8000/0 gpu-102:8000/0")),
        ),
        ended=engines(policy, *[("0+1x100 100+0x300", "0+9x100 900+10x300")] * 3),
        idle=engines(policy, *[("500+0x400", "500+0x400")] * 3),
        quiet=(
            engines(policy, bad, bad),  # alerts of their own are enough
            engines(policy, *[bad] * 3, *[well] * 12),  # a fifth
            engines(policy, *[("0+0x40 1+0x360", "0+0x400")] * 9),  # one load each
            engines(policy, *[(f"0+0x{20 * i + 1} 1+1x20 21+0x400", "0+10x400") for i in range(5)]),  # in turn
            engines(other, *[bad] * 3),  # another alert's
        ),
    )


def quarantined(values: str, steps: str = "0+0.01x400") -> Series:
    return {"kvobs_quarantined": values, 'kvobs_overhead_seconds_total{stage="record"}': steps}


SCENES = {
    "KvobsEnginesFailingRequests": many_failing("fail", "Their requests fail because kv_load_failure_policy is "
        "`fail`."),
    "KvobsRequestsFailing": failing("fail", "Their requests fail because kv_load_failure_policy is `fail`."),
    "KvobsFailedSyncLoads": rare(
        "kvobs_failed_sync_loads_total",
        f"{{}} synchronous loads from {OF_DISK} failed in the last fifteen minutes. Blocks that other connectors "
        "saved in the same step may be wrong, as may answers that use them. Other connectors: cpu.",
        beside={"kvobs_connector_info": UP},
    ),
    "KvobsCorruptLoads": rare(
        'kvobs_corrupt_blocks_total{rank="1"}',
        f"In the last fifteen minutes, {{}} verified blocks that {OF_DISK} loaded on rank 1 differed from the blocks "
        "computed for the same tokens. The answers of their requests may be wrong, although the loads count as "
        "successful. The request log (option `request_log`) marks all of these requests with the field `wrong_blocks`. "
        "vLLM's log names one a minute, and the connectors that may have overwritten its blocks.",
        {"rank": "1"},
        beside={"kvobs_connector_info": UP},
    ),
    "KvobsLoadsHideFailures": Scenes(
        healthy=hidden("0+0x400"),
        fires=tuple(
            Fires(
                hidden("0+0x40 1+1x300", of=counter), "27m",
                "In the last fifteen minutes, NIXL or Mooncake counted 14 failed transfers, failed keys, or reads "
                f"after the end of a lease on {OF_ENGINE}, but no load failed. Loads may have delivered wrong bytes.",
                {"host": "gpu-1"},
            )
            for counter in (NIXL_FAILED, NIXL_EXPIRED, MOONCAKE_FAILED)
        ),
        ended=hidden("0+1x99 99+0x300"),
        idle=hidden("50+0x400"),
        quiet=(
            hidden("0+1x400", "0+1x400"),  # they are loads that failed
            hidden("0+0x40 1+0x360", "_x40 1+0x360"),  # of which there was none before: a series begins with the first
            hidden("0+1x400", of=MOONCAKE_FAILED.replace("load_get", "save_put")),
        ),
    ),
    "KvobsEnginesFailing": many_failing("recompute", "vLLM recomputes their tokens."),
    "KvobsConnectorFailing": failing("recompute", "vLLM recomputes their tokens."),
    "KvobsConnectorQuarantined": Scenes(
        healthy=quarantined("0+0x400"),
        fires=(
            Fires(
                quarantined("0+0x20 1+0x40"), "20m",
                f"{OF_DISK} was in quarantine for 100% of the last five minutes because it failed. Requests are "
                "served without its cache.",
            ),
            Fires(
                quarantined("1 1 0 1 1 1 0 1 1 1 1 0 1 1 1 0 1 1 1 1 1 1 0 1 1 1 0 1 1 1"),  # trials
                "10m",
                f"{OF_DISK} was in quarantine for 81.82% of the last five minutes because it failed. Requests are "
                "served without its cache.",
            ),
        ),
        ended=quarantined("0+0x40 1+0x60 0+0x300"),
        idle=quarantined("1+0x400", "5+0x400"),  # no request, no probation
        quiet=(
            quarantined("0+0x20 1+0x3 0+0x60"),
            quarantined("0+0x20 1+0x300", "0+0.01x20 0.2+0x300"),  # the last request brought it into quarantine
        ),
    ),
    "KvobsConnectorErrors": rare(
        'kvobs_call_errors_total{hook="get_num_new_matched_tokens",error_type="TimeoutError"}',
        f"{OF_DISK} raised {{}} exceptions in the last fifteen minutes.",
    ),
}  # fmt: skip
