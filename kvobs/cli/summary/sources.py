"""Read the numbers of a run: from this host's pages, from addresses, from saved texts, or from a Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvobs.cli.here import HostServer
from kvobs.cli.scrapes import all_of, fetch, parse_vllm
from kvobs.cli.summary.rows import NAMES, ServerSums, server_sums, since_start
from kvobs.cli.web import NoAnswerError, query_prometheus
from kvobs.export.engine import servers
from kvobs.export.numbers import PROMPT_TOKENS, Scrape, Series
from kvobs.export.texts import printable
from kvobs.schema import __version__, signals

SETTLE_S = 0.5
"""Time for vLLM's own numbers of the last step to reach /metrics, and for an exporter to make its text again."""
LOOKBACK_S = 300
"""How old a sample of Prometheus may be: its own default."""


@dataclass
class Addresses:
    """Servers at these URLs, each with its vLLM's if that is another one. ``NoAnswerError`` if one can't be read."""

    urls: Sequence[tuple[str, str | None]]

    def look(self) -> None:
        """Do nothing: only the servers at these URLs are read."""

    def read(self) -> dict[str, tuple[str, Scrape]]:
        """Return the name and the numbers of each server, by a key."""
        found = {}
        for url, of_vllm in self.urls:
            address = url.removeprefix("http://").removesuffix("/metrics")
            try:
                found[url] = address, fetch(url, of_vllm, ended=True)
            except NoAnswerError as error:
                raise NoAnswerError(f"{address}: {error}") from None
        return found


@dataclass
class Host:
    """The servers of this host that run at the beginning, or begin later, whatever ends meanwhile."""

    _servers: dict[str, HostServer] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _others: set[str] = field(default_factory=set)  # they had ended before

    def __post_init__(self) -> None:
        for name in servers():
            server = HostServer(name)
            if server.is_alive:
                self._add(server)
            else:
                self._others.add(name)

    def look(self) -> None:
        """See whether others have begun since."""
        for server in self._servers.values():
            server.find()
        for name in servers():
            if name not in self._servers and name not in self._others:
                server = HostServer(name)
                if server.head is not None:  # else it has only just begun
                    self._add(server)

    def _add(self, server: HostServer) -> None:
        self._servers[server.server] = server
        self._names[server.server] = server.name(self._names.values())

    def read(self) -> dict[str, tuple[str, Scrape]]:
        """Return the same as ``Addresses``, also of servers that have ended since."""
        return {key: (self._names[key], server.last()) for key, server in self._servers.items()}


def summed(
    before: Mapping[str, tuple[str, Scrape]] | None, after: Mapping[str, tuple[str, Scrape]]
) -> list[ServerSums]:
    """Return the numbers of each server between two readings; since its start where the first one lacks it."""
    found = []
    for key, (name, last) in after.items():
        first = before[key][1] if before is not None and key in before else None
        seconds = last.at_s - first.at_s if first is not None else since_start(last)
        found.append(server_sums(name, [(first, last)], seconds))
    return found


# --- saved


def of_texts(paths: Sequence[Path]) -> list[ServerSums]:
    """Read what was saved: the text of /metrics before and after, or after only, or a summary as JSON.

    Raises:
        ValueError: a file can't be read, or is of another kind.
    """
    texts = [_text(path) for path in paths]
    if len(texts) == 1 and texts[0].lstrip().startswith("{"):
        return read_document(paths[0])
    scrapes = []
    for path, text in zip(paths, texts, strict=True):
        try:
            scrapes.append(Scrape(0.0, all_of(text), parse_vllm(text)))
        except NoAnswerError as error:
            raise ValueError(f"{path}: {error}") from None
    before = scrapes[0] if len(scrapes) > 1 else None
    return [server_sums(paths[-1].name, [(before, scrapes[-1])], None)]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None


def document(summaries: Sequence[ServerSums]) -> dict[str, Any]:
    """Return summaries as ``--json`` prints them."""
    found: dict[str, Any] = msgspec.to_builtins({"kvobs": __version__, "servers": list(summaries)})
    return found


class _Document(msgspec.Struct):
    servers: list[ServerSums]


def read_document(path: Path) -> list[ServerSums]:
    """Read what ``--json`` has printed; ValueError if it is something else."""
    try:
        return msgspec.json.decode(_text(path), type=_Document).servers
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no summary as `kvobs summary --json` prints it: {error}") from None


# --- Prometheus


@dataclass(frozen=True)
class Period:
    """From when to when, as Unix time."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def of_prometheus(url: str, period: Period, instances: Sequence[str] = ()) -> tuple[list[ServerSums], list[str]]:
    """Return the numbers of each model's servers in a period, and warnings. ``instances`` are those that are read.

    What a series had grown to at the last sample in the period counts, less its value at the start; a server whose
    engine was started again counts since then.
    """
    after = _samples(url, period.end_s, math.ceil(period.seconds), instances)
    before = _samples(url, period.begin_s, LOOKBACK_S, instances)
    warnings, models = [], dict[str, list[tuple[Scrape | None, Scrape]]]()
    vllm: dict[str, list[tuple[Scrape | None, Scrape]]] = {}  # vLLMs with other instances than their exporters
    for instance, last in after.items():
        first = before.get(instance)
        pair = (first, last)
        model = next((dict(labels).get("model_name", "") for _, labels in (*last.values, *last.vllm)), "")
        if not last.values:
            vllm.setdefault(model, []).append(pair)
            continue
        models.setdefault(model, []).append(pair)
        if first is None and _began(last) < period.begin_s:
            warnings.append(f"{instance} has no sample at the start: its numbers are since its engine's start")
    found = []
    for model, readings in models.items():
        of_vllm = vllm.get(model, ())
        if all(first is None for first, _ in of_vllm) and any(first is not None for first, _ in readings):
            of_vllm = ()  # its metrics are new there: what it had counted before is not known
        found.append(server_sums(model or "?", [*readings, *of_vllm], period.seconds))
    return sorted(found, key=lambda server: server.server), warnings


def _began(scrape: Scrape) -> float:
    return max((value for (name, _), value in scrape.values.items() if name == signals.START_TIME.name), default=0.0)


def _samples(url: str, at_s: float, within_s: int, instances: Sequence[str]) -> dict[str, Scrape]:
    """Return the last samples up to a time, by instance."""
    names = "|".join(sorted({*NAMES, PROMPT_TOKENS}))
    chosen = f',instance=~"{"|".join(map(_quoted, instances))}"' if instances else ""
    query = f'last_over_time({{__name__=~"{names}"{chosen}}}[{max(1, within_s)}s])'
    answer = query_prometheus(url, "query", query=query, time=f"{at_s:.3f}")
    found: dict[str, Scrape] = {}
    for instance, series, value in _parsed(answer):
        scrape = found.setdefault(instance, Scrape(at_s, {}, {}))
        into: Any = scrape.vllm if series[0] == PROMPT_TOKENS else scrape.values
        into[series] = value
    return found


def _quoted(text: str) -> str:
    """Return a text for a regular expression in a string of PromQL."""
    return "".join(c if c.isalnum() or c in "-_:" else f"\\\\{c}" for c in text if c not in '"\\\n')


def _parsed(answer: Any) -> Iterator[tuple[str, Series, float]]:
    try:
        for each in answer["result"]:
            labels = {str(name): printable(str(value)) for name, value in each["metric"].items()}
            value = float(each["value"][1])
            if math.isfinite(value):
                name = labels.pop("__name__")
                yield labels.get("instance", ""), (name, frozenset(labels.items())), value
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NoAnswerError(f"its answer can't be read: {error!r}") from None
