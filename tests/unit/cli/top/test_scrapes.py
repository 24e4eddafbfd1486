"""What kvobs exposes is read as it was counted; any other text is left alone or refused."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.cli.top.scrapes import parse, parse_vllm
from kvobs.schema import signals
from kvobs.schema.signals import LOAD_DURATION, LOAD_TOKENS, LOADS, LOOKUPS, OLDEST_IN_FLIGHT
from kvobs.telemetry.payload.scrapes import by_owner, change
from tests.support.top_engines import Engines, count


def test_what_kvobs_exposes_is_read_as_it_was_counted() -> None:
    engines = Engines("cpu", "disk", engines=2)
    engines.send(lambda recorder: count(recorder, 0, LOADS, 3, "async", "ok"))
    engines.send(lambda recorder: count(recorder, 1, LOADS, 4, "sync", "failed"), engine=1)
    engines.send(lambda recorder: recorder.observe(1, LOAD_DURATION, 2**25, "async"), engine=1)
    owners = by_owner(change(None, engines.scrape().values))
    assert owners.keys() == {(e, c) for e in "01" for c in ("", "cpu", "disk")}
    assert owners["0", "cpu"].total(LOADS) == 3
    assert owners["0", "disk"].total(LOADS) == 0
    assert owners["1", "disk"].total(LOADS, outcome="failed") == 4
    assert owners["1", "disk"].total(LOADS, outcome="ok") == 0
    assert owners["1", "disk"].total(LOAD_DURATION, "_count") == 1
    assert owners["1", "disk"].total(LOAD_DURATION, "_sum") == pytest.approx(2**25 / 1e9)
    assert 2**24 / 1e9 < (owners["1", "disk"].quantile(LOAD_DURATION, 0.5) or 0) <= 2**25 / 1e9
    assert owners["0", "cpu"].label(signals.CONNECTOR_INFO, "class") == "MeteredConnector"


def test_what_is_no_number_is_not_there() -> None:
    engines = Engines("cpu")
    engines.send(gauges={(0, OLDEST_IN_FLIGHT, "load"): 0})
    assert "kvobs_oldest_in_flight_timestamp_seconds" in engines.text
    assert by_owner(engines.scrape().values)["0", "cpu"].values(OLDEST_IN_FLIGHT) == []


def test_other_metrics_are_left_alone_even_where_they_are_malformed() -> None:
    text = 'vllm:x{a= 1\nhtml <b>\nkvobs_load_tokens_total{connector="cpu"} 7.0\nkvobs_of_tomorrow_total 1.0\n'
    assert parse(text) == {(LOAD_TOKENS.name, frozenset({("connector", "cpu")})): 7}
    for malformed in ("kvobs_loads_total{connector", "kvobs_loads_total x", 'kvobs_skew_bucket{le="b"} 1'):
        with pytest.raises(ValueError, match=r"."):
            parse(f"{malformed.replace('skew', 'rank_skew_seconds')}\n")


@given(st.sampled_from(("", "{", '{connector="')), st.text(max_size=30))
def test_any_text_is_read_or_refused(begin: str, text: str) -> None:
    try:
        found = parse(f"{LOOKUPS.name}{begin}{text}\n")
    except ValueError:
        return
    assert all(math.isfinite(value) for value in found.values())


def test_labels_can_t_steer_a_terminal() -> None:
    text = LOOKUPS.name + '{connector="\x1b[2Jred\\n"} 1.0\n'
    assert list(parse(text)) == [(LOOKUPS.name, frozenset({("connector", r"\x1b[2Jred\n")}))]


def test_vllms_own_metrics_are_none_where_they_are_malformed() -> None:
    """They are no reason to show nothing of kvobs."""
    assert parse_vllm('vllm:num_requests_running{engine="0"} 3.0\nvllm:other x\n') == {
        ("vllm:num_requests_running", frozenset({("engine", "0")})): 3
    }
    assert parse_vllm("vllm:num_requests_running{engine\n") == {}
