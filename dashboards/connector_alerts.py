"""Define the alerts about connectors: their failures, the time that they take, and the time that they save.

Most are about one connector of one engine. Vectors are matched with ``ignoring``, not ``on``: so labels of a site
(cluster, namespace) count, and clusters do not hide each other. Those about many engines of a cluster see failures that
no engine has enough of: what the engines share has failed.
"""

from __future__ import annotations

from dashboards.rules import CONNECTOR, ENGINE, FLEET, Alert, Severity
from kvobs.schema.verdicts import SERVES_OTHERS, UNSERVED_H

CONNECTORS = (
    Alert(
        name="KvobsEnginesFailingRequests",
        severity=Severity.CRITICAL,
        about=FLEET,
        # No least number of failures: on three engines for five minutes there are six.
        expr="""
            job_connector:kvobs_failed_loads:fail_engines_rate5m / job_connector:kvobs_loads:engines_rate5m
              > __failing_engines__
            and job_connector:kvobs_failed_loads:fail_engines_rate5m >= __few_failing_engines__
        """,
        hold="5m",
        keep="5m",
        summary="Requests fail on many engines because loads from a KV connector fail.",
        description="Loads from {{ $labels.connector }} fail on {{ $value | humanizePercentage }} of the engines of "
        "job {{ $labels.job }}{{ with $labels.__cluster__ }} in {{ . }}{{ end }} that load from it. Their "
        "requests fail because kv_load_failure_policy is `fail`. Check what the engines share: the store, the "
        'network, a new version. Worst:{{ with printf "topk(3, max by (__cluster__, instance, engine) '
        '(connector:kvobs_failed_loads:ratio_rate5m{job=%q,connector=%q,__cluster__=%q}))" $labels.job '
        "$labels.connector $labels.__cluster__ | query }}{{ range . }} "
        "{{ .Labels.instance }}/{{ .Labels.engine }}{{ end }}{{ end }}.",
    ),
    Alert(
        name="KvobsRequestsFailing",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            connector:kvobs_failing_loads:lasting10m
            and connector:kvobs_connector_info:fail_last2m
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="0m",
        summary="Requests fail because loads from a KV connector fail.",
        description="{{ $value | humanizePercentage }} of the loads from {connector} failed in the last five minutes "
        "(in the last six hours if there are few loads). Their requests fail because kv_load_failure_policy is "
        "`fail`.",
    ),
    Alert(
        name="KvobsFailedSyncLoads",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            (
              kvobs_failed_sync_loads_total
              and (
                timestamp(kvobs_failed_sync_loads_total)
                >= ignoring (connector) group_left () timestamp(kvobs_start_time_seconds)
              )
              and (
                kvobs_failed_sync_loads_total
                and ignoring (connector) (kvobs_start_time_seconds > time() - 900)
                or count_over_time(kvobs_failed_sync_loads_total[15m])
                < ignoring (connector) group_left () count_over_time(kvobs_start_time_seconds[15m])
              )
              or increase(kvobs_failed_sync_loads_total[15m])
            ) > 0
        """,
        hold="0m",
        keep="10m",
        summary="Synchronous loads failed, and other connectors may have saved unfilled blocks.",
        description="{{ $value | humanize }} synchronous loads from {connector} failed in the last fifteen minutes. "
        "Blocks that other connectors saved in the same step may be wrong, as may answers that use them. Other "
        "connectors:{{ with printf "
        '"kvobs_connector_info{job=%q,instance=%q,engine=%q,connector!=%q,__cluster__=%q}" $labels.job '
        "$labels.instance $labels.engine $labels.connector $labels.__cluster__ | query }}{{ range . }} "
        "{{ .Labels.connector }}{{ end }}{{ end }}.",
    ),
    Alert(
        name="KvobsCorruptLoads",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            (
              kvobs_corrupt_blocks_total
              and (
                timestamp(kvobs_corrupt_blocks_total)
                >= ignoring (connector, rank) group_left () timestamp(kvobs_start_time_seconds)
              )
              and (
                kvobs_corrupt_blocks_total
                and ignoring (connector, rank) (kvobs_start_time_seconds > time() - 900)
                or count_over_time(kvobs_corrupt_blocks_total[15m])
                < ignoring (connector, rank) group_left () count_over_time(kvobs_start_time_seconds[15m])
              )
              or increase(kvobs_corrupt_blocks_total[15m])
            ) > 0
        """,
        hold="0m",
        keep="10m",
        summary="A KV connector loads wrong bytes: answers may be wrong.",
        description="In the last fifteen minutes, {{ $value | humanize }} verified blocks that {connector} loaded on "
        "rank {{ $labels.rank }} differed from the blocks computed for the same tokens. The answers of their "
        "requests may be wrong, although the loads count as successful. The request log (option `request_log`) "
        "marks all of these requests with the field `wrong_blocks`. vLLM's log names one a minute, and the "
        "connectors that may have overwritten its blocks.",
    ),
    Alert(
        name="KvobsStuckTransfers",
        severity=Severity.CRITICAL,
        about=CONNECTOR,
        board="kvobs-connector",
        # The counter shows that it began. The alert continues, and does not begin, while the oldest transfer began
        # before that quarter of an hour: a later one, or one after a restart, is another. A missed scrape ends no
        # series here. The sum has no name, which the two have. The label alertgroup is vmalert's.
        expr="""
            last_over_time((
              0 + (
                connector_rank:kvobs_stuck_transfers:increase15m > 0
                or (
                  kvobs_stuck_transfers_total
                  and ignoring (alertname, alertstate, alertgroup, severity)
                    ALERTS{alertname="KvobsStuckTransfers",alertstate="firing"}
                  and ignoring (rank) max without (kind) (kvobs_oldest_in_flight_seconds{kind=~"load|save"}) > 900
                )
              )
            )[90s:30s])
        """,
        hold="1m",
        summary="A rank has not reported transfers that other ranks have finished.",
        description="Rank {{ $labels.rank }} has not reported {{ $value | humanize }} transfers of {connector} that "
        "other ranks finished more than `stuck_after_s` ago. These became stuck in the last fifteen minutes, or "
        "earlier and are still open. Their requests wait, or their blocks stay held.",
    ),
    Alert(
        name="KvobsEnginesFailing",
        severity=Severity.WARNING,
        about=FLEET,
        expr="""
            job_connector:kvobs_failed_loads:recompute_engines_rate5m / job_connector:kvobs_loads:engines_rate5m
              > __failing_engines__
            and job_connector:kvobs_failed_loads:recompute_engines_rate5m >= __few_failing_engines__
        """,
        hold="5m",
        keep="5m",
        summary="Loads from a KV connector fail on many engines.",
        description="Loads from {{ $labels.connector }} fail on {{ $value | humanizePercentage }} of the engines of "
        "job {{ $labels.job }}{{ with $labels.__cluster__ }} in {{ . }}{{ end }} that load from it. vLLM "
        "recomputes their tokens. Check what the engines share: the store, the network, a new version. Worst:{{ "
        'with printf "topk(3, max by (__cluster__, instance, engine) '
        '(connector:kvobs_failed_loads:ratio_rate5m{job=%q,connector=%q,__cluster__=%q}))" $labels.job '
        "$labels.connector $labels.__cluster__ | query }}{{ range . }} "
        "{{ .Labels.instance }}/{{ .Labels.engine }}{{ end }}{{ end }}.",
    ),
    Alert(
        name="KvobsConnectorFailing",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            connector:kvobs_failing_loads:lasting10m
            unless connector:kvobs_connector_info:fail_last2m
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="0m",
        summary="Loads from a KV connector fail.",
        description="{{ $value | humanizePercentage }} of the loads from {connector} failed in the last five minutes "
        "(in the last six hours if there are few loads). vLLM recomputes their tokens.",
    ),
    Alert(
        name="KvobsConnectorBlocksScheduler",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            last_over_time((connector:kvobs_scheduler_seconds:rate2m > __scheduler_share__)[10m:30s])
            and count_over_time((connector:kvobs_scheduler_seconds:rate2m > __scheduler_share__)[10m:30s]) > 10
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="0m",
        summary="Calls into a KV connector take much of the scheduler's time.",
        description="The scheduler spends {{ $value | humanizePercentage }} of its time in calls into {connector}. "
        "This share was too high for more than five of the last ten minutes. The engine runs no step during such "
        "a call.",
    ),
    Alert(
        name="KvobsLookupUnanswered",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            max_over_time(kvobs_oldest_in_flight_seconds{kind="lookup"}[2m]) > __lookup_age_s__
            and ignoring (connector, kind) engine:kvobs_start_time_seconds:same2m
        """,
        hold="0m",
        summary="A KV connector does not answer lookups, so requests do not start.",
        description="The oldest lookup of {connector} has been answered with 'not yet' for "
        "{{ $value | humanizeDuration }}. Its request waits for the final answer.",
    ),
    Alert(
        name="KvobsConnectorQuarantined",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        # Without traffic there is no probation: the value may be old.
        expr="""
            avg_over_time(kvobs_quarantined[5m]) > 0.5
            and ignoring (connector) engine:kvobs_overhead_seconds:rate5m > 0
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="2m",
        summary="A best-effort KV connector is in quarantine.",
        description="{connector} was in quarantine for {{ $value | humanizePercentage }} of the last five minutes "
        "because it failed. Requests are served without its cache.",
    ),
    Alert(
        name="KvobsConnectorErrors",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        # A missed scrape ends no series here: the alert stays pending, or fires on.
        expr="""
            last_over_time((
              sum without (hook, error_type) (
                kvobs_call_errors_total
                and (
                  timestamp(kvobs_call_errors_total)
                  >= ignoring (connector, hook, error_type) group_left () timestamp(kvobs_start_time_seconds)
                )
                and (
                  kvobs_call_errors_total
                  and ignoring (connector, hook, error_type) (
                    kvobs_start_time_seconds > time() - 900
                    or kvobs_start_time_seconds > min_over_time(kvobs_start_time_seconds[15m])
                  )
                  or count_over_time(kvobs_call_errors_total[15m])
                  < ignoring (connector, hook, error_type) group_left () count_over_time(kvobs_start_time_seconds[15m])
                )
                or increase(kvobs_call_errors_total[15m])
                and ignoring (connector, hook, error_type) (
                  kvobs_start_time_seconds == min_over_time(kvobs_start_time_seconds[15m])
                )
              ) > 0
            )[90s:30s])
        """,
        hold="1m",
        summary="A KV connector raises exceptions.",
        description="{connector} raised {{ $value | humanize }} exceptions in the last fifteen minutes.",
    ),
    Alert(
        name="KvobsLoadsHideFailures",
        severity=Severity.WARNING,
        about=ENGINE,
        board="kvobs-connector",
        # The connectors' own metrics, which may be of another target on the same host. No increase shows the first
        # failed load: its series begins with it.
        expr="""
            label_replace(
              group without (version, vllm_version, native) (last_over_time(kvobs_build_info[2m])),
              "host", "$1", "instance", "(.+?)(:[0-9]+)?"
            )
            * on (__cluster__, host, model_name, engine) group_left () (
              sum by (__cluster__, host, model_name, engine) (
                label_replace(
                  increase({__name__=~"vllm[:_]nixl_num_notifications_after_expiry_total"}[15m]) > 0
                  or increase({__name__=~"vllm[:_]nixl_num_failed_transfers_total"}[15m]) > 0
                  or ignoring (operation, status) sum without (operation, status) (
                    increase({__name__=~"vllm[:_]mooncake_store_operation_failed_keys_total",operation="load_get"}[15m])
                  ) > 0,
                  "host", "$1", "instance", "(.+?)(:[0-9]+)?"
                )
              )
              unless on (__cluster__, host, model_name, engine) (
                sum by (__cluster__, host, model_name, engine) (
                  label_replace(
                    kvobs_loads_total{outcome="failed"} unless kvobs_loads_total{outcome="failed"} offset 15m
                    or increase(kvobs_loads_total{outcome="failed"}[15m]),
                    "host", "$1", "instance", "(.+?)(:[0-9]+)?"
                  )
                ) > 0
              )
            )
        """,
        hold="5m",
        summary="A KV connector reports transfer failures that did not fail any load.",
        description="In the last fifteen minutes, NIXL or Mooncake counted {{ $value | humanize }} failed transfers, "
        "failed keys, or reads after the end of a lease on {engine}, but no load failed. Loads may have "
        "delivered wrong bytes.",
    ),
    Alert(
        name="KvobsLoadsSlow",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-slow-loads",
        # Most loads, at once, and for eight minutes after; or the slowest for ten of fifteen minutes.
        expr="""
            connector_mode:kvobs_slow_loads:median_rate2m
            or last_over_time(connector_mode:kvobs_slow_loads:median_rate2m[8m])
            and ignoring (connector, mode) engine:kvobs_start_time_seconds:same10m
            or last_over_time(connector_mode:kvobs_slow_loads:p99_rate5m[15m])
            and count_over_time(connector_mode:kvobs_slow_loads:p99_rate5m[15m:30s]) > 20
            and ignoring (connector, mode) engine:kvobs_start_time_seconds:same10m
        """,
        hold="0m",
        summary="Loads from a KV connector are slow.",
        description="Most {{ $labels.mode }} loads from {connector}, or one in a hundred for ten minutes, take about "
        "{{ $value | humanizeDuration }} or longer "
        '(thresholds: {{ printf "%.3g" __slow_load_s__ }} s, and __slow_load_s_per_1k_tokens__ s per 1000 tokens of an '
        "average load). "
        "Requests wait that long for their first token.",
    ),
    Alert(
        name="KvobsLoadsSlowed",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-slow-loads",
        expr="""
            last_over_time(connector:kvobs_slowed_loads:ratio_rate2m[4m])
            and count_over_time(connector:kvobs_slowed_loads:ratio_rate2m[10m:30s]) > 4
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="0m",
        summary="Loads from a KV connector take several times as long as they did a day ago.",
        description="Loads from {connector} take {{ $value | humanize }} times as long as they did a day ago, for "
        "the same number of tokens.",
    ),
    Alert(
        name="KvobsLoadsBelowLink",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-slow-loads",
        # The links were in use for at least the time that all loads lasted, divided by the most that were in progress
        # at once. Synchronous loads are timed within a step, by parts that overlap; short loads end when a step does,
        # whatever the link.
        expr="""
            rate(kvobs_load_bytes_total[15m]) / (
              clamp_max(
                sum without (mode) (rate(kvobs_load_duration_seconds_sum{mode="async"}[15m]))
                / (clamp_min(max without (kind) (max_over_time(kvobs_in_flight{kind="load"}[15m])), 1) > 0),
                1
              ) * last_over_time(kvobs_link_bytes_per_second[5m]) > 0
            ) < __link_share__
            and increase(kvobs_load_bytes_total[15m])
              / (connector:kvobs_loads:async_increase15m > 0)
              > 0.1 * __link_share__ * last_over_time(kvobs_link_bytes_per_second[5m])
            and connector:kvobs_loads:async_increase15m >= __few_transfers__
            and ignoring (connector) engine:kvobs_start_time_seconds:same10m
            unless ignoring (connector) engine:kvobs_scheduler_seconds:late_rate2m
        """,
        hold="15m",
        summary="Loads from a KV connector use only a small part of its link's bandwidth.",
        description="While loads from {connector} were in progress in the last fifteen minutes, they used at most "
        "{{ $value | humanizePercentage }} of the bandwidth of its links (link_gbps). Check that they use RDMA, "
        "not TCP.",
    ),
    Alert(
        name="KvobsSaveBacklog",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        # A missed scrape must not reset the alert's `for`.
        expr="""
            last_over_time(kvobs_oldest_in_flight_seconds{kind="save"}[2m]) > __save_age_s__
            and ignoring (connector, kind) engine:kvobs_start_time_seconds:same2m
        """,
        hold="5m",
        summary="Saves hold the blocks of finished requests for a long time.",
        description="The oldest promised save of {connector} has been in progress for {{ $value | humanizeDuration }}. "
        "Other requests cannot use its blocks.",
    ),
    Alert(
        name="KvobsKvEventsStopped",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            sum without (outcome) (increase(kvobs_saves_total{outcome="ok"}[15m])) >= __few_transfers__
            and sum without (type, medium) (increase(kvobs_kv_events_total{type="stored"}[15m])) == 0
            and ignoring (connector) engine:kvobs_start_time_seconds:same10m
        """,
        hold="10m",
        summary="A KV connector has stopped publishing KV cache events.",
        description="{connector} completed {{ $value | humanize }} saves in the last fifteen minutes without "
        "publishing a KV cache event. Routers no longer send requests to the engine that has their prefix.",
    ),
    Alert(
        name="KvobsSlowestRank",
        severity=Severity.WARNING,
        about=CONNECTOR,
        board="kvobs-connector",
        # Ranks that were never the slowest are not counted: the fair share is too large then, which is the safe side.
        expr="""
            connector_rank:kvobs_slowest_rank:ratio_rate15m
              > ignoring (rank) group_left () (
                __rank_lead__ + 1 / clamp_min(count without (rank) (last_over_time(kvobs_slowest_rank_total[15m])), 2)
              )
            and ignoring (rank) connector:kvobs_rank_skew_seconds:mean_rate15m > __rank_skew_s__
            and ignoring (rank) sum without (rank) (increase(kvobs_slowest_rank_total[15m])) >= __few_transfers__
            and ignoring (connector, rank) engine:kvobs_start_time_seconds:same10m
        """,
        hold="10m",
        summary="One rank is the slowest in most loads and saves.",
        description="Rank {{ $labels.rank }} was the slowest in {{ $value | humanizePercentage }} of the loads and "
        "saves of {connector} in the last fifteen minutes; all other ranks waited for it.",
    ),
    Alert(
        name="KvobsLoadsDontPay",
        severity=Severity.INFO,
        about=CONNECTOR,
        board="kvobs-connector",
        expr="""
            increase(kvobs_loads_slower_than_computing_total[5m])
            / (connector:kvobs_loads:increase5m > 0) > __slower_share__
            and connector:kvobs_loads:increase5m >= __few_loads__
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="30m",
        summary="Most loads from a KV connector take longer than computing the tokens.",
        description="For {{ $value | humanizePercentage }} of the loads from {connector}, requests waited longer "
        "than computing the same tokens would have taken.",
    ),
    Alert(
        name="KvobsStoreTooSmall",
        severity=Severity.INFO,
        about=CONNECTOR,
        board="kvobs-connector",
        # With several media a lower one keeps what a higher one evicts.
        expr="""
            sum without (medium) (increase(kvobs_evicted_reused_tokens_total[30m]))
            / (sum without (medium) (increase(kvobs_evicted_followed_tokens_total[30m])) > 0)
              > __thrash_share__
            and sum without (medium) (rate(kvobs_evicted_tokens_total[30m])) >= __few_tokens__
            unless count without (medium) (kvobs_save_tokens_total) > 1
            and ignoring (connector) engine:kvobs_start_time_seconds:same10m
        """,
        hold="30m",
        summary="A KV connector thrashes: prompts ask again for what it evicts, so its store is too small.",
        description="Prompts ask again for {{ $value | humanizePercentage }} of the tokens that {connector} evicts, "
        "and vLLM's own cache does not have them. They are computed again, or loaded from another connector.",
    ),
    Alert(
        name="KvobsUnusedHitTokens",
        severity=Severity.INFO,
        about=CONNECTOR,
        board="kvobs-connector",
        # Of an isolated connector with synchronous loads nothing is ever admitted, by design.
        expr="""
            connector:kvobs_unused_hit_tokens:ratio_rate5m > __unused_hit_share__
            and rate(kvobs_offered_tokens_total[5m]) >= __few_tokens__
            and rate(kvobs_admitted_tokens_total[5m]) > 0
            and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        """,
        hold="30m",
        summary="Hit tokens are recomputed because another connector was chosen.",
        description="{{ $value | humanizePercentage }} of the tokens that {connector} offered were computed instead "
        "of loaded, because a connector with fewer tokens was chosen.",
    ),
    Alert(
        name="KvobsNeverServes",
        severity=Severity.INFO,
        about=CONNECTOR,
        board="kvobs-connector",
        # A series begins with its first token, which no increase shows: one that is younger counts as a whole. What was
        # not asked hours ago is new.
        expr=f"""
            sum without (outcome) (rate(kvobs_lookups_total{{outcome=~"hit|miss"}}[30m])) > 0
            and ignoring (connector) (
              rate(kvobs_loadable_tokens_total[30m]) >= __few_tokens__
              and rate(kvobs_loadable_tokens_total[30m]) / (rate(kvobs_reuse_distance_tokens_count[30m]) > 0)
                > __loadable_share__
            )
            and ignoring (index, class, role, load_policy, failure_policy)
              last_over_time(kvobs_connector_info{{role="kv_both",class!~"{SERVES_OTHERS}"}}[2m])
            and sum without (outcome) (
              last_over_time(kvobs_lookups_total{{outcome=~"hit|miss"}}[2m] offset {UNSERVED_H}h)
            )
            unless (
              (kvobs_admitted_tokens_total unless kvobs_admitted_tokens_total offset {UNSERVED_H}h)
              or increase(kvobs_admitted_tokens_total[{UNSERVED_H}h])
            ) > 0
        """,
        hold="30m",
        summary="A KV connector stores prompts but never serves any.",
        description="{{ $value | humanize }} requests per second looked up {connector}, but none loaded from it in "
        f"{UNSERVED_H} hours. Prompts evicted from vLLM's own cache recur: they are recomputed, or loaded from another "
        "connector.",
    ),
)
