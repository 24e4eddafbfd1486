"""Numbers are read from pages, addresses, texts and a Prometheus; what ends or begins meanwhile is counted."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kvobs.cli.summary.rows import PromptTokens
from kvobs.cli.summary.sources import (
    Addresses,
    Host,
    Period,
    document,
    of_prometheus,
    of_texts,
    read_document,
    summed,
)
from kvobs.cli.web import NoAnswerError, url_of
from kvobs.page.writer import PageWriter
from kvobs.schema.signals import LOADS, PROCESS_WIDTH, slot
from tests.support import watched
from tests.support.exporting import HIT
from tests.support.page_files import page_folder
from tests.support.top_engines import answering, web
from tests.support.written import Pages

TOKENS = 'vllm:prompt_tokens_by_source_total{{engine="0",source="{}"}} {}\n'


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with page_folder() as made:
        yield made


def words_of(*writers: PageWriter) -> list[bytes]:
    return [bytes(writer.words) for writer in writers]


def test_counts_between_two_looks_are_the_runs_and_pages_stay() -> None:
    pages = Pages(None, 0, port=1)
    pages.add(HIT, 3)
    host = Host()
    before = host.read()
    pages.add(HIT, 4)
    pages.add(HIT, 2, writer=1)
    words = words_of(*pages.writers)
    ((name, after),) = host.read().values()
    (server,) = summed(before, {"x": (name, after)} | host.read())[1:]
    assert words_of(*pages.writers) == words
    assert (server.server, server.connectors[0].hits, server.prompt_tokens) == ("tiny at port 1", 6, None)
    assert server.seconds is not None
    assert summed(None, host.read())[0].connectors[0].hits == 9


def test_an_engine_that_a_command_starts_and_ends_is_counted() -> None:
    """Its page is gone at the end, and its numbers are not."""
    host = Host()
    assert host.read() == {}
    pages = Pages(None)
    host.look()
    second = pages.begin(0)
    second.add(HIT, 1)
    host.look()
    pages.add(HIT, 5)
    for writer in pages.writers:
        writer.close()
    host.look()
    (server,) = summed({}, host.read())
    assert (server.server, server.connectors[0].hits) == ("tiny", 6)


def test_an_engine_that_had_ended_before_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched.process("e", None, "is killed late") as forked:
        os.waitpid(forked.pid, 0)
    host = Host()
    host.look()
    assert host.read() == {}


def test_vllms_own_metrics_are_read_at_its_port() -> None:
    texts = [TOKENS.format("local_compute", 100), TOKENS.format("local_compute", 140)]
    with web(lambda path: (200, texts[0]) if path == "/metrics" else (404, "")) as address:
        pages = Pages(None, port=int(address.rpartition(":")[2]))
        host = Host()
        before = host.read()
        texts.pop(0)
        (server,) = summed(before, host.read())
    assert server.prompt_tokens == PromptTokens(40, 0, {})
    assert pages.writers


def test_addresses_are_read_and_a_silent_one_is_named() -> None:
    text = 'kvobs_loads_total{connector="cpu",engine="0",outcome="ok"} 3\nkvobs_engine_up{engine="0"} 0\n'
    with answering(200, text) as url, answering(200, TOKENS.format("local_cache_hit", 7)) as of_vllm:
        addresses = Addresses([(url, of_vllm)])
        addresses.look()
        ((name, scrape),) = addresses.read().values()
        assert name == url.removeprefix("http://").removesuffix("/metrics")
        (server,) = summed(None, {url: (name, scrape)})
    assert server.connectors[0].loads == 3, "also of an engine that has ended just now"
    assert server.prompt_tokens == PromptTokens(0, 7, {})
    with pytest.raises(NoAnswerError, match=f"^{name}: no answer"):
        addresses.read()


def loads(n: int, more: str = "") -> str:
    return f'kvobs_loads_total{{connector="cpu",engine="0",outcome="ok"}} {n}\n{more}'


def test_saved_texts(tmp_path: Path) -> None:
    paths = [tmp_path / "before.txt", tmp_path / "after.txt"]
    paths[0].write_text(loads(3))
    paths[1].write_text(loads(10, "kvobs_engine_up 0\n"))
    (server,) = of_texts(paths)
    assert (server.server, server.seconds, server.connectors[0].loads) == ("after.txt", None, 7)
    assert of_texts(paths[1:])[0].connectors[0].loads == 10
    paths[0].write_text("hello")
    with pytest.raises(ValueError, match=r"before.txt: no kvobs_\* metrics here"):
        of_texts(paths)
    with pytest.raises(ValueError, match=r"gone.txt can't be read: No such file"):
        of_texts([tmp_path / "gone.txt"])


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    text = tmp_path / "after.txt"
    text.write_text(loads(10, TOKENS.format("external_kv_transfer", 5)))
    servers = of_texts([text])
    saved = tmp_path / "a.json"
    saved.write_text(json.dumps(document(servers)))
    assert read_document(saved) == of_texts([saved]) == servers
    for wrong in ("{}", "[1]", '{"servers": [{"server": 1}]}', "x"):
        saved.write_text(wrong)
        with pytest.raises(ValueError, match=r"a.json is no summary as `kvobs summary --json` prints it: "):
            read_document(saved)


START = 1_000_000.0


def series(name: str, value: float, **labels: str) -> dict[str, Any]:
    named = {"__name__": name, "job": "kvobs", "model_name": "tiny", "engine": "0", **labels}
    return {"metric": named, "value": [0, str(value)]}


def engine(instance: str, loads: int, start: float = START) -> list[dict[str, Any]]:
    return [
        series("kvobs_start_time_seconds", start, instance=instance),
        series("kvobs_loads_total", loads, instance=instance, connector="cpu", outcome="ok"),
    ]


def prompt(instance: str, n: int) -> dict[str, Any]:
    return series("vllm:prompt_tokens_by_source_total", n, instance=instance, source="local_compute", job="vllm")


PERIOD = Period(START + 100, START + 160)


class Prometheus:
    """Answers with the samples at the begin, and with those at the end, of a period; keeps the queries."""

    def __init__(self, before: list[Any], after: list[Any]) -> None:
        self._answers = {f"{PERIOD.begin_s:.3f}": before, f"{PERIOD.end_s:.3f}": after}
        self.queries: list[str] = []

    def __call__(self, path: str) -> tuple[int, str]:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        self.queries.append(asked["query"])
        result = self._answers[asked["time"]]
        return 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})


def summary_of(before: list[Any], after: list[Any], *instances: str) -> tuple[Any, list[str], list[str]]:
    answer = Prometheus(before, after)
    with web(answer) as address:
        servers, warnings = of_prometheus(f"http://{address}", PERIOD, instances)
    return servers, warnings, answer.queries


def test_prometheus_sums_a_models_servers_since_their_own_starts() -> None:
    """One was there, one was started again, one began, and one had ended by the end: its last sample counts."""
    before = [*engine("a:1", 5), *engine("b:1", 100), *engine("d:1", 7), prompt("a:2", 10)]
    after = [*engine("a:1", 9), *engine("b:1", 200, START + 130), *engine("c:1", 3, START + 120), *engine("d:1", 8),
             prompt("a:2", 40)]  # fmt: skip
    (server,), warnings, queries = summary_of(before, after)
    assert (server.server, server.seconds, server.restarted) == ("tiny", 60, True)
    assert server.connectors[0].loads == 4 + 200 + 3 + 1
    assert server.prompt_tokens == PromptTokens(30, 0, {})
    assert warnings == []
    assert queries[0].endswith("[60s])")
    assert queries[1].endswith("[300s])")
    assert queries[0].startswith('last_over_time({__name__=~"kvobs_build_info|')


@pytest.mark.parametrize("restarted", ["a", "z"], ids=["first", "last"])
def test_prompt_tokens_of_a_server_that_restarted_count_anew(restarted: str) -> None:
    """The exporter and vLLM are two targets of Prometheus, with different instances."""
    before = [*engine("m:1", 5), *engine(f"{restarted}:1", 100), prompt("m:2", 500), prompt(f"{restarted}:2", 1000)]
    again = [*engine(f"{restarted}:1", 10, START + 130), prompt(f"{restarted}:2", 30)]
    both = [again, [*engine("m:1", 6), prompt("m:2", 540)]]
    (server,), *_ = summary_of(before, [one for part in (both if restarted == "a" else both[::-1]) for one in part])
    assert server.prompt_tokens == PromptTokens(40 + 30, 0, {})


def test_prompt_tokens_before_vllm_was_scraped_are_not_counted() -> None:
    (server,), *_ = summary_of(engine("a:1", 5), [*engine("a:1", 9), prompt("a:2", 4000)])
    assert server.prompt_tokens is None


def test_a_server_without_a_sample_at_the_begin_is_named() -> None:
    (server,), warnings, _ = summary_of([], engine("a:1", 9))
    assert server.connectors[0].loads == 9
    assert warnings == ["a:1 has no sample at the start: its numbers are since its engine's start"]


def test_instances_are_chosen_in_the_query() -> None:
    _, _, queries = summary_of([], [], "gpu-1.x:9464", 'a"b')
    assert r'",instance=~"gpu-1\\.x:9464|ab"}' in queries[0]


def test_an_answer_that_is_none_of_prometheus_is_named() -> None:
    for body in ("x", '{"status": "error"}', '{"status": "success", "data": {"result": [{}]}}'):
        with answering(200, body) as url, pytest.raises(NoAnswerError):
            of_prometheus(url.removesuffix("/metrics"), PERIOD)
    assert url_of("localhost", 9090) == "http://localhost:9090/metrics"
    assert slot(LOADS, "sync", "ok") + PROCESS_WIDTH > 0
