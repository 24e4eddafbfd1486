"""Put together what is recorded of each lookup: the answers, the load that followed it, and the first token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs.cli.timeline.recordings import Found, Process, Transfer
from kvobs.state.lookup import NOBODY, Answer
from kvobs.telemetry.flight import OWN, What
from kvobs.telemetry.request_records import ASYNC, CHOSEN, CROWDED, UNANSWERED


@dataclass(frozen=True)
class PastLoad:
    """A load as it was.

    ``seconds`` are those from vLLM's allocation to its end, or of a synchronous one those that its step waited;
    ``waited_s`` those until its request resumed; None: not recorded.
    """

    child: int
    tokens: int
    ended_ns: int
    outcome: str
    seconds: float | None
    waited_s: float | None


@dataclass
class PastLookup:
    """A lookup as it was, from its begin until vLLM allocated the request's blocks.

    Attributes:
        answers: by child; one that is not here was not asked, or its answers did not count.
        chosen: the child whose offer vLLM was given, or ``NOBODY``.
        computing: child -> predicted seconds of computing what its offer leaves, and under ``OWN`` of computing all;
            None: there was no estimate yet. Alone in its steps, and ``crowding`` times as much beside others.
        missing: tokens that vLLM had not computed itself.
        load: that followed; None: nothing was loaded.
        arrived_ns: when the request arrived; None: its first token is not recorded.
        is_only: whether the request was looked up once before its first token.
    """

    request: int
    began_ns: int
    ended_ns: int
    local: int
    answers: dict[int, Answer] = field(default_factory=dict)
    chosen: int = NOBODY
    computing: dict[int, float | None] = field(default_factory=dict)
    crowding: float = 1.0
    missing: int = 0
    load: PastLoad | None = None
    arrived_ns: int | None = None
    first_token_ns: int | None = None
    is_only: bool = True

    def crowded_s(self, child: int) -> float | None:
        """Return the seconds of computing what this child's offer leaves, beside others; None: no estimate."""
        seconds = self.computing.get(child)
        return None if seconds is None else seconds * self.crowding


@dataclass(frozen=True)
class History:
    """The lookups of an engine, in the order in which they ended, with its connectors and settings."""

    children: Sequence[str]
    settings: Mapping[str, Any]
    lookups: Sequence[PastLookup]
    resumes_s: Sequence[float]
    """From the end of each asynchronous load to the step that schedules its request."""


def histories(processes: Iterable[Process]) -> list[History]:
    """Return the history of each engine.

    Raises:
        ValueError: nothing is recorded of what lookups found.
    """
    schedulers = [process for process in processes if process.rank is None]
    if not schedulers:
        raise ValueError("no recording of a scheduler is here: copy that of rank 0's machine into the folder too")
    old = [process for process in schedulers if not process.settings]
    if old:
        raise ValueError(
            f"{old[0].path} is of an older kvobs, which did not record what lookups found: record anew with this one"
        )
    return [_history(process) for process in schedulers]


def _history(process: Process) -> History:
    found: dict[int, list[Found]] = defaultdict(list)
    for one in process.found:
        found[one.request].append(one)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in process.transfers:
        transfers[transfer.request].append(transfer)
    lookups = [lookup for request in found for lookup in _of_request(found[request], transfers[request])]
    resumes = [one for one in process.transfers if one.kind == "resume" and one.end is not None]
    return History(
        process.children,
        process.settings,
        sorted(lookups, key=lambda lookup: lookup.ended_ns),
        [((one.end or 0) - one.start) / 1e9 for one in resumes],
    )


def _of_request(found: Sequence[Found], transfers: Sequence[Transfer]) -> list[PastLookup]:
    """Return a request's lookups whose records are all there: the first of them are overwritten first."""
    spans = [(one.start, one.end) for one in transfers if one.kind == "lookup" and one.end is not None]
    lookups = []
    for i, (began_ns, ended_ns) in enumerate(spans):
        until_ns = spans[i + 1][0] if i + 1 < len(spans) else None
        records = [one for one in found if began_ns <= one.start <= ended_ns and one.what is not What.FIRST_TOKEN]
        if not any(one.what is What.ANSWER and one.child == OWN for one in records):
            continue
        lookup = _lookup(began_ns, ended_ns, [one for one in records if one.what is not What.WAITED])
        lookup.load = _load(lookup, until_ns, found, transfers)
        lookups.append(lookup)
    for one in found:
        if one.what is What.FIRST_TOKEN:
            _note_first_token(one, lookups)
    return lookups


def _lookup(began_ns: int, ended_ns: int, records: Sequence[Found]) -> PastLookup:
    lookup = PastLookup(records[0].request, began_ns, ended_ns, 0)
    for one in records:
        if one.what is What.COMPUTING:
            lookup.computing[one.child] = None if one.spent < 0 else one.spent / 1e9
            lookup.crowding = max(1.0, one.flags / CROWDED)
            if one.child == OWN:
                lookup.missing = one.n
        elif one.child == OWN:
            lookup.local = one.n
        else:
            tokens = None if one.flags & UNANSWERED else one.n
            since_ns = one.start if one.spent or tokens is None else 0
            lookup.answers[one.child] = Answer(one.child, tokens, bool(one.flags & ASYNC), since_ns, one.spent)
            if one.flags & CHOSEN:
                lookup.chosen = one.child
    return lookup


def _load(
    lookup: PastLookup, until_ns: int | None, found: Sequence[Found], transfers: Sequence[Transfer]
) -> PastLoad | None:
    """Return the load between this lookup's begin and the request's next one."""

    def is_of_it(start_ns: int) -> bool:
        return lookup.began_ns <= start_ns and (until_ns is None or start_ns < until_ns)

    load = next((one for one in transfers if one.kind == "load" and is_of_it(one.start)), None)
    if load is None:
        return None
    waited = next((one.spent for one in found if one.what is What.WAITED and is_of_it(one.start)), None)
    waited_s = None if waited is None else waited / 1e9
    answer = lookup.answers.get(load.child)
    is_async = answer is None or answer.is_async
    took_s = None if load.end is None else (load.end - load.start) / 1e9
    return PastLoad(
        load.child,
        load.tokens,
        load.start if load.end is None else load.end,
        load.outcome,
        took_s if is_async else waited_s,
        waited_s,
    )


def _note_first_token(token: Found, lookups: Sequence[PastLookup]) -> None:
    end_ns = token.start + token.spent
    before = [lookup for lookup in lookups if token.start <= lookup.began_ns <= end_ns]
    for lookup in before:
        lookup.arrived_ns, lookup.first_token_ns = token.start, end_ns
        lookup.is_only = len(before) == 1
