"""Read the pages of one engine on this host: the sums of its numbers, its spans, and who it is.

The pages of processes that have gone are kept, and with them their last numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from kvobs.log import once
from kvobs.page import files
from kvobs.page.description import EngineInfo, ProcessInfo
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.page.reader import OtherVersionError, Page, names_of
from kvobs.page.rows import Key
from kvobs.page.span_ring import SpanReader
from kvobs.schema import signals
from kvobs.schema.signals import CALL_DURATION, OTHER_VALUE, SERIES_AT_MOST, Kind, series_words
from kvobs.schema.spans import Record

Positions = Mapping[str, tuple[tuple[int, int], tuple[int, int]]]
"""Where to read on in each ring of spans, by a page's name."""
_RECORD = signals.slot(signals.OVERHEAD_SECONDS, "record")


@cache
def _gauges(connectors: int) -> Any:
    """Return the slots of all gauges, as an array."""
    return np.array([at for _, series, at in series_words(connectors) if series.signal.kind is Kind.GAUGE], np.int64)


@cache
def _timed_calls(connectors: int) -> Any:
    """Return the slots that count timed calls, as an array."""
    firsts = [at for _, series, at in series_words(connectors) if series.signal is CALL_DURATION]
    return np.array([first + bucket for first in firsts for bucket in range(CALL_DURATION.sum_offset)], np.int64)


class Engine:
    """The engine whose pages have names that begin with ``name``: a server's hash and its number, with hyphens."""

    def __init__(self, name: str, positions: Positions | None = None) -> None:
        self.name = name
        self.pages: dict[str, Page] = {}
        """By their names; threads may add some at any time."""
        self._refused: set[str] = set()
        self._rows: dict[tuple[signals.Signal, int], set[tuple[str, ...]]] = {}
        self._before = positions or {}
        self._spans: dict[str, tuple[SpanReader, SpanReader]] = {}

    def find(self) -> None:
        """Find the pages of processes that have begun since."""
        for name in names_of(self.name):
            if name in self.pages or name in self._refused:
                continue
            try:
                page = Page(files.folder() / name)
            except OtherVersionError:
                self._refuse(name, "it was written by another version of kvobs")
                continue
            except (OSError, ValueError):  # its process has only just begun, or ended
                continue
            if (info := self.info) is not None and info.names != page.names:
                self._refuse(name, f"it is for the connectors {', '.join(page.names)}, not {', '.join(info.names)}")
                continue
            ordinary, urgent = self._before.get(name, ((0, 0), (0, 0)))
            self._spans.setdefault(name, (page.spans(ORDINARY, ordinary), page.spans(URGENT, urgent)))
            self.pages.setdefault(name, page)

    def _refuse(self, name: str, why: str) -> None:
        self._refused.add(name)
        text = "the metrics of an engine's process are missing: its page %s can't be read: %s"
        once(f"version:{name}", logging.ERROR, text, name, why)

    @property
    def refused(self) -> int:
        """Return the number of pages of other versions of kvobs, or with other connectors."""
        return len(self._refused)

    def all(self) -> tuple[Page, ...]:
        """Return the pages that were found, in this order."""
        return tuple(self.pages.values())

    # Who it is

    @property
    def head(self) -> ProcessInfo | None:
        """Return the process that is asked about the engine: the scheduler's, if it is on this host."""
        processes = [page.process for page in self.all()]
        return min(processes, key=lambda process: (process.rank is not None, process.began_ns), default=None)

    @property
    def info(self) -> EngineInfo | None:
        """Return the engine's description; None before a page was found."""
        return self.head.engine if self.head is not None else None

    @property
    def has_core(self) -> bool:
        """Whether the scheduler's process is on this host."""
        return any(page.rank is None for page in self.all())

    @property
    def is_alive(self) -> bool:
        """Whether the scheduler's process runs; on a host without it, whether any does."""
        return any(page.is_alive for page in self._leading())

    @property
    def has_ended_well(self) -> bool:
        """Whether that process has ended as vLLM asked it to; on a host without it, whether all have."""
        return all(page.has_ended_well for page in self._leading())

    def _leading(self) -> Sequence[Page]:
        """Return the pages of the scheduler's process; on a host without it, all pages."""
        return [page for page in self.all() if page.rank is None] or self.all()

    # Its numbers

    def counts(self) -> list[int]:
        """Return the sum of each slot over all processes; of gauges their value plus 1, or 0."""
        pages = self.all()
        connectors = len(pages[0].names)
        gauges, calls = _gauges(connectors), _timed_calls(connectors)
        each = np.stack([page.counts for page in pages])
        total = each.sum(axis=0)
        total[gauges] = each[:, gauges].max(axis=0)
        of_calls = each[:, calls].sum(axis=1).tolist()
        total[_RECORD] += sum(int(n * page.process.cost_ns) for n, page in zip(of_calls, pages, strict=True))
        counts: list[int] = total.tolist()
        return counts

    def rows(self) -> dict[Key, int]:
        """Return the sums of the open series over all processes: for each connector and signal a bounded number."""
        total: dict[Key, int] = {}
        for page in self.all():
            for key, n in page.rows():
                if key in total:
                    total[key] += n
                    continue
                signal, index, values = key
                other = (OTHER_VALUE,) * len(values)
                known = self._rows.setdefault((signal, index), {other})
                if len(known) <= SERIES_AT_MOST:
                    known.add(values)
                at = key if values in known else (signal, index, other)
                total[at] = total.get(at, 0) + n
        return total

    # Its spans

    def spans(self, ring: int) -> list[Iterator[list[Record]]]:
        """Return what yields the groups of spans that were written since to this ring, for each process."""
        return [readers[ring].read() for readers in tuple(self._spans.values())]

    def skip_spans(self) -> None:
        """Skip the spans that were written since: another process exports them."""
        for readers in tuple(self._spans.values()):
            for reader in readers:
                reader.skip()

    @property
    def missed(self) -> int:
        """Return how many spans were overwritten before they were read here."""
        return sum(reader.missed for readers in tuple(self._spans.values()) for reader in readers)

    def positions(self) -> Positions:
        """Return where a later reader of this engine's spans must continue."""
        return {name: (one.position, other.position) for name, (one, other) in tuple(self._spans.items())}


def servers() -> list[str]:
    """Return the hashes of the servers that have pages on this host, the one that began last at the end."""
    newest_first = dict.fromkeys(name.partition("-")[0] for name in reversed(names_of()))
    return list(newest_first)[::-1]


def engines_of(server: str) -> list[str]:
    """Return the names of a server's engines that have pages on this host, by their number."""
    names = {"-".join(name.split("-")[:2]) + "-" for name in names_of(f"{server}-")}
    return sorted(names, key=lambda name: (len(name), name))
