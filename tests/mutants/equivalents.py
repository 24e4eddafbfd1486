"""Faults that no test can find: the changed code does the same. Each has its reason.

The keys are of text, not of line numbers: a test names the entries that no longer belong to any possible fault.
"""

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change of one or more lines of a function."""

    module: str
    function: str
    before: str
    after: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self[:4]


EQUIVALENTS: tuple[Equivalent, ...] = ()
