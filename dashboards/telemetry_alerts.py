"""Define the alerts about kvobs's metrics: targets and jobs that have none, errors, losses, cost."""

from __future__ import annotations

from dashboards.rules import DOUBLED, ENGINE, JOB, TARGET, Alert, Severity

TELEMETRY = (
    Alert(
        name="KvobsJobMissing",
        severity=Severity.WARNING,
        about=JOB,
        # Of one cluster of several, or never there at all; and no other job has the metrics.
        expr="""
            (
              group by (__cluster__, job) (last_over_time(up{job="__job__"}[1d]))
              unless group by (__cluster__, job) (up{job="__job__"})
              unless on (__cluster__) kvobs_build_info
            )
            or (absent_over_time(up{job="__job__"}[1d]) unless on () kvobs_build_info)
        """,
        hold="15m",
        summary="The kvobs scrape job has no targets.",
        description="The job {{ $labels.job }}{{ with $labels.__cluster__ }} in {{ . }}{{ end }} has no targets. No "
        "other kvobs alert can fire there.",
    ),
    Alert(
        name="KvobsTelemetryMissing",
        severity=Severity.WARNING,
        about=TARGET,
        # Both parts have the labels of the target, so that an alert continues when an exporter ends after its engine.
        expr="""
            (up{job="__job__"} unless ignoring (model_name, engine, version, vllm_version, native) kvobs_build_info)
            or (max without (model_name, engine) (kvobs_engine_up) == 0) - 1
        """,
        hold="20m",  # large models take that long to start
        summary="kvobs metrics are missing.",
        description="{{ $labels.instance }} of job {{ $labels.job }} {{ if eq $value 0.0 }}cannot be "
        "scraped{{ else if lt $value 0.0 }}is an exporter whose engines have ended{{ else }}is scraped but "
        "exposes no kvobs metrics{{ end }}. No other kvobs alert can fire for this server.",
    ),
    Alert(
        name="KvobsScrapedTwice",
        severity=Severity.WARNING,
        about=DOUBLED,
        expr="""
            count by (__cluster__, instance, model_name, engine) (
              group by (__cluster__, instance, model_name, engine, job) (last_over_time(kvobs_build_info[2m]))
            ) > 1
        """,
        hold="10m",
        summary="More than one job scrapes the same kvobs metrics: dashboards count them twice.",
        description="{{ $value }} jobs scrape the kvobs metrics of {engine}. Dashboards show multiples of the real "
        "rates, and alerts fire once per job.",
    ),
    Alert(
        name="KvobsInternalErrors",
        severity=Severity.WARNING,
        about=ENGINE,
        # A missed scrape ends no series here: the alert stays pending, or fires on.
        expr="""
            last_over_time((
              (
                kvobs_internal_errors_total
                and (
                  timestamp(kvobs_internal_errors_total)
                  >= ignoring (where) group_left () timestamp(kvobs_start_time_seconds)
                )
                and (
                  kvobs_internal_errors_total
                  and ignoring (where) (
                    kvobs_start_time_seconds > time() - 900
                    or kvobs_start_time_seconds > min_over_time(kvobs_start_time_seconds[15m])
                  )
                  or count_over_time(kvobs_internal_errors_total[15m])
                  < ignoring (where) group_left () count_over_time(kvobs_start_time_seconds[15m])
                )
                or increase(kvobs_internal_errors_total[15m])
                and ignoring (where) (kvobs_start_time_seconds == min_over_time(kvobs_start_time_seconds[15m]))
              ) > 0
            )[90s:30s])
        """,
        hold="1m",
        summary="kvobs's telemetry has internal errors.",
        description="kvobs contained {{ $value | humanize }} internal errors ({{ $labels.where }}) on {engine} in "
        "the last fifteen minutes. Metrics or spans are lost; serving is not affected.",
    ),
    Alert(
        name="KvobsTelemetryDropping",
        severity=Severity.WARNING,
        about=ENGINE,
        expr="""
            engine:kvobs_spans_dropped:rate5m > __spans_dropped__
            and engine:kvobs_start_time_seconds:same5m
        """,
        hold="10m",
        summary="kvobs drops spans of KV transfers.",
        description="kvobs drops {{ $value | humanize }} spans per second on {engine}. Traces have gaps; metrics are "
        "complete.",
    ),
    Alert(
        name="KvobsTelemetryCost",
        severity=Severity.INFO,
        about=ENGINE,
        # Divided by the ranks. A host without EngineCore does not know them: there by the most of the engines with this
        # model and number.
        expr="""
            (
              engine:kvobs_overhead_seconds:record_rate5m
              / engine:kvobs_slowest_rank:count
              or engine:kvobs_overhead_seconds:record_rate5m
              and kvobs_local_cache_tokens
              or engine:kvobs_overhead_seconds:record_rate5m
              / on (__cluster__, job, model_name, engine) group_left () max by (__cluster__, job, model_name, engine) (
                engine:kvobs_slowest_rank:count
              )
              or engine:kvobs_overhead_seconds:record_rate5m
            ) > __self_share__
            and engine:kvobs_start_time_seconds:same5m
            or sum without (stage) (rate(kvobs_overhead_seconds_total{stage="export"}[5m])) > __self_share__
            and engine:kvobs_start_time_seconds:same5m
        """,
        hold="15m",
        summary="kvobs's telemetry uses a lot of CPU time.",
        description="Telemetry uses {{ $value | humanizePercentage }} of one core in one process of {engine}.",
    ),
)
