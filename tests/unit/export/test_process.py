"""The exporter serves what the pages hold: killed, stopped and started at any time no count changes."""

import errno
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from kvobs import faults
from kvobs.export import __main__ as script
from kvobs.export import process, span_export
from kvobs.export.process import Exporter, State, lock_of
from kvobs.export.totals import FRESH_S
from kvobs.log import forget
from kvobs.page import files
from kvobs.page.description import ConnectorInfo
from kvobs.page.layout import HEAD, MAGIC, ORDINARY, URGENT, VERSION
from kvobs.schema import __version__, signals, spans
from kvobs.schema.options import ExporterOptions
from kvobs.schema.signals import slot
from kvobs.testing.collector import Collector
from tests.support import watched
from tests.support.contexts import no_otel_variables, record
from tests.support.exporting import HIT, HITS, LOAD, Page, end, exporter, has_ended, started, state_of, writing
from tests.support.waiting import eventually
from tests.support.written import Pages

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)


# Real processes


def assert_nothing_is_twice_and_only_the_queues_are_lost(
    received: list[int], seen: list[tuple[int, int]], written: int, at_most: int
) -> None:
    """Of what each exporter has read the first ones must have come, but for so many: they were in its queue.

    ``seen`` is how far each exporter has read, by ring; numbers are those of ``Writing``.
    """
    assert len(received) == len({*received})
    by_ring = {URGENT: [n for n in range(written) if n % 3 == 0], ORDINARY: [n for n in range(written) if n % 3]}
    for ring, numbers in by_ring.items():
        came = {*received}
        for begin, until in zip(
            [0, *[of[ring] for of in seen]], [*[of[ring] for of in seen], len(numbers)], strict=True
        ):
            part = [n in came for n in numbers[begin:until]]
            lost = part.count(False)
            assert part == [True] * (len(part) - lost) + [False] * lost
            assert lost <= at_most
    assert {n for numbers in by_ring.values() for n in numbers[-3:]} <= {*received}, "the last ones"


def next_pid(server: str, last: int) -> int:
    """Return the process id of the exporter after the last one."""
    found: int = eventually(lambda: (pid := state_of(server).get("pid")) != last and pid)
    return found


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_kill_under_load_changes_no_count_and_repeats_no_span(kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    page, seen, pid = Page(), list[tuple[int, int]](), 0
    chance = random.Random(kills)
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        for name, value in collector.env.items():
            patch.setenv(name, value)
        with writing(endpoint=collector.endpoint) as engine:
            before = dict[Any, float]()
            for i in range(kills + 1):
                assert started(engine.server, port=page.port)[0] == 0
                pid = next_pid(engine.server, pid)
                try:
                    for _ in range(3):
                        time.sleep(FRESH_S)
                        least = engine.n
                        found = eventually(page.counters)
                        most, hits = engine.n, found[HITS[0], frozenset(labels("one", outcome="hit"))]
                        assert least <= hits <= most + 1
                        assert before.keys() <= found.keys()
                        assert {key: (n, found[key]) for key, n in before.items() if found[key] < n} == {}
                        before = found
                    time.sleep(chance.random() * 1.5)
                finally:
                    if i < kills:
                        os.kill(pid, signal.SIGKILL)
                if i < kills:
                    positions = next(iter(state_of(engine.server)["positions"].values()))
                    seen.append((positions[ORDINARY][1], positions[URGENT][1]))
            engine.stop()
            assert page.hits() == engine.n
            end(engine.pid, signal.SIGTERM)
            written = engine.n
            eventually(lambda: not state_of(engine.server))
        received = [int(span.span_id, 16) - 1 for span in collector.spans]
    assert_nothing_is_twice_and_only_the_queues_are_lost(received, seen, written, at_most=300)


def labels(connector: str, **more: str) -> Iterator[tuple[str, str]]:
    yield from {"model_name": "tiny", "engine": "0", "connector": connector, **more}.items()


def test_of_two_exporters_of_a_server_the_second_ends_at_once() -> None:
    first, second = Page(), Page()
    with writing() as engine:
        assert started(engine.server, port=first.port)[0] == 0
        state = eventually(lambda: state_of(engine.server))
        assert state["url"] == f"http://127.0.0.1:{first.port}/metrics"
        assert eventually(first.hits)
        first.get()
        other = started(engine.server, port=second.port)
        assert other == (0, "")
        assert state_of(engine.server)["pid"] == state["pid"]
        with pytest.raises(OSError, match="refused"):
            second.get()
        with open(f"/proc/{state['pid']}/stat") as file:
            assert int(file.read().rpartition(")")[2].split()[1]) != os.getpid(), "no connector: vLLM would kill it"
        end(engine.pid, signal.SIGTERM)
    assert eventually(lambda: not state_of(engine.server)), "after a regular end it has ended, and left nothing"


def test_two_servers_of_one_user_are_not_mixed() -> None:
    ports = Page(), Page()
    with (
        writing() as first,
        writing(at_once=10_000, per_second=1) as second,
        exporter(first.server, port=ports[0].port),
        exporter(second.server, port=ports[1].port),
    ):
        for engine in (first, second):
            engine.stop()
        assert eventually(lambda: [page.hits() for page in ports] == [first.n, second.n])
        assert first.n < 10_000 < second.n


@pytest.mark.parametrize("unit", [1, 2**60])
def test_whole_numbers_come_back_whole(unit: int) -> None:
    """Nanoseconds of a hundred loads in flight are above 2**53, where floats are no longer exact, after 25 hours."""
    pages, page = Pages(), Page()
    pages.add(HIT, 5 * unit)
    seen = []
    for _ in range(3):
        with exporter(pages.server, port=page.port):
            seen.append(eventually(page.hits))
        pages.add(HIT, unit)
    assert seen == [(5 + n) * unit for n in range(3)]


def test_a_killed_engines_last_numbers_and_slow_spans_get_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "LINGER_S", 4.0)
    page = Page()
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        for name, value in collector.env.items():
            patch.setenv(name, value)
        with (
            writing(at_once=900, per_second=1, endpoint=collector.endpoint) as engine,
            exporter(engine.server, port=page.port) as serving,
        ):
            assert eventually(page.hits)
            slow = {f"{n + 1:016x}" for n in range(engine.n) if n % 3 == 0}
            end(engine.pid)
            killed = time.monotonic()
            assert eventually(lambda: page.value("kvobs_engine_up") == 0 and page.hits() == engine.n)
            assert page.health()[0] == 503
            assert eventually(lambda: has_ended(serving))
            assert time.monotonic() - killed >= 4
        assert slow <= {span.span_id for span in collector.spans}
        assert len(collector.spans) == engine.n, "nor was another one lost: they had not been overwritten yet"


def test_after_a_regular_end_one_scrape_gets_the_last_numbers() -> None:
    page = Page()
    with writing() as engine, exporter(engine.server, port=page.port) as serving:
        assert eventually(lambda: page.health()[0] == 200)
        assert page.value("kvobs_engine_up") == 1
        engine.stop()
        end(engine.pid, signal.SIGTERM)
        assert eventually(lambda: page.health()[0] == 503)
        time.sleep(1.0)
        assert not has_ended(serving), "nothing has scraped since"
        text = page.get()
        assert (value_in(text, "kvobs_engine_up"), value_in(text, *HITS)) == (0, engine.n)
        assert eventually(lambda: has_ended(serving))
    assert state_of(engine.server) == {}


def value_in(text: str, name: str, *wanted: str) -> float:
    found = Page(1)
    found.get = lambda *_: text  # type: ignore[method-assign]
    return found.value(name, *wanted)


def test_asked_to_end_it_leaves_and_the_next_one_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As systemd asks all processes of a unit: the engine, which may answer for minutes, starts another exporter."""
    monkeypatch.setattr(process, "AFTER_SIGTERM_S", 0.3)
    page = Page()
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        for name, value in collector.env.items():
            patch.setenv(name, value)
        with writing(endpoint=collector.endpoint) as engine:
            with exporter(engine.server, port=page.port) as first:
                assert eventually(lambda: page.value("kvobs_overhead_seconds_total", "stage", "export"))
                before = page.counters()
                os.kill(first, signal.SIGTERM)
                assert eventually(lambda: has_ended(first))
            assert eventually(lambda: state_of(engine.server)["positions"]), "it is left for the next one"
            with exporter(engine.server, port=page.port) as second:
                found = eventually(page.counters)
                assert {key: n for key, n in before.items() if found.get(key, 0) < n} == {}
                engine.stop()
                written = engine.n
                page.get()
                end(engine.pid, signal.SIGTERM)
                assert eventually(lambda: has_ended(second))
    assert sorted(int(span.span_id, 16) - 1 for span in collector.spans) == list(range(written))


def test_an_exporter_of_a_dead_engine_serves_its_last_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LINGER_S", 3.0)
    page = Page()
    with writing() as engine:
        end(engine.pid)
        with exporter(engine.server, port=page.port) as serving:
            assert eventually(lambda: page.hits() == engine.n)
            assert eventually(lambda: has_ended(serving))


def test_the_exporter_keeps_no_file_of_the_engine_open() -> None:
    """A port of the engine would stay taken for as long as the last numbers are served."""
    with writing() as engine, socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        assert started(engine.server, port=Page().port)[0] == 0
        pid, ours = eventually(lambda: state_of(engine.server))["pid"], f"socket:[{os.fstat(server.fileno()).st_ino}]"
        of_exporter = f"/proc/{pid}/fd"
        assert eventually(lambda: ours not in {os.readlink(f"{of_exporter}/{fd}") for fd in os.listdir(of_exporter)})
        end(engine.pid, signal.SIGTERM)
        eventually(lambda: not state_of(engine.server))


# In this process


@pytest.fixture
def make() -> Iterator[Callable[..., Exporter]]:
    """Return what makes the exporter of an engine; an earlier one of it is taken to be killed."""
    made: list[Exporter] = []

    def kill() -> None:
        while made:
            made.pop()._lock.release(remove=False)

    def make(pages: Pages, *, outlives: bool = False, **options: Any) -> Exporter:
        kill()
        given = ExporterOptions.model_construct(**{"port": None, "otlp_metrics": False, "host": "h", **options})
        made.append(Exporter(pages.server, given, lock_of(pages.server), outlives=outlives))
        return made[-1]

    yield make
    kill()


def text_of(exporter: Exporter, accept: str = "text/plain") -> str:
    exporter._exposition.forget()
    return exporter._text(accept)[1].decode()


def cycle(exporter: Exporter, times: int = 1) -> None:
    for _ in range(times):
        exporter._tick()
        exporter._export_spans()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return where the spans of exporters end."""
    made = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "make_exporter", {"http://c:4317": made}.get)
    return made


def traced(**info: Any) -> Pages:
    return Pages(has_spans=True, endpoint="http://c:4317", **info)


def test_spans_are_sent_with_their_engine_and_are_exemplars(
    make: Callable[..., Exporter], memory: InMemorySpanExporter
) -> None:
    first = traced()
    second = traced(of=first, index=3)
    attributes: dict[str, spans.Value] = {spans.CONNECTOR: "one", spans.MODE: "async"}
    for pages in (first, second):
        pages.add(LOAD + signals.LOAD_DURATION.bucket(2_000_000))
        pages.write([record("kv.load", observed_ns=2_000_000, attributes=attributes)])
    mine = make(first)
    cycle(mine)
    mine._close(lingers=False)
    assert {(span.attributes or {})[spans.ENGINE] for span in memory.get_finished_spans()} == {0, 3}
    families: Any = open_metrics(text_of(mine, "application/openmetrics-text"))  # type: ignore[no-untyped-call]
    marked = [s for f in families for s in f.samples if s.exemplar is not None]
    assert [(s.labels["engine"], s.labels["le"]) for s in marked] == [("0", "0.00232267"), ("3", "0.00232267")]
    assert {s.exemplar.labels["trace_id"] for s in marked} == {"1" * 32}


def test_spans_that_the_api_server_exports_are_not_sent_here(
    make: Callable[..., Exporter], memory: InMemorySpanExporter
) -> None:
    """An exporter by hand, where the API server shows a collector."""
    first = traced()
    second = traced(of=first, index=1)
    for pages in (first, second):
        pages.write([record()])
    lock = files.Lock(files.folder(), f"{first.server}-0{files.COLLECTOR}")
    mine = make(first)
    cycle(mine)
    mine._close(lingers=False)
    assert [(span.attributes or {})[spans.ENGINE] for span in memory.get_finished_spans()] == [1]
    lock.release()


def test_spans_that_an_api_server_exported_are_not_sent_again(
    make: Callable[..., Exporter], memory: InMemorySpanExporter
) -> None:
    pages = traced()
    lock = files.Lock(files.folder(), f"{pages.server}-0{files.COLLECTOR}")
    pages.write(*[[record()]] * 3)
    pages.write([record(reason=spans.Reason.SLOW)])
    mine = make(pages)
    cycle(mine)
    lock.release()
    pages.write([record("kv.save")])
    cycle(mine)
    mine._close(lingers=True)
    assert [span.name for span in memory.get_finished_spans()] == ["kv.save disk"]


def test_its_own_counts_outlive_it_once_they_are_written_down(
    make: Callable[..., Exporter], memory: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = traced()
    first = make(pages)
    pages.write([record()])
    cycle(first)
    first._drop_spans("export", 4)
    assert 'where="export"} 4' not in text_of(first)
    first._keep()
    lost = 'kvobs_spans_dropped_total{engine="0",model_name="tiny",where="export"} 4.0'
    assert lost in text_of(first)
    spent = [line for line in text_of(first).splitlines() if line.startswith("kvobs_overhead_seconds_total")]
    second = make(pages)
    cycle(second)
    assert lost in text_of(second)
    assert [line for line in text_of(second).splitlines() if line.startswith("kvobs_overhead_seconds_total")] == spent
    second._drop_spans("export", 1)
    second._keep()
    assert lost.replace(" 4.0", " 5.0") in text_of(second)


def test_missed_spans_are_counted_once_over_two_exporters(
    make: Callable[..., Exporter], memory: InMemorySpanExporter
) -> None:
    pages = traced()
    many = [[record()] * 60] * 100
    pages.write(*many)
    first = make(pages)
    cycle(first, 2)
    missed = [line for line in text_of(first).splitlines() if 'where="missed"' in line]
    assert float(missed[0].rpartition(" ")[2]) > 0
    second = make(pages)
    cycle(second, 2)
    assert [line for line in text_of(second).splitlines() if 'where="missed"' in line] == missed


@pytest.mark.parametrize(
    "left",
    [b"", b"{", b"[]", b"\xff", b'{"version": 1}', b'{"positions": {"a": [[0, 0]]}}', b'{"counts": {"a": {"-1": 2}}}'],
)
def test_a_malformed_or_outdated_remainder_counts_as_nothing(left: bytes, make: Callable[..., Exporter]) -> None:
    pages = Pages()
    lock = lock_of(pages.server)
    lock.write(left)
    lock.release(remove=False)
    assert make(pages)._before == State()


def test_a_full_disk_costs_a_log_line(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages()
    mine = make(pages)
    monkeypatch.setattr(mine._lock, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for _ in range(3):
        mine._tick()
        mine._count(slot(signals.INTERNAL_ERRORS, "read"), 1)
    mine._tick()
    assert caplog.text.count("the exporter can't save how far it has read: [Errno 28] No space left on device") == 1
    assert 'kvobs_internal_errors_total{engine="0",model_name="tiny",where="read"} 3.0' in text_of(mine)


def test_a_page_of_another_version_is_counted(make: Callable[..., Exporter], caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages()
    (files.folder() / f"{pages.name}rank0-1-1{files.SUFFIX}").write_bytes(HEAD.pack(MAGIC, VERSION ^ 1, 8) + bytes(99))
    mine = make(pages)
    cycle(mine, 3)
    assert 'kvobs_internal_errors_total{engine="0",model_name="tiny",where="version"} 1.0' in text_of(mine)
    assert caplog.text.count("it was written by another version of kvobs") == 1


def end_of(pages: Pages, exporter: Exporter, *, well: bool) -> None:
    """Let the process of an engine end, as an exporter sees it."""
    (page,) = exporter._served[pages.name].engine.all()
    if well:
        pages.writers[0].close()
    page.process = replace(page.process, started="another process with its id")


def up_of(text: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("kvobs_engine_up{")]


def test_engines_that_start_later_or_end_first_are_served(
    make: Callable[..., Exporter],
) -> None:
    first = Pages()
    mine = make(first)
    cycle(mine)
    assert up_of(text_of(mine)) == ["1.0"]
    second = Pages(of=first, index=1)
    second.add(HIT, 7)
    cycle(mine)
    assert up_of(text_of(mine)) == ["1.0", "1.0"]
    first.add(HIT, 3)
    end_of(first, mine, well=False)
    text_of(mine)
    mine._tick()
    assert up_of(mine._text("text/plain")[1].decode()) == ["0.0", "1.0"]
    assert mine._has_engine()
    assert (value_in(text_of(mine), *HITS, "engine", "0"), value_in(text_of(mine), *HITS, "engine", "1")) == (3, 7)
    status, state = mine._health()
    assert status
    assert [(one["engine"], one["state"]) for one in state["engines"]] == [(0, "gone"), (1, "alive")]
    end_of(second, mine, well=True)
    assert not mine._has_engine()
    assert mine._health()[0] is False


def test_a_scrape_right_after_an_engines_end_shows_it(make: Callable[..., Exporter]) -> None:
    """The text of a scrape just before it is kept for a moment."""
    pages = Pages()
    mine = make(pages)
    cycle(mine)
    assert up_of(text_of(mine)) == ["1.0"]
    end_of(pages, mine, well=False)
    assert up_of(mine._text("text/plain")[1].decode()) == ["0.0"]


def test_the_end_of_one_engine_is_shown_while_the_others_run(
    make: Callable[..., Exporter], caplog: pytest.LogCaptureFixture
) -> None:
    other = Pages(0, of=None, connectors=tuple(map(ConnectorInfo, watched.NAMES)), index=1)
    with watched.process(other.engine_id, None, "exits"):
        mine = make(other)
        mine._tick()
        assert eventually(lambda: not mine._served[f"{other.server}-0-"].engine.is_alive)
        mine._tick()
    text = "the engine has ended in start_load_kv of connector 'remote' on scheduler: exit 3"
    assert caplog.text.count(text) == 1
    ended = [line for line in text_of(mine).splitlines() if line.startswith("kvobs_engine_ended{")]
    assert ['engine="0"' in line for line in ended] == [True]
    assert mine._has_engine()


def test_an_end_between_two_looks_is_in_the_last_numbers(
    make: Callable[..., Exporter], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages()
    pages.writers[0].close()
    mine = make(pages)
    with watched.process(pages.engine_id, None, "hangs") as killed:

        def keep() -> None:
            os.kill(killed.pid, signal.SIGUSR1)
            assert eventually(lambda: not mine._has_engine())

        monkeypatch.setattr(mine, "_keep", keep)
        assert mine.run(), "its engine is gone"
    text = "the engine has ended in start_load_kv of connector 'remote' on scheduler: SIGUSR1"
    assert caplog.text.count(text) == 1
    assert 'reason="SIGUSR1"' in text_of(mine)


def test_health_has_all_engines_with_their_processes(make: Callable[..., Exporter]) -> None:
    first = Pages(None, 0, ranks=2)
    second = Pages(1, of=first, index=3)
    mine = make(first)
    assert mine._health() == (False, {"engines": [], "spans_queued": 0, "spans_dropped": 0, "version": __version__})
    cycle(mine)
    mine._spans = Mock(**{"converter.queued": 3})
    mine._drop_spans("queue", 2)
    engines = [
        {
            "engine": 0, "state": "alive", "pid": os.getpid(),
            "processes": {"scheduler": "0 steps", "rank 0": "0 steps", "rank 1": "not seen"},
        },
        {"engine": 3, "state": "alive", "pid": os.getpid(), "processes": {"rank 1": "0 steps"}},
    ]  # fmt: skip
    state = {"engines": engines, "spans_queued": 3, "spans_dropped": 2, "version": __version__}
    assert mine._health() == (True, state)
    assert second.writers
    queued = [line for line in text_of(mine).splitlines() if line.startswith("kvobs_spans_queued{")]
    assert queued == ['kvobs_spans_queued{engine="0",model_name="tiny"} 3.0'], "of engines whose scheduler is here"


def test_without_tracing_no_spans_are_queued(make: Callable[..., Exporter]) -> None:
    mine = make(Pages())
    cycle(mine)
    assert "kvobs_spans_queued{" not in text_of(mine)


def test_parts_that_fail_or_are_not_wanted_are_left_out(
    make: Callable[..., Exporter], monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(faults, "is_under_pytest", lambda: False)
    for module, name in (span_export, "make_exporter"), (process, "MetricsPush"):
        monkeypatch.setattr(module, name, lambda *_: 1 / 0)
    for pages in (Pages(), traced()):
        mine = make(pages, otlp_metrics=True)
        cycle(mine, 3)
        assert (mine._spans, mine._push) == (None, None)
    assert 'where="export"} 1.0' in text_of(mine)
    assert caplog.text.count("not sent by OTLP: division by zero") == 1, "it is logged once"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    cycle(make(pages, otlp_metrics=True))
    assert faults.take() == {}


def test_differences_start_with_the_engine_or_the_last_exporter(
    make: Callable[..., Exporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = Mock()
    monkeypatch.setattr(process, "MetricsPush", push)
    pages = Pages(None, 0)
    second = Pages(of=pages, index=1)
    mine = make(pages, otlp_metrics=True)
    cycle(mine, 2)
    assert len(second.writers) == 1
    push.assert_called_once_with(mine._series, pages.writers[0].process.began_ns)
    assert push.return_value.mock_calls == [call.start()]
    pages.add(HIT, 4)
    series = {signal: [point.value for point in points] for signal, points in mine._series() if points}
    assert series[signals.LOOKUPS] == [4]
    assert series[signals.ENGINE_UP] == [1, 1]
    push.reset_mock()
    mine = make(pages, otlp_metrics=True)
    cycle(mine)
    assert push.return_value.mock_calls == [call.take_as_sent(), call.start()]
    mine._close(lingers=False)
    assert push.return_value.mock_calls[-1] == call.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0, perf_counter_ns=time.perf_counter_ns)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr(process, "time", clock)
    return clock


def test_asked_to_end_it_waits_for_its_engine_a_little(make: Callable[..., Exporter], clock: Any) -> None:
    mine = make(Pages())
    assert not mine.is_asked_to_end
    mine.ask_to_end()
    for clock.now in (0.0, 4.9, 5.0):
        assert mine._is_over() is (clock.now == process.AFTER_SIGTERM_S == 5)
    assert mine.is_asked_to_end


@pytest.mark.parametrize(
    ("is_well", "scrapes", "scraped_at", "seconds"),
    [
        (False, [], 0, 15), (False, [990, 995], 1001, 15), (True, [], 0, 0), (True, [990], 0, 15),
        (True, [990, 996], 0, 9), (True, [900, 990], 0, 15), (True, [990, 996], 1002, 2.1),
        (True, [988, 988.4, 994, 994.4], 1002, 2.15),  # two readers: as soon as both have it
        (True, [988, 988.4, 994, 994.4], 0, 8.4),
    ],
)  # fmt: skip
def test_the_last_numbers_are_served_for_a_while(  # noqa: PLR0917 - a table's columns, and fixtures
    is_well: bool, scrapes: list[float], scraped_at: float, seconds: float, make: Any, clock: Any
) -> None:
    def sleep(slept_s: float) -> None:
        clock.now += slept_s
        if clock.now >= scraped_at > 0:
            mine._scrapes += (scraped_at + 0.01,)

    mine, calls, clock.now, clock.sleep = make(Pages(), outlives=True), Mock(), 1000.0, sleep
    served = Mock(**{"engine.has_ended_well": is_well, "engine.info.has_spans": False})
    served.engine.name, served.totals.own, served.engine.positions.return_value = "e", {}, {}
    mine._served, mine._spans, mine._push, mine._http = {"e": served}, calls.c, calls.p, calls.s
    mine._scrapes = tuple(scrapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_let_go_of_stderr", calls.stderr)
        mine._close(lingers=True)
    assert clock.now - 1000 == pytest.approx(seconds, abs=0.1)
    assert calls.mock_calls == [
        call.c.finish([]),
        call.c.converter.close(),
        call.p.close(),
        call.stderr(),
        call.s.close(),
    ]


UNTIL = ". Serving is not affected, but kvobs's metrics are missing until it can. Fix: "
REFUSED = {
    errno.EADDRINUSE: f"Address already in use, held by 7{UNTIL}set kvobs.exporter.port to a free one",
    errno.EACCES: f"Permission denied{UNTIL}correct this in kvobs.exporter",
    0: f"no number{UNTIL}",
}


def test_it_serves_a_status_page_with_what_the_engine_did() -> None:
    page = Page()
    with writing() as engine, exporter(engine.server, port=page.port):
        html = eventually(lambda: page.get("/"))
        assert "<bdi>one</bdi>" in html
        assert "<bdi>two</bdi>" in html
        assert eventually(lambda: "slow_load_ms" not in page.get("/")), "every third load is slow"


@pytest.mark.parametrize("number", REFUSED)
def test_a_port_that_cannot_be_had_is_tried_again(
    number: int, make: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The exporter of an engine that is gone keeps its port for a while: until then nothing is logged."""
    forget()
    tries = 2 if number == errno.EADDRINUSE else 1
    error = OSError(number, os.strerror(number)) if number else OSError("no number")
    server = Mock(side_effect=[*[error] * tries, Mock()])
    monkeypatch.setattr(process, "holder", str)
    monkeypatch.setattr(process, "Server", server)
    monkeypatch.setattr(process, "LINGER_S", 1.0)
    mine = make(Pages(), host="0.0.0.0", port=7, web_config=None)
    for clock.now in [0.0, 1.0][:tries]:
        assert not caplog.records
        mine._tick()
        mine._tick()  # it is not tried at once
    assert caplog.messages[0].startswith(f"the exporter can't listen on 0.0.0.0:7: {REFUSED[number]}")
    clock.now += 5.4
    mine._tick()
    assert server.call_count == tries
    clock.now = mine._bind_at
    for _ in range(2):
        mine._tick()
    assert server.mock_calls == [call("0.0.0.0", 7, mine._text, mine._health, None, status=mine._status.html)] * (
        tries + 1
    )
    assert "kvobs's metrics are open at port 7: every client" in caplog.messages[-1]


# The process


def test_it_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import kvobs.export.__main__, kvobs.export.process, kvobs.cli.exporter"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("arguments", [[], ["no JSON"], ['{"port": 1}'], ['{"server": "s", "port": "many"}']])
def test_started_by_hand_it_says_how_it_is_started(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvobs.export", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "To start it manually, use `kvobs exporter`" in done.stderr


@pytest.mark.parametrize(("level", "shown"), [(None, logging.INFO), ("debug", logging.DEBUG)])
def test_process_closes_the_engines_files_and_logs_in_its_format(
    level: str | None, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, logger, serve = Pages(), logging.Logger("vllm"), Mock()
    close, fork = Mock(side_effect=OSError), Mock(side_effect=[0, 5])
    listed = {"/proc/self/fd": ["0", "1", "2", "77", "78"]}
    environ = {"VLLM_LOGGING_LEVEL": level} if level else {}
    system = SimpleNamespace(listdir=listed.get, close=close, fork=fork, _exit=sys.exit, environ=environ)
    monkeypatch.setattr(script, "os", system)
    monkeypatch.setattr(sys, "argv", ["kvobs.export", json.dumps({"server": pages.server, "port": 1234})])
    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setitem(logging.Logger.manager.loggerDict, "vllm", logger)
    assert script.main() == 0
    (handler,) = logger.handlers
    told = logging.LogRecord("vllm", logging.ERROR, "", 0, "all %s", ("well",), None)
    told.created = time.mktime((2026, 2, 3, 4, 5, 6, 0, 0, -1))
    assert (handler.format(told), logger.level) == ("ERROR 02-03 04:05:06 [kvobs exporter] all well", shown)
    assert sorted(one.args[0] for one in close.mock_calls) == [77, 78]
    (served,) = serve.call_args_list
    assert (served.args[:2], served.kwargs) == ((pages.server, ExporterOptions(port=1234)), {"outlives": True})
    with pytest.raises(SystemExit, match="^0$"):  # another process has the lock: it does not fork
        script.main()
    assert fork.call_count == 1
    served.args[2].release()
    with pytest.raises(SystemExit, match="^0$"):  # the first process, which has forked
        script.main()
    assert (fork.call_count, serve.call_count) == (2, 1)


def test_an_engine_without_stderr_is_served_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it where the file was closed: 2>&-
    process._let_go_of_stderr()
