"""Draw the status page: the connectors of a server's engines by state, their last ten minutes, what waits, slow loads.

Nothing is drawn, and Jinja is not imported, before somebody asks for the page. It needs no script and no other file.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvobs import faults
from kvobs.export.connector_columns import MEANINGS, columns, problems_of
from kvobs.export.connector_rows import ConnectorRow, Server, call_site, server_row
from kvobs.export.history import ALL_S, History, Interval
from kvobs.export.load_traces import Found, LoadTrace, Part, load_traces
from kvobs.export.numbers import Numbers, Values
from kvobs.export.texts import NONE, amount, duration, percent, time_of, took
from kvobs.export.totals import Totals
from kvobs.log import line
from kvobs.page.layout import URGENT
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.spans import CALL, LOAD
from kvobs.schema.verdicts import ALERTS, HANGS, STATES, Severity

FRESH_S = 1.0
"""Whoever asks within this time gets the same page: however many ask, they cost a twentieth of a core."""
RELOAD_S = 10
ROWS, LOADS, CALLS, PARTS = 64, 64, 128, 48
"""How many of each are shown, or looked at, at most."""
WIDTH, HEIGHT = 100.0, 32.0
"""Of a chart, in its own units."""
_OF_WAITING = {signals.CALL_IN_PROGRESS.name, signals.OLDEST_IN_FLIGHT.name, signals.IN_FLIGHT.name}
NAME, TEXT = 60, 200
"""Characters of a name, and of other texts, at most."""
_SYMBOLS = {Severity.NONE: "-", Severity.GOOD: "✓", Severity.WARNING: "!", Severity.BAD: "✕"}
_NOT_HERE = {"run, wait, TTFT", "telemetry, errors in it"}
_VALUES: dict[str, Callable[[float], str]] = {
    "corrupt_blocks": lambda n: f"{amount(n)} blocks",
    "failing_share": lambda share: f"{percent(share)} of its loads, exceptions included",
    "scheduler_share": lambda share: f"{percent(share)} of the scheduler's time",
    "load_p99": lambda seconds: f"load p99 {duration(seconds)}",
    "thrash_share": lambda share: f"prompts ask again for {percent(share)} of what it evicts",
}
"""By the measure of a bad state: its value in words."""


class Bar(NamedTuple):
    """A bar of a chart or a waterfall."""

    x: float
    y: float
    width: float
    height: float


class Card(NamedTuple):
    """A connector as it is shown."""

    row: ConnectorRow
    look: str
    symbol: str
    problem: str
    condition: str
    alert: str
    numbers: list[tuple[str, str]]
    further: list[str]
    rates: list[Bar]
    failures: list[Bar]
    durations: list[Bar]
    most: str
    failed: int
    longest: str


class Engine(NamedTuple):
    """An engine as it is shown; ``end`` is where and why it ended, if that is known."""

    server: Server
    number: str
    is_alive: bool
    end: str


class Waiting(NamedTuple):
    """Calls, lookups, loads or saves of a connector that are in progress, and the age of the oldest."""

    engine: str
    connector: str
    what: str
    n: int
    age_s: float

    @property
    def hangs(self) -> bool:
        """Whether it is older than `kvobs top` tolerates; a loaded request may wait for others that compute."""
        kind = self.what.partition(" ")[0]
        return kind != "awaiting" and self.age_s >= HANGS.limits.get(kind, float("inf"))


class Line(NamedTuple):
    """A line of a waterfall: a part of a load, when it began, how long it took, and its bar."""

    part: Part
    begin: str
    took: str
    x: float
    width: float


class StatusPage:
    """Makes the page for the engines that ``engines`` returns, out of what it has sampled and what their pages have."""

    def __init__(
        self,
        engines: Callable[[], Iterable[Totals]],
        options: ExporterOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._options, self._clock = engines, options, clock
        self._histories: dict[Totals, History] = {}
        self._template: Any = None
        self._made: dict[tuple[bool, bool], tuple[float, bytes]] = {}

    @faults.contained("read")
    def sample(self) -> None:
        """Keep what the engines have counted, for the charts."""
        for totals in self._engines():
            self._histories.setdefault(totals, History(totals, self._clock)).sample()

    def html(self, *, is_local: bool, reloads: bool) -> bytes:
        """Return the page; with ``is_local``, or if the options allow it, it has request ids."""
        key = is_local or self._options.request_ids, reloads
        made, page = self._made.get(key, (-FRESH_S, b""))
        now = self._clock()
        if now - made >= FRESH_S:
            page = self._render(has_ids=key[0], reloads=reloads).encode(errors="replace")
            self._made[key] = now, page
        return page

    def _render(self, *, has_ids: bool, reloads: bool) -> str:
        if self._template is None:
            self._template = _template()
        engines, cards, waiting = list[Engine](), list[Card](), list[Waiting]()
        histories = tuple(self._histories.values())
        for history in histories:
            before, now = history.scrapes()
            server = server_row("", before, now)
            engines.append(Engine(server, history.index, history.totals.engine.is_alive, _end(now.values)))
            waiting += _waiting(now.values)
            cards += [_card(row, server, history) for row in server.connectors]
        cards.sort(key=lambda card: _rank(card.row))
        loads, older = newest_loads(history.totals for history in histories)
        html: str = self._template.render(
            now=dt.datetime.now().astimezone(),
            engines=engines,
            is_group=len(engines) > 1,
            cards=cards,
            firing=[card for card in cards if card.alert],
            waiting=sorted(waiting, key=lambda each: -each.age_s),
            rows=ROWS,
            loads=[(load, dt.datetime.fromtimestamp(load.start_ns / 1e9), _waterfall(load)) for load in loads],
            older=older,
            has_ids=has_ids,
            reload_s=RELOAD_S if reloads else None,
            runbook=self._options.runbook,
            meanings={title: text for title, text in MEANINGS.items() if title not in _NOT_HERE},
            minutes=round(ALL_S / 60),
        )
        return html


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"name": lambda text: line(text, NAME), "text": lambda text: line(text, TEXT)}
    environment.filters |= {"duration": duration, "took": took}
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def _rank(row: ConnectorRow) -> int:
    """Return the place of a connector's state, the worst first."""
    return [state.name for state in STATES].index(row.state)


def _card(row: ConnectorRow, server: Server, history: History) -> Card:
    state = STATES[_rank(row)]
    shown = [(column, column.show(row)) for column in columns(since_start=server.seconds is None)]
    course = history.course(row.connector)
    most = max((each.tokens_per_s for each in course), default=0)
    longest = max((each.p99_s or 0 for each in course), default=0)
    return Card(
        row, state.severity, _SYMBOLS[state.severity], _problem(row), state.condition.format(**state.limits),
        ALERTS.get(row.state_by, ""),
        numbers=[(" ".join(column.title.split()), text) for column, text in shown if not column.words],
        further=[column.words.format(text) for column, text in shown if column.words and text not in (NONE, "0")],
        rates=[bar(each, 0, each.tokens_per_s, most) for each in course if each.tokens_per_s],
        failures=[bar(each, 0, 1, 1) for each in course if each.failed],
        durations=[bar(each, each.p50_s, each.p99_s, longest) for each in course if each.p50_s and each.p99_s],
        most=amount(most), failed=sum(each.failed for each in course), longest=duration(longest),
    )  # fmt: skip


def _problem(row: ConnectorRow) -> str:
    """Return by how much a connector is in its state, and the call that it is in."""
    if row.state_by in _VALUES:
        return _VALUES[row.state_by](row.state_value)
    return ", ".join(problems_of(row)).removeprefix(row.state).removeprefix(": ")


def bar(interval: Interval, low: float, high: float, whole: float) -> Bar:
    """Return the bar of an interval in a chart of ten minutes, from a low to a high value; never empty."""
    x = max(0.0, WIDTH * (1 - interval.begin_ago_s / ALL_S))
    end = max(x, WIDTH * (1 - interval.end_ago_s / ALL_S))
    height = max(1.5, HEIGHT * (high - low) / (whole or 1))
    top = max(0.0, HEIGHT * (1 - low / (whole or 1)) - height)
    return Bar(*(round(number, 2) for number in (x, top, (end - x) * 0.8, height)))


def _end(values: Values) -> str:
    """Return in which call an engine ended, and of what, as far as it is known."""
    ends = ((dict(labels), value) for (name, labels), value in values.items() if name == signals.ENGINE_ENDED.name)
    if (end := next((labels for labels, value in ends if value == 1), None)) is None:
        return ""
    where = f" in {end['hook']} of {end['connector']}" if end["connector"] else ""
    return f"{where}: {end['reason']}"


def _waiting(values: Values) -> Iterator[Waiting]:
    """Yield what waits or is in progress: calls, lookups, loads, loaded requests and promised saves."""
    numbers = Numbers.of((key, value) for key, value in values.items() if key[0] in _OF_WAITING)
    for has, age in numbers.by_name.get(signals.CALL_IN_PROGRESS.name, ()):
        yield Waiting(has["engine"], has["connector"], f"call {call_site(has)}", 1, age)
    for has, age in numbers.by_name.get(signals.OLDEST_IN_FLIGHT.name, ()):
        if age:
            n = int(numbers.total(signals.IN_FLIGHT, **has))
            yield Waiting(has["engine"], has["connector"], has["kind"].replace("_", " "), n, age)


def newest_loads(engines: Iterable[Totals]) -> tuple[list[LoadTrace], int]:
    """Return the newest slow and failed loads that the pages have, and the number of older ones."""
    found = [
        Found(str(info.index), page.rank, record)
        for totals in engines
        if (info := totals.engine.info) is not None
        for page in totals.engine.all()
        for group in page.spans(URGENT).read()
        for record in group
    ]
    by_end = sorted(found, key=lambda each: -each.record.end_ns)
    loads = [each for each in by_end if each.record.name == LOAD.name and each.record.is_urgent]
    calls = [each for each in by_end if each.record.name == CALL.name]
    others = [each for each in found if each.record.name not in (LOAD.name, CALL.name)]
    traces = load_traces([*others, *calls[:CALLS], *loads[:LOADS]])
    return sorted(traces, key=lambda load: -load.end_ns), len(loads[LOADS:])


def _waterfall(load: LoadTrace) -> list[Line]:
    begin, end = min(part.start_ns for part in load.parts), max(part.end_ns for part in load.parts)
    scale = WIDTH / max(1, end - begin)
    return [
        Line(part, time_of(part.start_ns - begin), took(part.end_ns - part.start_ns),
             round(min((part.start_ns - begin) * scale, WIDTH - 0.5), 2),
             round(max(0.5, (part.end_ns - part.start_ns) * scale), 2))
        for part in load.parts[:PARTS]
    ]  # fmt: skip
