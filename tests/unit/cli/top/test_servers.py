"""Servers are read over HTTP; what is wrong with one is said in a line, and tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvobs
from kvobs.cli.top.rows import server_row
from kvobs.cli.top.servers import Watch, fetch, scrape_all, url_of
from kvobs.cli.web import NoAnswerError
from kvobs.schema.signals import LOADS
from tests.support.top_engines import Engines, Vllm, answering, count, exporting, serving
from tests.support.top_rows import ERRORS, GAUGES, RANKS, busy


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("localhost:8000/", "http://localhost:8000/metrics"),
        ("localhost", "http://localhost:8000/metrics"),
        ("gpu-7/metrics/", "http://gpu-7:8000/metrics/"),
        ("[::1]", "http://[::1]:8000/metrics"),
        ("http://gpu-7", "http://gpu-7/metrics"),
        ("http://gpu-7:8000", "http://gpu-7:8000/metrics"),
        ("https://vllm.example/prefill/metrics", "https://vllm.example/prefill/metrics"),
        ("gpu-7:8000/metrics/", "http://gpu-7:8000/metrics/"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://gpu-7/metrics?name=x#there", "http://gpu-7/metrics?name=x"),
    ],
)
def test_addresses_are_completed(given: str, url: str) -> None:
    assert url_of(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "", ":8000", "8000", "http://", "ftp://gpu-7:8000", "file:///etc/passwd", "gpu-7:port", "gpu-7:99999",
        "http://[::1", "a b:8000", "gpu-7:8000\n", "\x1b[2J:8000", "user:secret@gpu-7:8000",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"is not a server address.*; use HOST\[:PORT\] or ") as refused:
        url_of(given)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, "", "answers 404 Not Found"),
        (200, "vllm:x 1\n<html>", "no kvobs_. metrics here: .* at its own port .9464 by default.; else check"),
        (200, "kvobs_loads_total 1\nkvobs_engine_up 0\n", "its engine has ended"),
        (
            200,
            'kvobs_engine_up 0\nkvobs_engine_ended{connector="remote",hook="wait_for_save",reason="SIGKILL"} 1\n',
            "its engine has ended in wait_for_save of connector remote: SIGKILL",
        ),
        (200, 'kvobs_engine_up 0\nkvobs_engine_ended{reason="exit 1"} 1\n', "its engine has ended: exit 1"),
        (200, "kvobs_loads_total x\n", "its metrics can't be read: .*'x'"),
    ],
)
def test_answers_that_are_no_metrics_are_named(status: int, body: str, says: str) -> None:
    with answering(status, body) as url, pytest.raises(NoAnswerError, match=says):
        fetch(url)


def test_an_exporter_shows_what_vllms_server_shows() -> None:
    """For the same numbers every field is the same; there are no series of vLLM there."""
    engines = Engines("cpu", "disk")
    engines.send(busy, gauges=GAUGES, opened=[*RANKS, *ERRORS])
    exporter = exporting(busy, gauges=GAUGES, opened=[*RANKS, *ERRORS], names=("cpu", "disk"))
    with serving(engines) as address, exporter as other:
        theirs, ours = (fetch(url_of(one)) for one in (address, other))
    assert not [name for name, _ in ours.values if not name.startswith("kvobs_")]
    rows = [server_row("here", None, replace(scrape, unix_s=1000.0)) for scrape in (theirs, ours)]
    assert rows[0].connectors[0].loads == 4
    assert [replace(child, connector_class="") for child in rows[1].connectors] == [
        replace(child, connector_class="") for child in rows[0].connectors
    ]
    assert (rows[1].model, rows[1].kvobs_version, rows[1].vllm_version) == ("tiny", kvobs.__version__, "0.32.0")


def test_vllms_own_metrics_are_read_with_kvobss() -> None:
    engines, vllm = Engines("cpu"), Vllm()
    engines.send()
    vllm.send(running=3, waiting=2, first_tokens_s=[0.015])
    with answering(200, engines.text + vllm.text) as url:
        row = server_row("here", None, fetch(url))
    assert (row.running, row.waiting) == (3, 2)
    assert 0.01 < (row.ttft_p50_s or 0) < 0.02


def test_a_watched_server_may_go_and_come_back() -> None:
    engines = Engines("cpu")
    with serving(engines) as address:
        watch = Watch(url_of(address), 1)
        assert watch.row(watch.reading, since_start=False).error == "no answer yet"
        scrape_all([watch])
        first = watch.row(watch.reading, since_start=False)
        assert (first.address, first.error, first.connectors) == (address, "one answer so far", ())
        assert watch.row(watch.reading, since_start=True).connectors[0].loads == 0
        engines.send(lambda recorder: count(recorder, 0, LOADS, 3, "async", "ok"))
        scrape_all([watch])
        row = watch.row(watch.reading, since_start=False)
        assert row.seconds is not None
        assert row.connectors[0].loads * row.seconds == pytest.approx(3)
    scrape_all([watch])
    since = watch.reading.error_since_s
    row = watch.row(watch.reading, since_start=True)
    assert (row.error, row.connectors) == ("no answer: Connection refused", ())
    scrape_all([watch])
    assert watch.reading.error_since_s == since
    with serving(engines) as address:
        watch.url = url_of(address)
        scrape_all([watch])
        assert watch.row(watch.reading, since_start=False).error == "one answer so far"
        scrape_all([watch])
        assert watch.row(watch.reading, since_start=False).connectors[0].loads == 0
