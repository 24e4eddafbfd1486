"""The lookups, loads or promised saves of one connector that are in progress."""

from __future__ import annotations

from collections.abc import Iterator


class InProgress:
    """Requests with something in progress, the oldest first, and the tokens whose KV blocks are held for it."""

    __slots__ = ("_began", "_held", "tokens")

    def __init__(self) -> None:
        self._began: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self.tokens = 0
        """Tokens held for all of them."""

    def __len__(self) -> int:
        return len(self._began)

    def __contains__(self, request: object) -> bool:
        return request in self._began

    @property
    def oldest_ns(self) -> int:
        """Return when the oldest began, in ns; 0 without any."""
        return next(iter(self._began.values()), 0)

    def begin(self, request: str, now_ns: int, tokens: int = 0) -> None:
        """Add a request; one that is in already stays as it is."""
        if request not in self._began:
            self._began[request] = now_ns
            if tokens:
                self._held[request] = tokens
                self.tokens += tokens

    def end(self, request: str) -> None:
        """Remove a request, if it is in."""
        if self._began.pop(request, None) is not None:
            self.tokens -= self._held.pop(request, 0)

    def begun_before(self, time_ns: int) -> Iterator[str]:
        """Yield the requests that began at a time, or earlier."""
        for request, began_ns in self._began.items():
            if began_ns <= time_ns:
                yield request
