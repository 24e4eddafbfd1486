"""What a tally must count, by a model that is obviously right."""

from __future__ import annotations

RANKS = 4
REQUESTS = ("r0", "r1", "r2", "r3")


class Noted:
    """What the test itself knows of one request."""

    def __init__(self) -> None:
        self.expected = 0
        self.recorded: set[object] = set()  # in the open round
        self.before: set[object] | None = None  # in the completed round that late reports may still belong to

    def count(self, reporters: list[object], expected: int) -> bool:
        """Take in who reports in one step; return whether that completes a round."""
        for reporter in reporters:
            if self.before is not None and reporter not in self.before:
                self.before.add(reporter)
                continue
            self.expected = self.expected if self.recorded else expected
            # With more reports expected than there are ranks, each report is one of its own.
            self.recorded.add(reporter if self.expected <= RANKS else object())
        if self.before is not None and len(self.before) >= RANKS:
            self.before = None
        if not self.recorded or len(self.recorded) < self.expected:
            return False
        self.before = self.recorded if len(self.recorded) < RANKS else None
        self.recorded = set()
        return True
