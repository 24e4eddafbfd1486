"""The board *Prefill and decode*: engines of two roles, in the order in which a request passes through them."""

from __future__ import annotations

from dashboards import frame, looks, questions
from dashboards.engines import PLACE
from dashboards.frame import Board, Section
from dashboards.panels import About, Panel, Query, lines, of_connector, p99_and_mean
from dashboards.promql import ratio, share
from dashboards.questions import DECODE, DECODE_VLLM, PREFILL, PREFILL_VLLM, SELECTION, by_engine, with_role
from dashboards.tables import Column, rows
from kvobs.schema import signals

NOT_SPLIT = "Engines whose connectors are all kv_both count for both sides: kvobs cannot separate them."


def prefill_decode() -> Board:
    """Return the board."""
    return Board(
        frame.PREFILL_DECODE,
        "kvobs / Prefill and decode",
        "The path of a request with separate engines for prefill and decode: it waits for prefill, is computed, its "
        "blocks are held until decode has fetched them, decode waits for them, resumes and generates. Engines with a "
        "kv_producer are prefill engines, engines with a kv_consumer are decode engines; engines with only kv_both "
        "count for both.",
        [
            Section("", [(9, [(24, _engines())])]),
            Section(
                "1. Prefill: queue and computation",
                [(8, [(12, _waiting()), (12, _prefill_times())])],
            ),
            Section(
                "2. Save hold: blocks on the prefill side wait to be fetched",
                [(8, [(8, _hold()), (8, _usage()), (8, _held_tokens())])],
            ),
            Section(
                "3. Transfer: requests on the decode side wait for their blocks",
                [
                    (8, [(6, _loads()), (6, _load_times()), (6, _speed()), (6, _failures())]),
                    (8, [(24, _peers())]),
                ],
            ),
            Section(
                "4. Resume and decode",
                [
                    (8, [(8, _resume()), (8, _first_token()), (8, _between_tokens())]),
                ],
            ),
        ],
        [frame.of_label(questions.ROLE, questions.VARIABLES)],
    )


def _engines() -> Panel:
    return rows(
        "Engines by role, oldest transfer first",
        About(
            "One row per connector of each engine, with its role (kv_role); an engine on several hosts has one per "
            "host.",
            "Producers save and hold, consumers load: held tokens on a producer are blocks that no consumer has "
            "fetched yet.",
            "Old transfers only on producers: the consumers are slow or gone. Only on consumers: the link or the "
            "producers are.",
            "All rows kv_both: set kv_role to kv_producer and kv_consumer where the connector allows it, or choose the "
            "instances of one side above.",
        ),
        {"connector": "Connector", "role": "Role", **PLACE},
        [
            Column("Oldest transfer", with_role(questions.oldest(*by_engine)), "s", looks.AGE_SECONDS),
            Column("Held tokens", with_role(SELECTION.gauge(signals.HELD_TOKENS, *by_engine))),
            Column("Saves/s", with_role(SELECTION.rate(signals.SAVES, *by_engine)), decimals=2),
            Column(
                "Save hold p99", with_role(SELECTION.quantile(0.99, signals.SAVE_HOLD, *by_engine)), "s",
            ),
            Column("Loads/s", with_role(SELECTION.rate(signals.LOADS, *by_engine)), decimals=2),
            Column(
                "Load p99", with_role(SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_engine)), "s",
                looks.LOAD_SECONDS,
            ),
            Column("", with_role(questions.every(*by_engine))),
        ],
        limit=50,
    )  # fmt: skip


def _waiting() -> Panel:
    return lines(
        "Requests waiting and running (dashed)",
        About(
            "vLLM's queues on both sides: requests that wait to be scheduled, and requests that run (dashed).",
            "Waiting rises and running is flat: these engines are full. A request that waits for its load is waiting.",
            "The side whose queue grows needs more engines, or faster transfers.",
            NOT_SPLIT,
        ),
        *(
            query
            for (side, color), vllm in zip(looks.BY_SIDE.items(), (PREFILL_VLLM, DECODE_VLLM), strict=True)
            for query in (
                Query(vllm.vllm_gauge("num_requests_waiting"), f"{side} waiting", color, 2),
                Query(vllm.vllm_gauge("num_requests_running"), f"{side} running", color, dashed=True),
            )
        ),
        unit="short",
    )


def _prefill_times() -> Panel:
    return lines(
        "Prefill: time in the queue (dashed) and in computation (p95)",
        About(
            "Time that requests spend in vLLM's queue, and from there to their first token, on the prefill engines: "
            "p95.",
            "A long queue with short computation: too few prefill engines, or their KV cache is held by saves.",
            "Compare with the save hold and the KV cache usage below.",
            NOT_SPLIT,
        ),
        Query(PREFILL_VLLM.vllm_quantile(0.95, "request_queue_time_seconds"), "queue", looks.VLLM, dashed=True),
        Query(PREFILL_VLLM.vllm_quantile(0.95, "request_prefill_time_seconds"), "computation", looks.VLLM, 2),
        unit="s",
    )


def _hold() -> Panel:
    return lines(
        "Prefill: save hold (p99; dashed: mean)",
        About(
            "Time from a request's end on a prefill engine to the completion of its promised save.",
            "Blocks wait to be fetched, and no other request can use them.",
            "Long holds and a full KV cache (to the right): decode engines fetch too late, or too few of them do.",
            "It includes the time the blocks wait to be fetched, not only the transfer itself.",
        ),
        *p99_and_mean(PREFILL, signals.SAVE_HOLD),
        unit="s",
        exemplars=True,
    )


def _usage() -> Panel:
    return lines(
        "KV cache usage (fullest engine)",
        About(
            "Share of the KV cache that is in use, as vLLM reports it, on the fullest prefill and decode engine.",
            "Near 100 %: requests wait for blocks, or are preempted.",
            "Compare with the tokens held by transfers: held blocks are in use.",
            NOT_SPLIT,
        ),
        *(
            Query(vllm.vllm_gauge("kv_cache_usage_perc", how="max"), side, color, 2)
            for (side, color), vllm in zip(looks.BY_SIDE.items(), (PREFILL_VLLM, DECODE_VLLM), strict=True)
        ),
        unit="percentunit",
    )


def _held_tokens() -> Panel:
    return lines(
        "Prefill: KV cache held by saves (tokens)",
        About(
            "Tokens whose blocks are held on prefill engines by promised saves of finished requests.",
            "Up and down is normal. A line that only rises fills the KV cache.",
            "Look for decode engines that stopped: their requests' blocks are held until they are fetched.",
            "Blocks that requests share are counted for each. An idle engine keeps its last value.",
        ),
        of_connector(PREFILL.gauge(signals.HELD_TOKENS, "connector", kind="save")),
        unit="short",
    )


def _loads() -> Panel:
    return lines(
        "Decode: loads; oldest in s (dashed)",
        About(
            "Loads in progress on the decode engines, whose requests wait for them, and the oldest one's age.",
            "A line that only rises is a backlog; an age that only rises is a load that never ends.",
            "Compare with 'Save hold' above. Both long: the link. Short holds and long loads: the decode side.",
            "The value is updated in engine steps: an idle engine keeps its last value.",
        ),
        of_connector(DECODE.gauge(signals.IN_FLIGHT, "connector", kind="load"), "loads"),
        of_connector(questions.oldest("connector", of=DECODE, kind="load"), "oldest", dashed=True),
        unit="short",
    )


def _load_times() -> Panel:
    return lines(
        "Decode: load duration (p99; dashed: mean)",
        About(
            "p99 and mean (dashed) of loads on the decode engines, from allocation to the last rank's receipt.",
            "It is part of the time to first token on the decode side.",
            "Click a point for its trace, or open Slow loads.",
            "A p99 is the middle of its bucket, accurate to 10 %: it moves in steps of 19 %.",
        ),
        *p99_and_mean(DECODE, signals.LOAD_DURATION),
        unit="s",
        exemplars=True,
    )


def _speed() -> Panel:
    return lines(
        "Decode: throughput of a load (mean)",
        About(
            "Bytes of successful loads on the decode engines divided by the time they took.",
            "Falling while loads get slower: the link is slower. Unchanged: the loads are larger.",
            "Compare with the bandwidth of the link.",
            "Loads that run at the same time share the link: together they may be faster than this.",
        ),
        of_connector(questions.load_speed("connector", of=DECODE)),
        unit="Bps",
    )


def _failures() -> Panel:
    return lines(
        "Decode: failed loads (loads/s)",
        About(
            "Loads that failed on the decode engines, per second.",
            "No data or zero is normal.",
            "See their traces on Slow loads, then the producers: they may have restarted, or dropped the blocks.",
            "A failed load is not a failed request: decode computes the prompt itself, unless kv_load_failure_policy "
            "is fail.",
        ),
        of_connector(DECODE.rate(signals.LOADS, "connector", outcome="failed")),
        unit="short",
    )


def _peers() -> Panel:
    pair = ("peer", *by_engine)
    loads, good = (DECODE.rate(signals.PEER_LOADS, *pair, **of) for of in ({}, {"outcome": "ok"}))
    mean = ratio(DECODE.rate(signals.PEER_LOAD_SECONDS, *pair), good)
    return rows(
        "Pairs of engines, most failures first",
        About(
            "One row per decode engine and engine that it loads from, by the host and port that requests name.",
            "One bad row: that pair, such as its link or NIC. All rows of one peer: that prefill engine. All rows of "
            "one instance: that decode engine.",
            "Check the logs of both engines, and search the pair's traces by kv_transfer.remote.host.",
            "A process names its first 32 peers; all others are _OTHER; without a name it is unknown.",
        ),
        {"peer": "Loads from", "connector": "Connector", **PLACE},
        [
            Column("Failed", share(DECODE.rate(signals.PEER_LOADS, *pair, outcome="failed"), loads), "percentunit"),
            Column("Loads/s", loads, decimals=2),
            Column("Mean duration", mean, "s", looks.LOAD_SECONDS),
        ],
        limit=50,
    )


def _resume() -> Panel:
    return lines(
        "Decode: resume delay after a load (p99; dashed: mean)",
        About(
            "Time from an async load's end on all ranks to the step that schedules its request.",
            "The blocks have arrived, but the request still waits. High with many waiting requests: the engine is "
            "full.",
            "High without waiting requests: a connector blocks the scheduler, see the board Connector.",
            "Synchronous loads have no such delay.",
        ),
        *p99_and_mean(DECODE, signals.LOAD_RESUME_DELAY),
        unit="s",
    )


def _first_token() -> Panel:
    return lines(
        "Decode: time to first token and load duration (p95)",
        About(
            "vLLM's time to first token on the decode engines (grey), and load durations by connector: p95.",
            "Both rise together: transfers delay the first token. Only the grey one rises: the queue does.",
            "Compare with the prefill side's queue: the client waits for both sides, one after the other.",
            "A proxy in front adds the time on the prefill side, which this number does not include.",
        ),
        Query(DECODE_VLLM.vllm_quantile(0.95, "time_to_first_token_seconds"), "TTFT of vLLM", looks.VLLM, 3),
        of_connector(DECODE.quantile(0.95, signals.LOAD_DURATION, "connector"), "load"),
        unit="s",
    )


def _between_tokens() -> Panel:
    return lines(
        "Decode: time between tokens, and steps blocked by loads (p95)",
        About(
            "vLLM's time between tokens on the decode engines (grey), and the time steps wait for loads: p95.",
            "A connector's line near the grey one: its synchronous loads slow down every running request.",
            "Load asynchronously on decode engines.",
            "No data does not mean zero: async loads never block a step, and full CUDA graphs hide the wait.",
        ),
        Query(DECODE_VLLM.vllm_quantile(0.95, "inter_token_latency_seconds"), "between tokens", looks.VLLM, 3),
        of_connector(DECODE.quantile(0.95, signals.LOAD_STALL, "connector"), "steps blocked"),
        unit="s",
    )
