"""Servers with a connector that counts, a load whose numbers are known, and what /metrics must say of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvobs.demo.run import multi_connector
from kvobs.testing.model import HEAD_DIM, KV_HEADS, LAYERS
from kvobs.testing.server import Server
from tests.engine.readings import Growth, kvobs_text
from tests.engine.serving import TOKENS, of_tests, prompt
from tests.support.promtool import promtool

BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4  # keys and values in float32, over all ranks
SERIES_AT_MOST = 1700  # of one engine with two connectors
ASYNC: dict[str, Any] = {"offer": 64, "async": True}
SYNC: dict[str, Any] = {"offer": 64}


def counting_entry(folder: Path) -> dict[str, Any]:
    (folder / "counts").mkdir(parents=True, exist_ok=True)
    return of_tests("CountingConnector", counts=str(folder / "counts"), journal=str(folder / "journal"))


def configuration(*connectors: dict[str, Any], names: list[str]) -> dict[str, Any]:
    config = multi_connector(*connectors, names=names)
    config["kv_connector_extra_config"]["kvobs"] |= {"slow_call_ms": 400, "stuck_after_s": 1.5}
    return {**config, "kv_load_failure_policy": "recompute"}


def ask(server: Server, text: str, steer: Any = None, tokens: int = TOKENS, engine: str = "0") -> None:
    params = {"steer": {"steered": steer or {}}}
    server.complete(text, tokens, kv_transfer_params=params, headers={"X-data-parallel-rank": engine})


def ask_in_turn(server: Server, requests: int, engine: str = "0", about: str = "in turn") -> None:
    """Send this many fresh prompts, 16 at a time: a fourth each loads async, loads sync, promises a save, is plain."""
    orders: tuple[dict[str, Any], ...] = ({**ASYNC, "load_ms": 20}, SYNC, {"promise": True, "save_ms": 30}, {})
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(ask, server, prompt(about, engine, i), orders[i % 4], TOKENS, engine) for i in range(requests)
        ]
        for answer in asked:
            answer.result()


def assert_counted_in_turn(grown: Growth, requests: int) -> None:
    """Check what `ask_in_turn` makes grow, on readings about the steered connector of one engine."""
    each = requests // 4
    assert grown.reaches(requests, "kvobs_lookups_total")
    assert grown.reaches(each, "kvobs_save_hold_seconds_count")
    lookups = {outcome: grown("kvobs_lookups_total", outcome=outcome) for outcome in ("hit", "miss")}
    assert lookups == {"hit": 2 * each, "miss": 2 * each}
    assert grown("kvobs_lookups_total") == requests
    # vLLM asks again where a prompt no longer fits into the step.
    assert grown("kvobs_call_duration_seconds_count", hook="get_num_new_matched_tokens") >= requests
    for metric in ("offered", "admitted", "load"):
        assert grown(f"kvobs_{metric}_tokens_total") == 2 * each * 64
    assert grown("kvobs_load_bytes_total") == 2 * each * 64 * BYTES_PER_TOKEN
    for mode in ("async", "sync"):
        assert grown("kvobs_loads_total", mode=mode, outcome="ok") == each
        assert grown("kvobs_load_duration_seconds_count", mode=mode) == each
    assert grown("kvobs_loads_total") == 2 * each
    assert grown("kvobs_saves_total", outcome="ok") == each
    assert grown("kvobs_save_hold_seconds_count") == each
    assert grown("kvobs_call_duration_seconds_count", hook="on_new_request") == requests
    # One of the two for all connectors, as vLLM has it: it depends on whether every one supports several cache groups.
    finished = ("request_finished", "request_finished_all_groups")
    assert sum(grown("kvobs_call_duration_seconds_count", hook=hook) for hook in finished) == requests
    # vLLM calls it a second time once an async load is in.
    assert grown("kvobs_call_duration_seconds_count", hook="update_state_after_alloc") == requests + each
    for nothing in ("unexpected_reports", "failed_sync_loads", "recomputed_tokens", "unused_hit_tokens", "slow_calls"):
        assert grown(f"kvobs_{nothing}_total") == 0, nothing


def assert_nothing_in_flight(server: Server) -> None:
    at_rest = ("kvobs_in_flight", "kvobs_oldest_in_flight_seconds")
    assert [s for s in server.metrics() if s.name in at_rest and s.value] == []


def assert_promtool_finds_no_fault(server: Server) -> None:
    checked = promtool("check", "metrics", input=kvobs_text(server))
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
