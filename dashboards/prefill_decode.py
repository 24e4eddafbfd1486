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
            "A row for each connector of each engine with its role (kv_role); held tokens of a producer are blocks "
            "that no consumer has fetched.",
            "If transfers are old on producers only, look at the consumers; if on consumers only, at the link and the "
            "producers.",
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
            "vLLM's queues on both sides: requests that wait to be scheduled, also for a load, and requests that run "
            "(dashed).",
            "Where waiting rises and running is flat, engines are full: that side needs more of them, or faster "
            "transfers.",
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
            "p95 of the time in vLLM's queue (dashed), and from there to the first token, on prefill engines.",
            "With a long queue and short computation add prefill engines, unless saves hold their KV cache: see below.",
        ),
        Query(PREFILL_VLLM.vllm_quantile(0.95, "request_queue_time_seconds"), "queue", looks.VLLM, dashed=True),
        Query(PREFILL_VLLM.vllm_quantile(0.95, "request_prefill_time_seconds"), "computation", looks.VLLM, 2),
        unit="s",
    )


def _hold() -> Panel:
    return lines(
        "Prefill: save hold (p99; dashed: mean)",
        About(
            "Time from a request's end on a prefill engine to the completion of its promised save; its blocks are "
            "held for so long.",
            "With long holds and a full KV cache (to the right), look for decode engines that fetch late or are gone.",
        ),
        *p99_and_mean(PREFILL, signals.SAVE_HOLD),
        unit="s",
        exemplars=True,
    )


def _usage() -> Panel:
    return lines(
        "KV cache usage (fullest engine)",
        About(
            "Share of the KV cache in use, as vLLM reports it, on the fullest prefill and decode engine.",
            "Near 100 % requests wait for blocks or are preempted: compare with the tokens that transfers hold.",
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
            "Tokens whose blocks prefill engines hold for promised saves of finished requests.",
            "If the line only rises, look for decode engines that stopped: blocks are held until they are fetched.",
        ),
        of_connector(PREFILL.gauge(signals.HELD_TOKENS, "connector", kind="save")),
        unit="short",
    )


def _loads() -> Panel:
    return lines(
        "Decode: loads; oldest in s (dashed)",
        About(
            "Loads in progress on decode engines, whose requests wait for them, and the age of the oldest in seconds "
            "(dashed).",
            "If a line only rises, compare with 'Save hold' above: if both are long, suspect the link, otherwise the "
            "decode side.",
        ),
        of_connector(DECODE.gauge(signals.IN_FLIGHT, "connector", kind="load"), "loads"),
        of_connector(questions.oldest("connector", of=DECODE, kind="load"), "oldest", dashed=True),
        unit="short",
    )


def _load_times() -> Panel:
    return lines(
        "Decode: load duration (p99; dashed: mean)",
        About(
            "p99 and mean (dashed) of loads on decode engines, from allocation to the last rank's receipt: a part of "
            "the time to first token.",
            "Click a point for its trace, or open Slow loads.",
        ),
        *p99_and_mean(DECODE, signals.LOAD_DURATION),
        unit="s",
        exemplars=True,
    )


def _speed() -> Panel:
    return lines(
        "Decode: throughput of a load (mean)",
        About(
            "Bytes of successful loads on decode engines divided by the time that they took.",
            "If it falls while loads get slower, compare it with the bandwidth of the link; if not, the loads are "
            "larger.",
        ),
        of_connector(questions.load_speed("connector", of=DECODE)),
        unit="Bps",
    )


def _failures() -> Panel:
    return lines(
        "Decode: failed loads (loads/s)",
        About(
            "Loads that failed on decode engines per second, whose prompts decode computes itself, unless "
            "kv_load_failure_policy is fail.",
            "See their traces on Slow loads, then the producers: they may have restarted, or dropped the blocks.",
        ),
        of_connector(DECODE.rate(signals.LOADS, "connector", outcome="failed")),
        unit="short",
    )


def _peers() -> Panel:
    pair = ("peer", *by_engine)
    failed, ok, either = (DECODE.rate(signals.PEER_LOADS, *pair, outcome=o) for o in ("failed", "ok", "ok|failed"))
    mean = ratio(DECODE.rate(signals.PEER_LOAD_SECONDS, *pair), ok)
    return rows(
        "Pairs of engines, most failures first",
        About(
            "A row for each decode engine and the host and port that it loads from; a process names its first 32 "
            "peers, all others are _OTHER.",
            "One bad row is that pair's link; if all rows of a peer or of an instance are bad, read that engine's log.",
        ),
        {"peer": "Loads from", "connector": "Connector", **PLACE},
        [
            Column("Failed", share(failed, either), "percentunit"),
            Column("Loads/s", DECODE.rate(signals.PEER_LOADS, *pair), decimals=2),
            Column("Mean duration", mean, "s", looks.LOAD_SECONDS),
        ],
        limit=50,
    )


def _resume() -> Panel:
    return lines(
        "Decode: resume delay after a load (p99; dashed: mean)",
        About(
            "p99 and mean (dashed) of the time from an async load's end on all ranks to the step that schedules its "
            "request.",
            "With many waiting requests the engine is full; without them a connector blocks the scheduler: see the "
            "board Connector.",
        ),
        *p99_and_mean(DECODE, signals.LOAD_RESUME_DELAY),
        unit="s",
    )


def _first_token() -> Panel:
    return lines(
        "Decode: time to first token and load duration (p95)",
        About(
            "p95 of vLLM's time to first token on decode engines (grey), without the time on the prefill side, and of "
            "load durations by connector.",
            "If both rise together, look at the transfers; if only the grey line rises, at the queue.",
        ),
        Query(DECODE_VLLM.vllm_quantile(0.95, "time_to_first_token_seconds"), "TTFT of vLLM", looks.VLLM, 3),
        of_connector(DECODE.quantile(0.95, signals.LOAD_DURATION, "connector"), "load"),
        unit="s",
    )


def _between_tokens() -> Panel:
    return lines(
        "Decode: time between tokens, and steps blocked by loads (p95)",
        About(
            "p95 of vLLM's time between tokens on decode engines (grey), and of the time that steps wait for "
            "synchronous loads.",
            "If a connector's line is near the grey one, its loads slow down every running request: load "
            "asynchronously.",
        ),
        Query(DECODE_VLLM.vllm_quantile(0.95, "inter_token_latency_seconds"), "between tokens", looks.VLLM, 3),
        of_connector(DECODE.quantile(0.95, signals.LOAD_STALL, "connector"), "steps blocked"),
        unit="s",
    )
