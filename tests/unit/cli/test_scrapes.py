"""What kvobs exposes is read as it was counted, any other text is left alone; two scrapes say what was between."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

import kvobs
from kvobs.cli.scrapes import fetch, parse, parse_vllm, values_of
from kvobs.cli.web import NoAnswerError, url_of
from kvobs.export.connector_rows import server_row
from kvobs.export.numbers import by_owner, change
from kvobs.schema import signals
from kvobs.schema.signals import LOAD_DURATION, LOAD_TOKENS, LOADS, LOOKUPS
from tests.support.top_engines import Engines, answering, count, exporting, serving
from tests.support.top_rows import ERRORS, GAUGES, NOW_NS, RANKS, busy
from tests.support.written import stopped_clock


def test_exposed_numbers_are_read_as_they_were_counted() -> None:
    engines = Engines("cpu", "disk", engines=2)
    engines.send(lambda recorder: count(recorder, 0, LOADS, 3, "async", "ok"))
    engines.send(lambda recorder: count(recorder, 1, LOADS, 4, "sync", "failed"), engine=1)
    engines.send(lambda recorder: recorder.observe(1, LOAD_DURATION, 2**25, "async"), engine=1)
    owners = by_owner(change(None, engines.scrape().values))
    assert owners.keys() == {(e, c) for e in "01" for c in ("", "cpu", "disk")}
    disk = owners["1", "disk"]
    assert (owners["0", "cpu"].total(LOADS), owners["0", "disk"].total(LOADS)) == (3, 0)
    assert (disk.total(LOADS, outcome="failed"), disk.total(LOADS, outcome="ok")) == (4, 0)
    assert disk.total(LOAD_DURATION, "_count") == 1
    assert disk.total(LOAD_DURATION, "_sum") == pytest.approx(2**25 / 1e9)
    assert disk.percentile(LOAD_DURATION, 0.5) == pytest.approx(2**25 / 1e9, rel=0.1)
    assert disk.mean(LOAD_DURATION) == pytest.approx(2**25 / 1e9)
    assert owners["0", "cpu"].mean(LOAD_DURATION) is None
    assert owners["0", "cpu"].label(signals.CONNECTOR_INFO, "class") == "MeteredConnector"


def test_other_metrics_are_left_alone_even_if_malformed() -> None:
    others = "vllm:x{a= 1\nhtml <b>\nkvobs_call_duration_seconds_bucket{le= 1\n"
    text = f'{others}kvobs_load_tokens_total{{connector="cpu"}} 7.0\n'
    assert parse(text) == {(LOAD_TOKENS.name, frozenset({("connector", "cpu")})): 7}
    for malformed in ("kvobs_loads_total{connector", "kvobs_loads_total x", 'kvobs_skew_bucket{le="b"} 1'):
        with pytest.raises(ValueError, match=r"."):
            parse(f"{malformed.replace('skew', 'rank_skew_seconds')}\n")


@given(st.sampled_from(("", "{", '{connector="')), st.text(max_size=30))
def test_any_text_is_read_or_refused(begin: str, text: str) -> None:
    try:
        values = parse(f"{LOOKUPS.name}{begin}{text}\n").values()
    except ValueError:
        return
    assert all(map(math.isfinite, values))


def test_values_need_numbers_and_labels_steer_no_terminal() -> None:
    text = f'{LOADS.name} NaN\n{LOOKUPS.name}{{connector="\x1b[2Jred\\n"}} 1.0\n'
    assert parse(text) == {(LOOKUPS.name, frozenset({("connector", r"\x1b[2Jred\n")})): 1}


def test_a_label_with_a_separator_of_lines_does_not_end_its_line() -> None:
    text = "".join(f'kvobs_loads_total{{connector="a{c}b"}} 1.0\n' for c in "\x0b\x0c\x1c\x1e\x85\u2028")
    assert len(parse(text)) == 6


def test_vllms_own_metrics_are_none_where_they_are_malformed() -> None:
    """They are no reason to show nothing of kvobs."""
    assert parse_vllm('vllm:num_requests_running{engine="0"} 3.0\nvllm:other x\n') == {
        ("vllm:num_requests_running", frozenset({("engine", "0")})): 3
    }
    assert parse_vllm("vllm:num_requests_running{engine\n") == {}


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, "", "answered 404 Not Found"),
        (200, "vllm:x 1\n<html>", "no kvobs_. metrics here: .* at its own port .9464 .*; otherwise check"),
        (200, "kvobs_loads_total 1\nkvobs_engine_up 0\n", "its engine has ended"),
        (200, 'kvobs_engine_ended{connector="a",hook="f",reason="SEGV"} 1\n', "has ended in f of connector a: SEGV"),
        (200, 'kvobs_engine_up 0\nkvobs_engine_ended{reason="exit 1"} 1\n', "its engine has ended: exit 1"),
        (200, 'kvobs_engine_up{engine="0"} 0\nkvobs_engine_up{engine="1"} 0\n', "its engine has ended"),
        (200, "kvobs_loads_total x\n", "its metrics can't be read: .*'x'"),
    ],
)
def test_answers_that_are_no_metrics_are_named(status: int, body: str, says: str) -> None:
    with answering(status, body) as url, pytest.raises(NoAnswerError, match=says):
        fetch(url)


def test_an_exporter_of_engines_is_read_while_one_of_them_runs() -> None:
    text = 'kvobs_engine_up{engine="0"} 1\nkvobs_loads_total{engine="1"} 3\nkvobs_engine_up{engine="1"} 0\n'
    assert values_of(text)["kvobs_loads_total", frozenset({("engine", "1")})] == 3


def test_an_exporter_shows_what_vllms_server_shows() -> None:
    """For the same numbers every field is the same; there are no series of vLLM there."""
    engines = Engines("cpu", "disk")
    with stopped_clock(NOW_NS):
        engines.send(busy, gauges=GAUGES, opened=[*RANKS, *ERRORS])
    exporter = exporting(busy, gauges=GAUGES, opened=[*RANKS, *ERRORS], names=("cpu", "disk"))
    with stopped_clock(NOW_NS), serving(engines) as address, exporter as other:
        theirs, ours = (fetch(url_of(one)) for one in (address, other))
    assert not [name for name, _ in ours.values if not name.startswith("kvobs_")]
    rows = [server_row("here", None, scrape) for scrape in (theirs, ours)]
    assert rows[0].connectors[0].loads_per_s == 4
    unlike, like = ([replace(connector, connector_class="") for connector in row.connectors] for row in rows)
    assert unlike == like
    assert (rows[1].model, rows[1].kvobs_version, rows[1].vllm_version) == ("tiny", kvobs.__version__, "0.32.0")


def test_an_exporter_is_shown_with_its_vllm() -> None:
    """By the engine's number, since a server may have several; without vLLM's answer the rest is shown."""
    vllm = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 5.0\n'
    with exporting(lambda _recorder: None, {}, [], ("cpu",)) as address, answering(200, vllm) as of_vllm:
        rows = [server_row("", None, fetch(url_of(address), other)) for other in (of_vllm, None, of_vllm + "/x\ny")]
    assert [row.running for row in rows] == [3, None, None]
    assert {row.model for row in rows} == {"tiny"}
