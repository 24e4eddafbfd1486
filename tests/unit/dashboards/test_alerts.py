"""What makes each alert fire, and what doesn't, as promtool evaluates it.

Beside the child (or engine, or target) that a scene is about there is always a healthy one, which must stay quiet.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from dashboards.alerts import ALERTS, CHILD, ENGINE, TARGET, Site, alerts, rules_yaml
from dashboards.rules import RUNBOOK, Alert

BY_NAME = {alert.name: alert for alert in alerts(Site())}

Series = Mapping[str, str]
"""What samples each series has, one every 30 s, in promtool's notation: a+bxN is a, and N more, b apart."""

LABELS = dict(zip(CHILD, ("kvobs", "gpu-1:8000", "org/model a&b", "0", "disk"), strict=True))
HEALTHY = {CHILD: {"connector": "cpu"}, ENGINE: {"engine": "1"}, TARGET: {"instance": "gpu-2:8000"}}
OF_CHILD = "disk on engine 0 of gpu-1:8000 (org/model a&b)"
OF_ENGINE = "engine 0 of gpu-1:8000 (org/model a&b)"


@dataclass(frozen=True)
class Fires:
    """Series that fire, when, and what the alert says; ``more`` are labels beside those of what it is about."""

    series: Series
    at: str
    says: str
    more: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenes:
    """For one alert: healthy traffic, what fires, and what doesn't, at any time."""

    healthy: Series
    fires: tuple[Fires, ...]
    idle: Series
    """All stands still, after trouble long ago: looked at from the 40th minute on."""
    restart: Series
    quiet: tuple[Series, ...] = ()
    is_rare: bool = False
    """Whether series begin with their first event: a Prometheus that has just begun itself can't tell them from old."""


NOTHING: Series = {}


def rare(metric: str, says: str, more: Mapping[str, str] = {}, beside: Series = NOTHING) -> Scenes:
    """Something that must not happen at all, and whose series begins with its first event."""
    return Scenes(
        healthy=beside,
        is_rare=True,
        fires=(
            Fires({metric: "_x40 1+0x20"}, "22m", says.format("1"), more),
            Fires({metric: "1+0x100 2+0x20"}, "52m", says.format("1"), more),
            Fires({metric: "3+0x60 _x2 1+0x20"}, "34m", says.format("1"), more),  # the first after a restart
        ),
        idle={metric: "3+0x400"},
        restart={metric: "3+0x100 _x4"},
    )


def loads(failed: str, ok: str) -> Series:
    of = {"failed": failed, "ok": ok, "aborted": "0+50x400"}
    return {f'kvobs_loads_total{{mode="async",outcome="{outcome}"}}': values for outcome, values in of.items()}


def load_times(within_second: str, total: str) -> Series:
    bounds = {"0.268435456": "0+0x400", "1.073741824": within_second, "4.294967296": total, "+Inf": total}
    buckets = {f'{LOAD_TIME}_bucket{{mode="async",le="{le}"}}': values for le, values in bounds.items()}
    return {**buckets, f'{LOAD_TIME}_count{{mode="async"}}': total}


def ranks(first: str, second: str, skew: str, count: str) -> Series:
    return {
        'kvobs_slowest_rank_total{rank="0"}': first,
        'kvobs_slowest_rank_total{rank="1"}': second,
        'kvobs_rank_skew_seconds_sum{kind="load"}': skew,
        'kvobs_rank_skew_seconds_count{kind="load"}': count,
    }


def tokens(unused: str, offered: str) -> Series:
    return {"kvobs_unused_hit_tokens_total": unused, "kvobs_offered_tokens_total": offered}


def cost(record: str) -> Series:
    return {
        'kvobs_self_seconds_total{where="record"}': record,
        'kvobs_self_seconds_total{where="apply"}': "0+0.1x400",
    }


LOAD_TIME = "kvobs_load_duration_seconds"
OLDEST = 'kvobs_oldest_in_flight_timestamp_seconds{kind="save"}'
DROPPED = 'kvobs_spans_dropped_total{where="queue"}'
BUILD = 'kvobs_build_info{version="0.1.0",vllm_version="0.32.0",engine="0",model_name="m"}'
ENGINE_UP = 'kvobs_engine_up{engine="0",model_name="m"}'
UP, UNKNOWN = "1+0x400", "_x400"

GONE = "gpu-1:8000 of job kvobs can't be scraped. No other kvobs alert can fire for this server."

SCENES = {
    "KvobsConnectorFailing": Scenes(
        healthy=loads("0+1x400", "0+99x400"),
        fires=(
            Fires(
                loads("0+1x400", "0+9x400"),
                "20m",
                f"10% of the loads from {OF_CHILD} failed in the last five minutes. Their tokens are recomputed, or "
                "their requests fail, depending on kv_load_failure_policy.",
            ),
            Fires(
                loads("_x20 1+1x400", "0+0x400"),
                "20m",
                f"100% of the loads from {OF_CHILD} failed in the last five minutes. Their tokens are recomputed, or "
                "their requests fail, depending on kv_load_failure_policy.",
            ),
        ),
        idle=loads("500+0x400", "500+0x400"),
        restart=loads("0+1x60 0+1x60", "0+99x60 0+99x60"),
        quiet=(loads("0+0x40 1+0x360", "0+0x400"),),  # one failure, and no other load
    ),
    "KvobsFailedSyncLoads": rare(
        "kvobs_failed_sync_loads_total",
        f"{{}} synchronous loads from {OF_CHILD} failed in the last fifteen minutes. Blocks that other connectors "
        "saved in the same step may be wrong, and so are answers that use them. Other connectors: cpu.",
        beside={"kvobs_connector_info": UP},
    ),
    "KvobsStuckTransfers": rare(
        'kvobs_stuck_transfers_total{rank="1"}',
        f"Rank 1 has not reported {{}} transfers of {OF_CHILD} that other ranks finished more than `stuck_after_s` ago "
        "(last fifteen minutes). Their requests wait, or their blocks stay held.",
        {"rank": "1"},
    ),
    "KvobsConnectorQuarantined": Scenes(
        healthy={"kvobs_quarantined": "0+0x400"},
        fires=(
            Fires(
                {"kvobs_quarantined": "0+0x20 1+0x40"},
                "20m",
                f"{OF_CHILD} was in quarantine for 100% of the last five minutes, because it fails. Requests are "
                "served without this cache.",
            ),
            Fires(
                {"kvobs_quarantined": "1 1 0 1 1 1 0 1 1 1 1 0 1 1 1 0 1 1 1 1 1 1 0 1 1 1 0 1 1 1"},  # trials
                "10m",
                f"{OF_CHILD} was in quarantine for 81.82% of the last five minutes, because it fails. Requests are "
                "served without this cache.",
            ),
        ),
        idle={"kvobs_quarantined": "0+0x400"},
        restart={"kvobs_quarantined": "0+0x20 1+0x2 _x2 0+0x60"},
        quiet=({"kvobs_quarantined": "0+0x20 1+0x3 0+0x60"},),
    ),
    "KvobsConnectorErrors": rare(
        'kvobs_call_errors_total{hook="get_num_new_matched_tokens",error_type="TimeoutError"}',
        f"{OF_CHILD} raised {{}} exceptions in the last fifteen minutes. If it is not in the option isolate, one "
        "exception can end the engine.",
    ),
    "KvobsLoadsSlow": Scenes(
        healthy=load_times("0+99.5x400", "0+100x400"),
        fires=(
            Fires(
                load_times("0+98x400", "0+100x400"),
                "30m",
                f"The p99 of async loads from {OF_CHILD} is about 2.684s (threshold 1.07 s). Requests wait that long "
                "for their first token.",
                {"mode": "async"},
            ),
        ),
        idle=load_times("100+0x400", "1000+0x400"),
        restart=load_times("0+99.5x60 0+99.5x60", "0+100x60 0+100x60"),
        quiet=(load_times("0+0x400", "0+1x400"),),  # all slow, ten in five minutes
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
        idle={OLDEST: "NaN+0x400"},
        restart={OLDEST: "0+0x8 NaN+0x2 _x4 480+30x100"},
        quiet=({OLDEST.replace("save", "load"): "0+0x400"},),
    ),
    "KvobsSlowestRank": Scenes(
        healthy=ranks("0+10x400", "0+10x400", "0+4x400", "0+20x400"),
        fires=(
            Fires(
                ranks("0+1x400", "0+19x400", "0+4x400", "0+20x400"),
                "60m",
                f"Rank 1 was last in 95% of the loads and saves of {OF_CHILD} in the last fifteen minutes; all "
                "other ranks waited for it.",
                {"rank": "1"},
            ),
        ),
        idle=ranks("10+0x400", "1000+0x400", "500+0x400", "1000+0x400"),
        restart=ranks("0+10x60 0+10x60", "0+10x60 0+10x60", "0+4x60 0+4x60", "0+20x60 0+20x60"),
        quiet=(
            ranks("0+1x400", "0+19x400", "0+0.2x400", "0+20x400"),  # the others hardly wait
            ranks("0+0x400", "0+0.5x400", "0+4x400", "0+0.5x400"),  # 15 transfers
        ),
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
        idle=tokens("9000+0x400", "10000+0x400"),
        restart=tokens("0+1000x60 0+1000x60", "0+10000x60 0+10000x60"),
        quiet=(tokens("0+100x400", "0+100x400"),),
    ),
    "KvobsTelemetryMissing": Scenes(
        healthy={"up": UP, BUILD: UP},
        fires=(
            Fires(
                {"up": UP},
                "10m",
                "gpu-1:8000 of job kvobs is scraped but has no kvobs metrics. No other kvobs alert can fire for this "
                "server.",
            ),
            Fires({"up": "1+0x20 0+0x40", BUILD: "1+0x20 stale"}, "20m", GONE),  # the server, or
            Fires({"up": "1+0x20 0+0x40", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x20 stale"}, "20m", GONE),  # exporter
            Fires(
                {"up": UP, BUILD: UP, ENGINE_UP: "1+0x20 0+0x40"},
                "20m",
                "gpu-1:8000 of job kvobs is an exporter whose engine is gone. No other kvobs alert can fire for this "
                "server.",
            ),
            # The engine is gone for three minutes, and then its exporter: one alert, since the engine's end.
            Fires({"up": "1+0x25 0+0x40", BUILD: "1+0x25 stale", ENGINE_UP: "1+0x19 0+0x5 stale"}, "16m", GONE),
        ),
        idle={"up": UP, BUILD: UP},
        restart={
            "up": "1+0x20 0+0x4 1+0x400",
            BUILD: "1+0x20 stale _x4 1+0x400",
            ENGINE_UP: "1+0x18 0+0x1 stale _x4 1+0x400",
        },
        quiet=(
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale"},  # the target is gone for good
            {"up": "1+0x20 stale", BUILD: "1+0x20 stale", ENGINE_UP: "1+0x18 0+0x1 stale"},
            {"up": UP, BUILD: UP, ENGINE_UP: UP},
        ),
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
        idle={DROPPED: "100000+0x400"},
        restart={DROPPED: "0+1x60 0+1x60"},
        quiet=({DROPPED: "0+0x40 500+0x360"},),  # a burst
    ),
    "KvobsTelemetryCost": Scenes(
        healthy=cost("0+1x400"),
        fires=(
            Fires(
                cost("0+8.9x400"),
                "40m",
                f"Telemetry uses 30% of one core over all processes of {OF_ENGINE}.",
            ),
        ),
        idle=cost("100000+0x400"),
        restart=cost("0+1x60 0+1x60"),
    ),
}


def test_every_alert_has_its_scenes() -> None:
    assert list(SCENES) == list(BY_NAME)
    assert len(ALERTS) == len(BY_NAME)


@pytest.mark.parametrize("name", SCENES)
def test_an_alert_fires_when_and_only_when_it_should(name: str, tmp_path: Path) -> None:
    scenes, alert = SCENES[name], BY_NAME[name]
    tests = [case(alert, scenes, fires.series, {fires.at: [expected(alert, fires)]}) for fires in scenes.fires]
    tests.append(case(alert, scenes, scenes.idle, quiet_from(40)))
    tests.append(case(alert, scenes, scenes.restart, quiet_from(40 if scenes.is_rare else 0)))
    tests += [case(alert, scenes, quiet, quiet_from(0)) for quiet in (scenes.healthy, *scenes.quiet)]
    said = run(tests, tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr


def test_a_scene_that_should_fire_and_does_not_is_found(tmp_path: Path) -> None:
    scenes, alert = SCENES["KvobsConnectorFailing"], BY_NAME["KvobsConnectorFailing"]
    wrong = case(alert, scenes, scenes.healthy, {"20m": [expected(alert, scenes.fires[0])]})
    assert "FAILED" in run([wrong], tmp_path).stderr


def test_without_any_kvobs_nothing_fires(tmp_path: Path) -> None:
    tests = [
        {"input_series": [{"series": 'up{job="node"}', "values": UP}], "alert_rule_test": quietly(name, quiet_from(0))}
        for name in BY_NAME
    ]
    said = run([{"interval": "30s", **test} for test in tests], tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr


def quiet_from(begin: int) -> dict[str, list[Any]]:
    """Expect nothing from this minute on."""
    return {f"{minute}m": [] for minute in range(begin, 61, 2)}


def case(alert: Alert, scenes: Scenes, series: Series, expect: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return a test of promtool's: this about one child, engine or target, and a healthy one beside it."""
    labels = {label: LABELS[label] for label in alert.about}
    both = [*with_labels(series, labels), *with_labels(scenes.healthy, labels | HEALTHY[alert.about])]
    return {"interval": "30s", "input_series": both, "alert_rule_test": quietly(alert.name, expect)}


def quietly(name: str, expect: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [{"eval_time": at, "alertname": name, "exp_alerts": alerts} for at, alerts in expect.items()]


def with_labels(series: Series, labels: Mapping[str, str]) -> list[dict[str, str]]:
    said = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return [
        {"series": f"{metric}{{{said}}}" if own == "" else f"{metric}{{{said},{own}", "values": values}
        for (metric, _, own), values in ((name.partition("{"), values) for name, values in series.items())
    ]


def expected(alert: Alert, fires: Fires) -> dict[str, Any]:
    labels = {label: LABELS[label] for label in alert.about}
    chosen = urlencode({f"var-{label}": value for label, value in labels.items()})
    return {
        "exp_labels": {**labels, **fires.more, "severity": str(alert.severity)},
        "exp_annotations": {
            "summary": alert.summary,
            "description": fires.says,
            "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
            "dashboard_url": f"http://localhost:3000/d/{alert.board}?{chosen}",
        },
    }


def run(tests: list[dict[str, Any]], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "rules.yml").write_text(rules_yaml())
    content = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "group_eval_order": ["kvobs.recording", "kvobs.alerts"],  # else any: alerts would see this step, or the last
        "tests": tests,
    }
    (folder / "tests.yml").write_text(yaml.safe_dump(content))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run `make promtool`"
    command = [promtool, "test", "rules", str(folder / "tests.yml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
