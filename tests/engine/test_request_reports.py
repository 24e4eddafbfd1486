"""A real server: a client that asks gets the report of its own request, others get none, and the log has both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.server import Server
from tests.engine.serving import TOKENS, ServedEngine, eventually, of_tests, prompt, total

pytestmark = pytest.mark.engine

ASK: dict[str, Any] = {"kvobs": {"report": True}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "requests.log"


@pytest.fixture(scope="module")
def server(served_engine: ServedEngine, log: Path) -> Iterator[Server]:
    config = multi_connector(of_tests("SteeredConnector"), host_memory(), names=["steered", "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"request_report": True, "request_log": str(log)}
    config["kv_load_failure_policy"] = "recompute"
    with served_engine(config) as server:
        server.complete(prompt("warm"), TOKENS)
        yield server


def lines(log: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of the log by the id that the client has chosen."""
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {line["request_id"].removeprefix("cmpl-").rsplit("-", 2)[0]: line for line in found}


def line(log: Path, request: str) -> dict[str, Any]:
    assert eventually(lambda: request in lines(log))
    return lines(log)[request]


def ask(server: Server, request: str, text: str, **params: Any) -> Any:
    """Return the answer's ``kv_transfer_params``."""
    more: dict[str, Any] = {"kv_transfer_params": params} if params else {}
    return server.complete(text, TOKENS, headers={"X-Request-Id": request}, **more).raw["kv_transfer_params"]


def test_who_asks_gets_the_first_load_and_the_second_hit(server: Server, log: Path) -> None:
    text = prompt("asked")
    steer = {"steered": {"offer": "stored", "async": True, "load_ms": 30}}
    answers = []
    for name in ("first", "second"):
        server.reset_prefix_cache()
        answers.append(ask(server, name, text, steer=steer, **ASK)["kvobs"]["report"])
    assert [answer["loads"] for answer in answers[:1]] == [[]]
    (load,) = answers[1]["loads"]
    assert (load["connector"], load["mode"], load["outcome"]) == ("steered", "async", "ok")
    assert load["tokens"] == answers[1]["offered_tokens"]["steered"] >= 100
    assert answers[1]["offered_tokens"]["cpu"] >= 100, "it has the prompt, too"
    assert answers[1]["prompt_tokens"] > load["tokens"]
    assert 0.03 <= load["duration_s"] <= load["waited_s"] < 10
    for name, answer in zip(("first", "second"), answers, strict=True):
        logged = line(log, name)
        assert logged["finish_reason"] == "length"
        assert logged | answer == logged | {"asked": True}


@pytest.mark.parametrize("params", [{}, {"kvobs": 3}, {"kvobs": {"report": "yes"}}, {"steer": {}}], ids=repr)
def test_who_does_not_ask_gets_none(params: dict[str, Any], server: Server, log: Path) -> None:
    request = f"not-{len(repr(params))}"
    assert ask(server, request, prompt("not asked", params), **params) is None
    assert line(log, request)["prompt_tokens"] > 100


def test_a_connectors_own_params_come_with_it(server: Server) -> None:
    steer = {"steered": {"params": {"remote_block_ids": [1]}}}
    found = ask(server, "own", prompt("own"), steer=steer, **ASK)
    assert found.pop("kvobs")["report"]["asked"] is True
    assert found == {"remote_block_ids": [1]}
    assert ask(server, "own-only", prompt("own only"), steer=steer) == {"remote_block_ids": [1]}


def test_after_a_rotation_no_line_is_lost(server: Server, log: Path) -> None:
    log.rename(log.with_suffix(".1"))
    ask(server, "rotated", prompt("rotated"))
    assert line(log, "rotated")["lookups"] >= 1
    assert total(server, "kvobs_request_log_dropped_total") == 0
    assert total(server, "kvobs_internal_errors_total") == 0
    finished = total(server, "vllm:request_success_total")
    assert eventually(lambda: len((log.with_suffix(".1").read_text() + log.read_text()).splitlines()) == finished)


def test_the_last_lines_are_written_when_vllm_stops_in_order(served_engine: ServedEngine) -> None:
    """On stderr, without what vLLM puts before its own lines."""
    config = multi_connector(host_memory(), names=["cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"request_log": "stderr"}
    with served_engine(config, "--shutdown-timeout", "20") as server:
        for i in range(5):
            server.complete(prompt("last", i), 2)
    found = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith('{"time"')]
    assert [line["finish_reason"] for line in found] == ["length"] * 5
