"""Compare the numbers of two runs, connector by connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvobs.cli.summary.rows import MEASURES, ConnectorSums, Measure, PromptTokens, ServerSums


class Difference(NamedTuple):
    """A number in both runs; None where it is not known, or its connector is not there."""

    connector: str
    measure: Measure
    before: float | None
    now: float | None

    @property
    def size(self) -> float | None:
        """Return by how much it is more now."""
        return None if self.before is None or self.now is None else self.now - self.before

    @property
    def share(self) -> float | None:
        """Return that as a share of the number before."""
        return self.size / self.before if self.size is not None and self.before else None


def pairs(before: Sequence[ServerSums], now: Sequence[ServerSums]) -> Iterator[tuple[ServerSums, ServerSums]]:
    """Yield the servers that are in both runs, by name; where there is one each, these two."""
    if len(before) == len(now) == 1:
        yield before[0], now[0]
        return
    known = {server.server: server for server in before}
    yield from ((known[server.server], server) for server in now if server.server in known)


def differences(before: ServerSums, now: ServerSums) -> list[Difference]:
    """Return the numbers of all connectors of both runs; those that are 0 or missing in both are left out."""
    old, new = ({row.connector: row for row in server.connectors} for server in (before, now))
    found = [
        Difference(name, measure, _value(old.get(name), measure), _value(new.get(name), measure))
        for name in dict.fromkeys([*new, *old])
        for measure in MEASURES
    ]
    return [each for each in found if each.before or each.now]


def _value(row: ConnectorSums | None, measure: Measure) -> float | None:
    return None if row is None else getattr(row, measure.field)


def shares(tokens: PromptTokens) -> dict[str, float]:
    """Return what share of all prompt tokens came from where, by its words."""
    whole = max(1, tokens.all)
    parts = {"computed": tokens.computed, "in vLLM's own cache": tokens.local_cache}
    parts |= {f"loaded by {name}": n for name, n in tokens.loaded.items()}
    return {words: n / whole for words, n in parts.items()}
