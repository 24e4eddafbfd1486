"""The status page has what `kvobs top` and `kvobs trace` show, escaped and bounded, and no more than it may show."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from subprocess import run

import pytest
from pydantic import ValidationError

from kvobs import faults
from kvobs.export import status_page
from kvobs.export.engine import Engine
from kvobs.export.history import ALL_S, Interval
from kvobs.export.status_page import FRESH_S, HEIGHT, WIDTH, bar, newest_loads
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.verdicts import ALERTS, IDLE, RUNBOOK, STATES, WELL
from tests.support.status_pages import (
    NAMES,
    REQUEST,
    Drawn,
    drawn,
    empty,
    failing,
    good,
    hanging,
    hostile,
    idle,
    slow_load,
)

pytestmark = pytest.mark.timeout(120)
VOID = {"meta", "link", "rect", "br", "th", "td"}


class Parts(HTMLParser):
    """The tags, addresses and texts of a page; each tag that has to be closed is."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "xlink:href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def read(made: Drawn, **how: bool) -> Parts:
    return Parts(made.html(**how))


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_working_engine_has_its_connectors_and_no_alert() -> None:
    page = read(good())
    text = words(page.text)
    assert "kvobs: nothing fires" in text
    assert "What fires" not in text
    for name in NAMES:
        assert f" {name} " in text
    assert "tokens /s" in text
    assert "LMCacheConnectorV1" in text
    assert re.search(r"cpu load 2 \d+ ms", text) or re.search(r"cpu load 2 [\d.]+ s", text)
    assert "No load was slow" in text


def test_what_fires_is_what_top_judges_with_the_worst_first() -> None:
    page = read(failing())
    text = words(page.text)
    fires = text[text.index("What fires") : text.index("Connectors")]
    assert re.findall(r"Quarantined peer|Failing disk|Slow remote", fires) == [
        "Quarantined peer", "Failing disk", "Slow remote",
    ]  # fmt: skip
    assert "% of its loads, exceptions included" in fires
    assert "load p99" in fires
    for alert in ("KvobsConnectorQuarantined", "KvobsConnectorFailing", "KvobsLoadsSlow"):
        assert f"{RUNBOOK}#{alert.lower()}" in page.addresses
    assert f"{RUNBOOK}#kvobsinternalerrors" in page.addresses
    assert "3 of 5 connectors need attention" in text


def test_a_store_that_thrashes_is_named_with_its_share() -> None:
    made = good()
    for signal, tokens in (
        (signals.SAVE_TOKENS, 9 * 10**6),
        (signals.EVICTED_TOKENS, 9 * 10**6),
        (signals.FOLLOWED_EVICTIONS, 1000),
        (signals.REUSED_EVICTIONS, 400),
    ):
        made.count(0, signal, tokens, "cpu")
    page = read(made)
    assert "Thrashes cpu : prompts ask again for 40 % of what it evicts" in words(page.text)
    assert f"{RUNBOOK}#kvobsstoretoosmall" in page.addresses


def test_what_hangs_is_named_with_its_call_and_age() -> None:
    text = words(read(hanging()).text)
    assert re.search(r"Hangs remote : call for 4\d s, in start_load_kv on rank 1", text)
    assert re.search(r"remote call start_load_kv on rank 4, hangs 1 4\d s", text)
    assert re.search(r"peer load, hangs 12 9\d s", text)
    assert "cpu awaiting schedule 3 " in text  # it may wait for others that compute


def test_slow_loads_are_waterfalls_the_newest_first_and_bounded() -> None:
    made = failing()
    text = words(read(made).text)
    seen = re.findall(rf"request {REQUEST}-(\w+)", text)
    assert seen == [f"{number:08x}" for number in range(69, 5, -1)]
    assert "and 5 older" in text
    assert len(re.findall(r"rank 7 ", text)) >= 64
    assert "failed, 896 tokens" not in text
    assert "load_failed" in text


def test_a_rank_that_ended_before_an_older_load_stays_visible() -> None:
    made = drawn(ranks=2)
    for number in range(1, 80):
        made.pages.write(slow_load(number, "cpu", 1 if number % 2 else 500, ranks=2))
    loads, older = newest_loads([history.totals for history in made.page._histories.values()])
    assert (len(loads), older) == (64, 15)
    assert {[part.title for part in load.parts].count("rank 0") for load in loads} == {1}


@pytest.mark.parametrize(
    ("request_ids", "is_local", "shown"), [(False, True, True), (False, False, False), (True, False, True)]
)
def test_request_ids_leave_this_machine_only_by_option(request_ids: bool, is_local: bool, shown: bool) -> None:
    made = drawn(request_ids=request_ids)
    made.pages.write(slow_load(1, "cpu", 2))
    local = made.page.html(is_local=True, reloads=True).decode()
    page = made.page.html(is_local=is_local, reloads=True).decode()  # within the time of the first one
    assert REQUEST in local
    assert (REQUEST in page) == shown
    assert "2,000.00 ms" in page


def test_hostile_names_are_text_and_short() -> None:
    made = hostile()
    html = made.html()
    page = Parts(html)
    assert not page.tags & {"script", "img", "iframe", "object", "form", "input"}
    assert page.handlers == []
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }} </style><h1>" in page.text
    assert "\u202e" not in html
    assert "x" * 60 in html
    assert "x" * 61 not in html
    assert len(html) < 60_000


def test_links_are_relative_and_leave_only_for_the_runbook() -> None:
    addresses = set(read(failing()).addresses)
    outside = {address for address in addresses if "//" in address}
    assert {address.partition("#")[0] for address in outside} == {RUNBOOK}
    assert addresses - outside == {"data:,", "metrics", "healthz", "?still"} | {
        address for address in addresses if address.startswith("#load-")
    }
    own = "https://wiki.example.org/kvobs"
    assert f"{own}#kvobscallhangs" in Parts(_with_runbook(own)).addresses


def _with_runbook(url: str) -> str:
    made = drawn(runbook=url)
    made.hangs(0, "start_load_kv", 0, 60)
    return made.html()


@pytest.mark.parametrize("url", ["javascript:alert(1)", "/wiki", ""])
def test_a_runbook_is_at_a_web_address(url: str) -> None:
    with pytest.raises(ValidationError, match="an address with http"):
        ExporterOptions(runbook=url)


def test_it_reloads_itself_until_it_is_told_not_to() -> None:
    made = idle()
    assert '<meta http-equiv="refresh" content="10">' in made.html()
    still = made.html(reloads=False)
    assert "http-equiv" not in still
    assert "./" in Parts(still).addresses


def test_an_engine_without_connectors_or_history_has_a_page() -> None:
    assert "No connector has been used yet" in read(empty()).text
    text = words(read(idle()).text)
    assert text.count("- Idle") == len(NAMES)
    assert text.count("no load seen in the last 10 minutes") == len(NAMES)


def test_an_engine_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = idle()
    assert "the engine has ended" not in read(made).text
    monkeypatch.setattr(Engine, "is_alive", property(lambda _: False))
    assert "the engine has ended" in read(made).text


@pytest.mark.parametrize(
    ("connector", "value", "shown"),
    [("remote", 1, " in start_load_kv of remote: OSError"), ("", 1, ": OSError"), ("remote", 2, "")],
)
def test_the_end_has_its_call_and_reason(connector: str, value: int, shown: str) -> None:
    labels = {"connector": connector, "hook": "start_load_kv", "reason": "OSError", "engine": "0"}
    assert status_page._end({(signals.ENGINE_ENDED.name, frozenset(labels.items())): value}) == shown


def test_before_an_engine_is_found_there_is_a_page() -> None:
    page = status_page.StatusPage(list, ExporterOptions())
    page.sample()
    assert b"no connector" in page.html(is_local=True, reloads=True)


def test_a_page_is_drawn_once_in_its_time() -> None:
    made = idle()
    first = made.page.html(is_local=True, reloads=True)
    made.clock[0] += FRESH_S / 2
    assert made.page.html(is_local=True, reloads=True) is first
    made.clock[0] += FRESH_S
    assert made.page.html(is_local=True, reloads=True) is not first


def test_a_failing_sample_is_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    made = idle()
    monkeypatch.setattr(faults, "is_under_pytest", lambda: False)
    monkeypatch.setattr(status_page, "History", lambda *_: 1 / 0)
    faults.take()
    made.page._histories.clear()
    made.page.sample()
    assert faults.take() == {"read": 1}


def test_a_large_page_takes_fewer_than_300000_calls() -> None:
    """Of Python's functions and C's: 223,000 are about 50 ms of a core, and the same on a busy machine."""
    made, calls = failing(), 0
    made.html()

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        made.html()
    finally:
        sys.setprofile(None)
    assert calls < 300_000


def test_jinja_is_not_imported_before_a_page_is_asked_for() -> None:
    code = "import sys, kvobs.export.process; print('jinja2' in sys.modules, 'rich.console' in sys.modules)"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.split() == ["False", "False"]


def test_every_bad_state_has_its_alert_in_the_runbook() -> None:
    runbook = (Path(__file__).parents[3] / "dashboards/runbook.md").read_text()
    measures = {measure for state in STATES if state not in (WELL, IDLE) for measure in state.limits}
    assert measures == ALERTS.keys()
    for alert in ALERTS.values():
        assert f"\n## {alert}\n" in runbook


@pytest.mark.parametrize(
    ("begin_ago", "low", "high", "whole"),
    [(ALL_S, 0, 1, 1), (20, 0.5, 1, 1), (ALL_S + 10, 0, 0, 0), (20, 1, 1, 1), (40, 0, 1e-9, 1)],
)
def test_a_bar_is_within_its_chart_and_never_empty(begin_ago: float, low: float, high: float, whole: float) -> None:
    x, y, width, height = bar(Interval(begin_ago, begin_ago - 20, 0, 0, None, None), low, high, whole)
    assert 0 <= x <= WIDTH
    assert 0 < width <= WIDTH - x
    assert y >= 0
    assert height > 0
    assert y + height <= HEIGHT + 0.01


def test_several_engines_are_told_apart() -> None:
    first, second = good(), idle()
    totals = [history.totals for made in (first, second) for history in made.page._histories.values()]
    page = status_page.StatusPage(lambda: totals, ExporterOptions(), lambda: first.clock[0])
    page.sample()
    text = words(Parts(page.html(is_local=True, reloads=True).decode()).text)
    assert text.count("engine 0 cpu") >= 2
    assert signals.ENGINE_UP.name not in text
