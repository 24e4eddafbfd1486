"""The exporter's loop: lines as they come, ticks between them, and an end."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvobs import faults
from kvobs.export import __main__ as script
from kvobs.export import process, span_export
from kvobs.export.process import first_lines, lines
from kvobs.log import forget
from kvobs.probe.increments import Increments
from kvobs.schema import __version__, signals, spans
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import ConnectorInfo
from tests.support.contexts import no_otel_variables, record
from tests.support.payloads import engine

pytestmark = pytest.mark.timeout(60)


def test_lines_come_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    text = b"".join(b"%d\n" % i for i in range(500)) + b"unfinished"

    def send() -> None:
        with theirs:
            for at in range(0, len(text), 7):
                theirs.sendall(text[at : at + 7])

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        assert list(lines(ours, b"begun ", lambda: True)) == [b"begun 0", *(b"%d" % i for i in range(1, 500))]
    thread.join()


def test_process_ticks_after_first_lines_and_in_silence_and_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TICK_S", 0.05)
    ours, theirs = socket.socketpair()
    order: list[bytes | str] = []

    def tick() -> bool:
        order.append("tick")
        if order.count("tick") == 3:
            theirs.sendall(b"c\nd")
        return order.count("tick") < 3

    with ours, theirs:
        for line in lines(ours, b"a\nb\n", tick):
            order.append(line)  # noqa: PERF402 - ticks come in between
    assert order == [b"a", b"b", "tick", "tick", "tick", b"c"], "what has come is read to its end"


def test_the_first_lines_are_read_and_the_rest_kept() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connectors = (ConnectorInfo("one", "C", "kv_both", 400.0), ConnectorInfo("two", "C", "kv_both"))
        one = engine(connectors=connectors, port=9464, index=3, has_spans=True, endpoint="http://x:4317", linger_s=1.5)
        theirs.sendall(wire.to_line(asdict(one)) + b"{}\n")
        theirs.sendall(b'{}\n{"v"')
        assert first_lines(ours) == (one, b'{}\n{}\n{"v"')
        theirs.sendall(b"{}\n{}\n{}\n")
        with pytest.raises(ValueError, match="missing required field `pid`"):
            first_lines(ours)
        theirs.sendall(b"{}\n{}\n")
        theirs.close()
        with pytest.raises(ValueError, match="ended before"):
            first_lines(ours)


def test_process_needs_neither_vllm_nor_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import kvobs.export.__main__, kvobs.export.otlp_metrics"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_started_by_hand_it_says_who_starts_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvobs.export"], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 2
    assert "started by an engine" in done.stderr


@pytest.fixture
def made() -> Iterator[Callable[..., process.Exporter]]:
    with socket.socket() as channel:
        yield lambda **given: process.Exporter(channel, engine(**given))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0, perf_counter_ns=time.perf_counter_ns)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr(process, "time", clock)
    return clock


def test_asked_to_end_it_waits_for_its_engine_a_little(made: Callable[..., process.Exporter], clock: Any) -> None:
    exporter = made()
    exporter._asked_to_end()
    for clock.now in (0.0, 4.9, 5.0):
        assert exporter._is_over() is (clock.now == process.AFTER_SIGTERM_S == 5)


def test_the_lines_of_an_engine_that_has_ended_already_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    theirs.close()
    with ours:
        exporter = process.Exporter(ours, engine(port=None))
        exporter.run(wire.to_line(wire.message(Increments({0: 2}, [], {}))))
    assert list(map(sum, exporter._totals._counts.values())) == [2]


def test_asked_to_end_while_its_engine_goes_on_it_reads_what_has_come_and_leaves(monkeypatch: Any) -> None:
    """As systemd asks all processes of a unit: the engine, which may answer for minutes, starts another exporter."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(process, "AFTER_SIGTERM_S", 0)
    with ours, theirs:
        exporter = process.Exporter(ours, engine(port=None, pid=os.getpid(), linger_s=10**6))
        exporter._watch, exporter._server = watch, server = Mock(), Mock()
        exporter._asked_to_end()
        first, last = (wire.to_line(wire.message(Increments({0: n}, [], {}))) for n in (1, 2))
        theirs.sendall(last)
        exporter.run(first)
        theirs.recv(1 << 16)
        assert theirs.recv(1) == b"", "its engine sees that it is gone"
    assert sum(map(sum, exporter._totals._counts.values())) == 3, "it has applied both lines"
    assert exporter._is_up
    server.close.assert_called_once_with()
    watch.ended.assert_not_called()


def test_from_the_end_of_the_engine_on_no_scrape_says_that_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is served again for a moment: not the one of before the end."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with ours, theirs:
        exporter = process.Exporter(ours, engine(port=None))
        pages = [exporter._text("text/plain")[1]]
        monkeypatch.setattr(exporter._watch, "ended", lambda: pages.append(exporter._text("text/plain")[1]))
        theirs.shutdown(socket.SHUT_WR)
        exporter.run(b"")
    up = [line for page in pages for line in page.decode().splitlines() if line.startswith("kvobs_engine_up{")]
    assert [line.rpartition(" ")[2] for line in up] == ["1.0", "0.0"]


def test_spans_are_cut_and_what_it_counts_itself_goes_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    memory, push, handle = InMemorySpanExporter(), Mock(), Mock()
    monkeypatch.setattr(span_export, "make_exporter", {"http://c:4317": memory}.get)
    monkeypatch.setattr(process, "MetricsPush", push)
    monkeypatch.setattr(faults, "is_under_pytest", lambda: False)
    monkeypatch.setattr("signal.signal", handle)
    given = engine(index=3, has_spans=True, endpoint="http://c:4317", otlp_metrics=True, began_ns=5)
    groups = [[record("kv.save", observed_ns=2_000, attributes={spans.CONNECTOR: "one"})], [["malformed"], []], [[]]]
    payload = wire.message(Increments.none()) | {"spans": groups}
    other, text = payload | {"v": 0}, b"no line\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exporter = process.Exporter(ours, given)
        theirs.shutdown(socket.SHUT_WR)
        of_engine = payload | {"payload_s": 9.0}  # sent twice, with what was counted here
        exporter.run(b"".join(map(wire.to_line, (of_engine | {"is_total": True}, of_engine, other, other))) + text)
        first, empty, own, rest = theirs.recv(1 << 20).split(b"\n")
    handle.assert_called_once_with(signal.SIGTERM, exporter._asked_to_end)
    push.assert_called_once_with(exporter._totals, exporter._refresh, 5)
    assert push.return_value.mock_calls == [call.start(), call.take_as_sent(), call.close()]
    assert (wire.from_line(first), empty, rest) == ({"pid": os.getpid()}, b"", b"")
    counts = wire.read(wire.from_line(own)).counts
    cut, apply = (counts.pop(signals.slot(signals.SELF_SECONDS, where)) for where in ("cut", "apply"))
    assert 0 < cut < 10**9 > apply > 0, "nanoseconds"
    dropped, errors = signals.slot(signals.SPANS_DROPPED, "malformed"), partial(signals.slot, signals.INTERNAL_ERRORS)
    assert counts == {dropped: 6, errors("version"): 2, errors("apply"): 1}
    assert exporter._health()[1]["spans_dropped"] == 6
    sent = [span.attributes or {} for span in memory.get_finished_spans()]
    assert [(one[spans.GEN_AI_MODEL], one[spans.ENGINE]) for one in sent] == [("tiny", 3)] * 2
    ((mark,),) = (marks.values() for marks in exporter._totals._marks.values())
    assert (mark.trace_id, 0 <= time.time() - mark.time_s < 60) == ("1" * 32, True)


def test_each_exemplar_has_the_trace_of_its_own_record(made: Callable[..., process.Exporter]) -> None:
    exporter, times = made(), {"1" * 32: 2_000, "2" * 32: 2_000_000_000}
    attributes = {spans.CONNECTOR: "one"}
    records = [record("kv.save", trace_id=i, observed_ns=ns, attributes=attributes) for i, ns in times.items()]
    exporter._cutter = Mock(**{"cut.return_value": records})
    exporter._apply(wire.to_line(wire.message(Increments({}, [], {}, [records]))))
    ((first, second),) = (marks.values() for marks in exporter._totals._marks.values())
    assert {mark.trace_id: round(mark.value * 1e9) for mark in (first, second)} == times


def test_its_numbers_are_kept_until_they_are_sent_whole(made: Callable[..., process.Exporter]) -> None:
    exporter, where = made(), signals.slot(signals.INTERNAL_ERRORS, "apply")
    line = b"\n" + wire.to_line(wire.message(Increments({where: 5}, [], {})))
    exporter._channel = channel = Mock()
    channel.send.side_effect = [BlockingIOError(), len(line) - 1, len(line), len(line)]
    for counted in ((2, 3), (5,)):
        for n in counted:
            exporter._count(signals.INTERNAL_ERRORS, "apply", n)
        for _ in range(4):
            exporter._send_counts()
    assert channel.send.mock_calls == [call(line, socket.MSG_DONTWAIT)] * 4


def test_parts_that_fail_or_are_not_wanted_are_left_out(made: Any, monkeypatch: Any, caplog: Any) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setattr(faults, "is_under_pytest", lambda: False)
    for module, name in (span_export, "make_exporter"), (process, "MetricsPush"):
        monkeypatch.setattr(module, name, lambda *_: 1 / 0)
    for exporter in (made(), made(has_spans=True, otlp_metrics=True)):
        assert (exporter._cutter, exporter._push, exporter._queued) == (None, None, 0)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    made(otlp_metrics=True)
    assert (faults.take(), caplog.text.count("not sent by OTLP: division by zero")) == ({"cut": 1}, 1)


@pytest.mark.parametrize(
    ("said_goodbye", "scrapes", "scraped_at", "seconds"),
    [
        (False, [], 0, 15), (False, [990, 995], 1001, 15), (True, [], 0, 0), (True, [990], 0, 15),
        (True, [990, 996], 0, 9), (True, [900, 990], 0, 15), (True, [990, 996], 1002, 2.1),
        (True, [988, 988.4, 994, 994.4], 1002, 2.15),  # two readers: as soon as both have it
        (True, [988, 988.4, 994, 994.4], 0, 8.4),
    ],
)  # fmt: skip
def test_the_last_numbers_are_served_for_a_while(  # noqa: PLR0917 - a table's columns, and fixtures
    said_goodbye: bool, scrapes: list[float], scraped_at: float, seconds: float, made: Any, clock: Any
) -> None:
    def sleep(slept_s: float) -> None:
        clock.now += slept_s
        if clock.now >= scraped_at > 0:
            exporter._scrapes += (scraped_at + 0.01,)

    exporter, calls, clock.now, clock.sleep = made(), Mock(), 1000.0, sleep
    exporter._watch, exporter._cutter, exporter._push, exporter._server = calls.w, calls.c, calls.p, calls.s
    exporter._scrapes, exporter._said_goodbye = tuple(scrapes), said_goodbye
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_let_go_of_stderr", calls.stderr)
        exporter._close()
    assert clock.now - 1000 == pytest.approx(seconds, abs=0.1)
    ends = [call.c.close(), call.p.close(), call.stderr(), call.s.close()]
    assert [one for one in calls.mock_calls if one[0] != "w.calls"] == [call.w.ended()] * (not said_goodbye) + ends


UNTIL = ". The engine serves, without kvobs's metrics until it can. Fix: "
REFUSED = {
    errno.EADDRINUSE: f"Address already in use, held by 7{UNTIL}set kvobs.exporter.port to a free one",
    errno.EACCES: f"Permission denied{UNTIL}correct this in kvobs.exporter",
    0: f"no number{UNTIL}",
}


@pytest.mark.parametrize("number", REFUSED)
def test_a_port_that_cannot_be_had_is_tried_again(
    number: int, made: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The exporter of an engine that is gone keeps its port for a while: until then nothing is logged."""
    forget()
    tries = 2 if number == errno.EADDRINUSE else 1
    error = OSError(number, os.strerror(number)) if number else OSError("no number")
    server = Mock(side_effect=[*[error] * tries, Mock()])
    monkeypatch.setattr(process, "holder", str)
    monkeypatch.setattr(process, "Server", server)
    exporter = made(host="0.0.0.0", port=7, linger_s=1, pid=os.getpid())
    for clock.now in [0.0, 1.0][:tries]:
        assert not caplog.records
        assert exporter._tick()
        assert exporter._tick(), "it is not tried at once"
    assert caplog.messages[0].startswith(f"the exporter can't listen on 0.0.0.0:7: {REFUSED[number]}")
    clock.now += 5.4
    exporter._tick()
    assert server.call_count == tries
    clock.now = exporter._bind_at
    for _ in range(2):
        assert exporter._tick()
    assert server.mock_calls == [call("0.0.0.0", 7, exporter._text, exporter._health, None)] * (tries + 1)
    assert "kvobs's metrics at port 7: every client" in caplog.messages[-1]


def test_after_the_clock_was_put_back_the_last_numbers_are_of_the_past(made: Any, clock: Any) -> None:
    exporter = made()
    for clock.now, payload_s in ((5000.0, 4999.5), (1400.0, 1399.5)):
        exporter._apply(wire.to_line(wire.message(Increments.none()) | {"payload_s": payload_s}))
        assert exporter._health()[1]["seconds_since_last_payload"] == 0.5


def test_health_and_its_own_numbers_are_those_of_now(made: Any, clock: Any) -> None:
    exporter = made(pid=5, began_ns=0, has_spans=True)
    exporter._cutter = Mock(queued=3)
    for clock.now in (1.0, 2.0, 4.4444):
        page = exporter._text("application/openmetrics-text")[1].decode()
    assert (list(exporter._scrapes), page[-6:]) == ([1.0, 2.0, 4.4444], "# EOF\n")
    assert exporter._totals._watch is exporter._watch
    own = ("kvobs_engine_up{", "kvobs_last_payload_timestamp_seconds{", "kvobs_spans_queued{")
    assert [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(own)] == ["1.0", "0.0", "3.0"]
    state = {
        "engine": "alive", "engine_pid": 5, "processes": {"scheduler": "not seen"},
        "seconds_since_last_payload": 4.444, "spans_queued": 3, "spans_dropped": 0, "version": __version__,
    }  # fmt: skip
    assert exporter._health() == (True, state)
    exporter._is_up = False
    assert exporter._health() == (False, state | {"engine": "gone"})


def test_without_tracing_no_spans_are_queued(made: Any) -> None:
    assert "kvobs_spans_queued{" not in made()._text("text/plain")[1].decode()


@pytest.mark.parametrize(("level", "shown"), [(None, logging.INFO), ("debug", logging.DEBUG)])
def test_process_closes_the_engines_files_and_logs_in_its_format(
    level: str | None, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, theirs = socket.socketpair()
    file, logger, exporter = channel.detach(), logging.Logger("vllm"), Mock()
    files = {"/proc/self/fd": ["0", "1", "2", "77", "78", str(file)]}
    environ = {"VLLM_LOGGING_LEVEL": level} if level else {}
    close, fork = Mock(side_effect=OSError), Mock(side_effect=[0, 0, 5])
    system = SimpleNamespace(listdir=files.get, close=close, fork=fork, _exit=sys.exit, environ=environ)
    monkeypatch.setattr(script, "os", system)
    monkeypatch.setattr(sys, "argv", ["kvobs.export", str(file)])
    monkeypatch.setattr(process, "Exporter", exporter)
    monkeypatch.setitem(logging.Logger.manager.loggerDict, "vllm", logger)
    with theirs:
        theirs.sendall(wire.to_line(asdict(engine())) + b"{}\n{}\n{")
        assert script.main() == 0
    (handler,) = logger.handlers
    told = logging.LogRecord("vllm", logging.ERROR, "", 0, "all %s", ("well",), None)
    told.created = time.mktime((2026, 2, 3, 4, 5, 6, 0, 0, -1))
    assert (handler.format(told), logger.level) == ("ERROR 02-03 04:05:06 [kvobs exporter] all well", shown)
    with pytest.raises(SystemExit, match="^0$"):
        script.main()
    assert sorted(one.args[0] for one in close.mock_calls) == [77, 77, 78, 78]
    monkeypatch.setattr(sys, "argv", ["kvobs.export"])
    assert (script.main(), fork.call_count) == (2, 3), "by hand"
    (made_of,) = exporter.call_args_list
    made_of.args[0].close()
    assert made_of.args[1:] == (engine(),)
    exporter.return_value.run.assert_called_once_with(b"{}\n{}\n{")


@pytest.mark.parametrize("is_read", [True, False])
def test_the_end_of_an_exporter_is_sent_to_its_engine(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, channel = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", Mock())
    with engines, channel:
        if not is_read:
            engines.close()
        with pytest.raises(SystemExit, match="^0$"):
            script._report_end(child.pid, channel.fileno())
        if is_read:
            assert wire.from_line(engines.recv(100).strip()) == {"status": signal.SIGKILL}
    child.returncode = -signal.SIGKILL  # it is waited for


def test_an_engine_without_stderr_is_served_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it where the file was closed: 2>&-
    process._let_go_of_stderr()
