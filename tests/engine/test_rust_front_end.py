"""vLLM's Rust front end knows nothing of kvobs: its numbers come from the exporter, which the engine starts."""

import json
import os
import urllib.request
from typing import Any

import pytest

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.model import NAME
from kvobs.testing.server import Server
from tests.contract.hosts import prepare
from tests.engine.exported import PORT, SHOWN_BY_NONE, Exported, by_itself, with_exporter
from tests.engine.serving import ROOT, ServedEngine, eventually, prompt, total
from tests.versions.engines import RUST_VERSION, overlay, rust_front_end

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]  # the front end is fetched within it


def ask(server: Server, text: str, **headers: str) -> list[int]:
    body = {"model": NAME, "prompt": text, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


@pytest.fixture
def rust() -> dict[str, Any]:
    """Return what lets a server run the version's engine with its Rust front end."""
    prepare([RUST_VERSION])
    env = {
        "PYTHONPATH": os.pathsep.join([str(overlay(RUST_VERSION)), str(ROOT)]),
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_RUST_FRONTEND_PATH": str(rust_front_end()),
    }
    return {"env": env, "imported_with": env}


@pytest.mark.parametrize(("ranks", "requests"), [(1, {"0": 6}), (2, {"0": 6}), (1, {"0": 2, "1": 5})], ids=repr)
def test_the_exporter_has_each_engines_numbers(
    served_engine: ServedEngine, rust: dict[str, Any], ranks: int, requests: dict[str, int]
) -> None:
    config, port = with_exporter(multi_connector(host_memory(), names=["host"]))
    is_group = len(requests) > 1
    if is_group:  # vLLM 0.33 needs one memory node for each engine of a group
        rust["env"] = rust["env"] | {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    args = ("--data-parallel-size", str(len(requests))) if is_group else ()
    with served_engine(config, *args, **rust, ranks=ranks) as plain:
        server: Any = Exported(plain, port)
        server.until_up()
        for engine, count in requests.items():
            headers = {"X-data-parallel-rank": engine} if is_group else {}
            texts = [prompt("rust", engine, i) for i in range(count)]
            answers = [ask(plain, text, **headers) for text in texts]
            plain.reset_prefix_cache()
            assert [ask(plain, text, **headers) for text in texts] == answers, "loaded, they answer the same"

        def counted() -> dict[tuple[str, str, str], float]:
            return {
                (s.labels["engine"], s.name, s.labels["outcome"]): s.value
                for s in server.metrics()
                if s.name in ("kvobs_lookups_total", "kvobs_loads_total")
            }

        expected = {
            (engine, f"kvobs_{metric}_total", outcome): count
            for engine, count in requests.items()
            for metric, outcome in (("lookups", "miss"), ("lookups", "hit"), ("loads", "ok"))
        }
        assert eventually(lambda: counted() == expected, 10), counted()
        if not is_group:
            hits = total(server, "vllm:external_prefix_cache_hits_total")
            assert total(server, "kvobs_load_tokens_total") == hits > 0


@pytest.mark.usefixtures("_default_port")
def test_the_exporter_starts_by_itself(served_engine: ServedEngine, rust: dict[str, Any]) -> None:
    with served_engine(multi_connector(host_memory(), names=["host"]), **rust) as plain:
        server = by_itself(plain)
        ask(plain, prompt("rust"))
        assert eventually(lambda: [s.value for s in server.metrics() if s.name == "kvobs_lookups_total"] == [1], 10)
        said = [line for line in plain.log.read_text().splitlines() if SHOWN_BY_NONE in line]
    assert len(said) == 1
    assert f"metrics at http://127.0.0.1:{PORT}/metrics" in said[0]
