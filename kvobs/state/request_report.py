"""Gather a report about one request: the connectors' offers, its loads with their times, and the time they saved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs.state.transfers import Gain, Load

LOADS_AT_MOST = 8
"""Loads of one request; of more, as after many preemptions, the last ones are kept."""


@dataclass(slots=True)
class LoadReport:
    """One load, as far as it is known."""

    load: Load
    has_ended: bool = False
    ended_request: bool = False  # vLLM has ended the request because of it, before the ranks' reports were read
    gain: Gain | None = None
    wrong_blocks: int = 0  # over all ranks, of those that were compared

    @property
    def outcome(self) -> str:
        """Return "ok", "failed" or "aborted"; "open" while the ranks' reports have not been read."""
        if self.ended_request:
            return "failed"
        return self.load.outcome if self.has_ended or self.load.aborted else "open"

    def rendered(self, names: Sequence[str]) -> dict[str, Any]:
        """Return it in plain builtins; None: unknown, or not known yet."""
        load, gain, outcome = self.load, self.gain, self.outcome
        rendered = {
            "connector": names[load.connector_index],
            "tokens": load.tokens,
            "mode": "async" if load.is_async else "sync",
            "outcome": outcome,
            "duration_s": _seconds(load.duration_ns) if self.has_ended and outcome != "aborted" else None,
            "waited_s": _seconds(gain.waited_ns) if gain is not None else None,
            "saved_s": _seconds(gain.saved_ns) if gain is not None and gain.saved_ns is not None else None,
        }
        if gain is not None and gain.saved_ns is None:
            rendered["prefills_seen"] = gain.prefills
        if outcome == "failed":
            rendered["lost_tokens"] = load.recomputed_tokens
        if self.wrong_blocks:
            rendered["wrong_blocks"] = self.wrong_blocks
        return rendered


@dataclass(slots=True)
class RequestReport:
    """A report about one request; its methods may be called in any order.

    It has the lookups before its first allocation only: later ones, after a preemption or a failed load, are about the
    rest of the prompt.
    """

    prompt_tokens: int
    lookups: int = 0
    began_ns: int = 0
    looked_up_ns: int = 0
    local_tokens: int = 0
    seen_tokens: int = 0  # of the prompt, used before by any request
    offers: tuple[tuple[int, int], ...] = ()  # (connector, tokens)
    is_allocated: bool = False
    loads: list[LoadReport] = field(default_factory=list)
    more_loads: int = 0  # that were not kept
    saves: list[int] = field(default_factory=list)  # connectors that have promised one

    def looked_up(self, began_ns: int, ended_ns: int) -> None:
        if self.is_allocated:
            return
        if not self.lookups:
            self.began_ns = began_ns
        self.lookups += 1
        self.looked_up_ns = ended_ns

    def allocated(self, offers: Iterable[tuple[int, int]], local: int) -> None:
        if not self.is_allocated:
            self.is_allocated, self.offers, self.local_tokens = True, tuple(offers), local

    def admitted(self, load: Load) -> None:
        if len(self.loads) >= LOADS_AT_MOST:
            del self.loads[0]
            self.more_loads += 1
        self.loads.append(LoadReport(load))

    def load_ended(self, load: Load) -> None:
        if (known := self._find(load)) is not None:
            known.has_ended = True

    def load_weighed(self, load: Load, gain: Gain) -> None:
        if (known := self._find(load)) is not None:
            known.gain = gain

    def got_wrong_blocks(self, index: int, blocks: int) -> None:
        """Note blocks with wrong bytes of this connector's last load."""
        if (
            known := next((each for each in reversed(self.loads) if each.load.connector_index == index), None)
        ) is not None:
            known.wrong_blocks += blocks

    def aborted(self, load: Load, *, by_error: bool) -> None:
        if by_error and (known := self._find(load)) is not None:
            known.ended_request = True

    def promised(self, connectors: Iterable[int]) -> None:
        self.saves = list(dict.fromkeys((*self.saves, *connectors)))

    @property
    def awaits(self) -> Load | None:
        """Return a synchronous load of the step that is the request's last one: that step's output ends it."""
        last = self.loads[-1] if self.loads else None
        return last.load if last is not None and not last.has_ended and not last.load.is_async else None

    def rendered(self, names: Sequence[str]) -> dict[str, Any]:
        """Return it in plain builtins, with the connectors' names by position."""
        rendered: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "local_tokens": self.local_tokens,
            "seen_tokens": max(self.seen_tokens, self.local_tokens),
            "offered_tokens": {names[index]: tokens for index, tokens in self.offers},
            "lookups": self.lookups,
            "lookup_s": _seconds(self.looked_up_ns - self.began_ns),
            "loads": [load.rendered(names) for load in self.loads],
            "saves": [names[index] for index in self.saves],
        }
        if self.more_loads:
            rendered["more_loads"] = self.more_loads
        return rendered

    def _find(self, load: Load) -> LoadReport | None:
        return next((known for known in reversed(self.loads) if known.load is load), None)


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)
