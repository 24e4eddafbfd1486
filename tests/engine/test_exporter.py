"""Real engines with the exporter: it has what the connectors count themselves, whatever happens to it or to vLLM."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from docs.pages import FOLDER
from kvobs.demo.run import host_memory
from kvobs.testing.collector import Collector
from kvobs.testing.server import claim_port, environment, group_members, parse_metrics
from kvobs.vllm_api.proc import start_time, stat
from tests.engine import metered
from tests.engine.exported import OPENMETRICS, PORT, SHOWN_BY_NONE, Exported, with_exporter
from tests.engine.readings import Growth, assert_every_call_is_counted, kvobs_samples
from tests.engine.serving import ServedEngine, ask_all, eventually, importing_tests, prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(served_engine: ServedEngine, folder: Path) -> Iterator[Any]:
    config = metered.configuration(metered.counting_entry(folder), host_memory(), names=["steered", "cpu"])
    config, port = with_exporter(config)
    with served_engine(config, ranks=2, is_spawned=True) as server:
        exported = Exported(server, port)
        metered.ask(exported, prompt("warm"))  # type: ignore[arg-type]
        exported.until_up()
        yield exported


def test_exporter_has_what_the_connector_counts_itself(server: Any, folder: Path) -> None:
    with Growth(server, connector="steered") as grown:
        metered.ask_in_turn(server, 40)
    metered.assert_counted_in_turn(grown, 40)
    assert_every_call_is_counted(server, folder / "counts", "steered", ranks=2)
    metered.assert_nothing_in_flight(server)
    metered.assert_promtool_finds_no_fault(server)
    assert 0 < len(kvobs_samples(server)) <= metered.SERIES_AT_MOST
    assert server.health()["state"] == "alive"


@pytest.mark.parametrize("fault", ["killed", "stopped", "scraped all the time"])
def test_exporters_faults_change_no_answer_and_no_number(server: Any, fault: str) -> None:
    texts = [prompt(fault, i) for i in range(6)]
    expected = ask_all(server, texts)
    pid, over = server.pid(), threading.Event()

    def scrape() -> None:
        while not over.is_set():
            try:
                server.get("/metrics")
            except OSError:
                time.sleep(0.01)

    scrapers = [threading.Thread(target=scrape) for _ in range(4 if fault == "scraped all the time" else 0)]
    with Growth(server, connector="steered") as grown:
        for scraper in scrapers:
            scraper.start()
        if not scrapers:
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        metered.ask_in_turn(server, 24, about=fault)
        if fault == "stopped":
            os.kill(pid, signal.SIGCONT)
        over.set()
        for scraper in scrapers:
            scraper.join()
        server.until_up()
    metered.assert_counted_in_turn(grown, 24)
    assert ask_all(server, texts) == expected
    assert (server.pid() != pid) == (fault == "killed")


def test_after_kill_9_the_last_numbers_are_served_to_the_end(server: Any) -> None:
    """This must be the last test of this server."""
    pid, hits = server.pid(), Growth(server)
    with hits:
        pass
    lookups = sum(s.value for s in kvobs_samples(server) if s.name == "kvobs_lookups_total")
    assert server.server.process is not None
    processes = {p: stat(p)[0] for p in group_members(server.server.process.pid)}
    (core,) = [p for p, name in processes.items() if name.startswith("VLLM::EngineCor")]
    os.kill(core, signal.SIGKILL)
    assert eventually(lambda: server.health()["state"] == "gone", 10)
    samples = parse_metrics(server.get("/metrics"))
    assert sum(s.value for s in samples if s.name == "kvobs_lookups_total") == lookups
    assert [s.value for s in samples if s.name == "kvobs_engine_up"] == [0]
    assert eventually(lambda: not Path(f"/proc/{pid}").exists(), 15 + 5)
    # vLLM's workers spin on their core for a while without their engine, where Linux 6.18 lets nobody else run.
    workers = [p for p, name in processes.items() if name.startswith("VLLM::Worker")]
    assert workers
    assert eventually(lambda: not any(start_time(p) for p in workers))


def test_api_servers_share_an_exporter_with_spans_and_exemplars(served_engine: ServedEngine, tmp_path: Path) -> None:
    config, port = with_exporter(
        metered.configuration(metered.counting_entry(tmp_path), host_memory(), names=["steered", "cpu"])
    )
    with Collector() as collector:
        args = ("--api-server-count", "2", "--otlp-traces-endpoint", collector.endpoint)
        env = {**collector.env, "OTEL_BSP_SCHEDULE_DELAY": "300"}
        with served_engine(config, *args, env=env) as plain:
            server: Any = Exported(plain, port)
            server.until_up()
            with Growth(server, connector="steered") as grown:
                metered.ask_in_turn(server, 40)
            metered.assert_counted_in_turn(grown, 40)
            assert_every_call_is_counted(server, tmp_path / "counts", "steered", ranks=1)
            assert eventually(lambda: sum(s.name == "kv.load steered" for s in collector.spans) == 20)
            ours = [s for s in collector.spans if s.scope == "kvobs"]
            loads = [s for s in ours if s.name == "kv.load steered"]
            assert sorted(s.parent_id for s in ours if s.name == "kv.load.rank") == sorted(s.span_id for s in loads)
            families: Any = text_string_to_metric_families(server.get("/metrics", accept=OPENMETRICS))  # type: ignore[no-untyped-call]
            marked = {s.exemplar.labels["trace_id"] for f in families for s in f.samples if s.exemplar}
            assert marked & {s.trace_id for s in loads}
            assert marked <= {s.trace_id for s in ours}
            pid = server.pid()
            metered.ask(server, prompt("the last one"), {"offer": 64, "async": True, "load_ms": 1})
        # At SIGTERM to its server vLLM kills all processes of the engine: an ordinary stop.
        assert eventually(lambda: server.health()["state"] == "gone", 10)
        time.sleep(1.0)
        assert "kvobs_engine_ended{" not in server.get("/metrics")
        # vLLM kills all children of its processes when it is asked to end: the exporter is none, and lingers 15 s.
        assert eventually(lambda: not Path(f"/proc/{pid}").exists(), 30)
        assert len([s for s in collector.spans if s.name == "kv.load steered"]) == 21, "sent at the end"


@pytest.mark.usefixtures("_default_port")
@pytest.mark.parametrize(("is_configured", "has_core_process"), [(True, True), (False, True), (False, False)])
def test_the_offline_example_of_the_docs_prints_its_numbers(
    model: Path, tmp_path: Path, is_configured: bool, has_core_process: bool
) -> None:
    """Also without the exporter's options: stat logging is off by default: the engine starts it, and logs it."""
    (text,) = re.findall(r"```python\n(.*?)```", (FOLDER / "exporter.md").read_text(), re.DOTALL)
    port, options = (claim_port(0) if is_configured else PORT), ', "exporter": {"port": PORT}'
    assert options in text
    text = text if is_configured else text.replace(options, "")
    ours = f"MODEL, CONNECTORS, PORT = {str(model)!r}, {[host_memory()]!r}, {port}\n\n\ndef main() -> None:\n"
    text = text.replace("def main() -> None:\n", ours, 1)
    text = text.replace("        MODEL,\n", "        MODEL,\n        **json.loads(sys.argv[1]),\n", 1)
    script = tmp_path / "offline.py"
    script.write_text(f"import json, sys\n{text}")
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "block_size": 32}
    env = environment() | importing_tests() | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_core_process))}
    command = [sys.executable, str(script), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = "\n".join(re.findall(r"^kvobs_.*$", done.stdout, re.MULTILINE))
    numbers = {(s.name, s.labels["outcome"]): s.value for s in parse_metrics(f"{printed}\n") if s.value}
    lookups = {("kvobs_lookups_total", "miss"): 1, ("kvobs_lookups_total", "hit"): 1}
    assert numbers == lookups | {("kvobs_loads_total", "ok"): 1}
    assert (done.stdout + done.stderr).count(SHOWN_BY_NONE) == (not is_configured)
