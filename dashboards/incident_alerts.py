"""Define the alerts about an engine that makes no progress: it ended, a call hangs, nothing is resumed.

They fire within two minutes: most read ages, which are durations already, and they are evaluated most often.
"""

from __future__ import annotations

from dashboards.promql import SCHEDULER_CALLS
from dashboards.rules import CONNECTOR, ENGINE, Alert, Severity
from kvobs.schema.verdicts import POLL_S

INCIDENTS = (
    Alert(
        name="KvobsEngineEnded",
        severity=Severity.CRITICAL,
        about=ENGINE,
        # The next life reports it as 2 for fifteen minutes, if it knows of it.
        expr="kvobs_engine_ended == 2 or last_over_time(kvobs_engine_ended[15m]) == 1",
        hold="0m",
        summary="An engine ended unexpectedly.",
        description="{engine} ended within the last fifteen minutes{{ with $labels.connector }} during "
        "{{ $labels.hook }} of {{ . }}{{ else }} outside any connector's call{{ end }}: {{ $labels.reason }}.",
    ),
    Alert(
        name="KvobsCallHangs",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        # What is called once, such as the registration of a large cache, may take long.
        expr="""
            max_over_time(kvobs_call_in_progress_seconds[2m]) > __call_age_s__
            unless max_over_time(kvobs_call_in_progress_seconds{hook="other"}[2m])
            and ignoring (hook, connector, rank) engine:kvobs_start_time_seconds:same2m
        """,
        hold="0m",
        summary="A call into a KV connector does not return: the engine is blocked.",
        description="{{ $labels.hook }} of {connector} has been in progress for {{ $value | humanizeDuration }} "
        "(rank: {{ $labels.rank }}). The engine runs no step until the call returns, so all its requests wait.",
    ),
    Alert(
        name="KvobsRequestsNotResumed",
        severity=Severity.CRITICAL,
        about=ENGINE,
        # The second part reads vLLM's metrics, without the connector, from another target on the same host. It also
        # looks back 90 s, because two minutes are not over where the first sample is younger. What computes does
        # not wait: that target may be another server's.
        expr="""
            connector_kind:kvobs_oldest_in_flight_seconds:idle90s
            or (
              label_replace(
                group without (version, vllm_version, native) (kvobs_build_info),
                "host", "$1", "instance", "(.+?)(:[0-9]+)?"
              )
              and on (__cluster__, host, model_name, engine)
              label_replace(
                min_over_time({__name__=~"vllm[:_]num_requests_kv_fetch_by_stage",stage="completed_waiting"}[2m]) > 0
                and {__name__=~"vllm[:_]num_requests_kv_fetch_by_stage",stage="completed_waiting"} offset 90s > 0
                unless ignoring (stage) max_over_time({__name__=~"vllm[:_]num_requests_running"}[2m]) > 0,
                "host", "$1", "instance", "(.+?)(:[0-9]+)?"
              )
              unless ignoring (host, connector, kind) connector_kind:kvobs_oldest_in_flight_seconds:idle90s
              unless ignoring (host) engine:kvobs_step_seconds:changed90s
            )
        """,
        hold="0m",
        keep="1m",
        summary="Requests whose loads have finished are not scheduled again, and no others run.",
        description="{engine} runs no step that computes anything. A request whose load has "
        "finished{{ with $labels.connector }} ({{ . }}) has waited for {{ $value | humanizeDuration }}{{ else }} "
        "has waited for two minutes, according to vLLM's own metrics{{ end }}, because the blocks it needs are "
        "not freed.",
    ),
    Alert(
        name="KvobsLoadUnfinished",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            max_over_time(kvobs_oldest_in_flight_seconds{kind="load"}[2m]) > __load_age_s__
            and ignoring (connector, kind) engine:kvobs_start_time_seconds:same2m
        """,
        hold="0m",
        summary="A load does not finish, and its request waits.",
        description="The oldest load of {connector} has been in progress for {{ $value | humanizeDuration }}. Its "
        "request waits until all ranks have reported the load.",
    ),
    Alert(
        name="KvobsConnectorBlocksEngine",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        # 90 s are as long as a call that hangs; where targets are scraped once a minute they have no two samples.
        # Quick calls on engines that compute nothing while requests wait are polling.
        expr=f"""
            (
              sum without (hook) (rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[90s]))
              and ignoring (connector) engine:kvobs_start_time_seconds:same2m
              or connector:kvobs_call_duration_seconds:scheduler_rate5m
              and ignoring (connector) engine:kvobs_start_time_seconds:same5m
            ) > __blocked_share__
            unless (
              connector:kvobs_call_duration_seconds:scheduler_rate5m
              / (sum without (hook) (rate(kvobs_call_duration_seconds_count{{hook=~"{SCHEDULER_CALLS}"}}[5m])) > 0)
              < {POLL_S}
              and ignoring (connector) engine:kvobs_in_flight:idle90s
            )
        """,
        hold="0m",
        keep="1m",
        summary="An engine spends most of its time in calls into a KV connector.",
        description="The scheduler spent {{ $value | humanizePercentage }} of the last 90 seconds in calls into "
        "{connector}. The engine runs no step during such a call, so all its requests wait.",
    ),
)
