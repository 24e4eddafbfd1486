"""Describe a metric: its subject, its labels and, of a histogram, its buckets; its kind follows from these."""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum, auto


class Kind(Enum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(Enum):
    """The subject of a metric."""

    CHILD = auto()  # a connector
    PROCESS = auto()  # kvobs itself: no ``connector`` label
    OUTSIDE = auto()  # a process, known or read from outside of it by whoever serves the metrics: not in payloads
    EXPORTER = auto()  # the exporter, which sets them itself: not in payloads, nor in vLLM's API server


OPEN: tuple[str, ...] = ()
"""Stands for a label's values that are known only at run time: few, and never ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """One metric; there is one object of each.

    ``labels`` maps a label's name to its closed set of values, or to ``OPEN``. ``bounds`` are a histogram's upper
    bounds as exponents: k stands for 2**k nanoseconds, or tokens, inclusive.
    """

    name: str
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[int, ...] = ()
    scope: Scope = Scope.CHILD

    @property
    def kind(self) -> Kind:
        """Return its type: a histogram has bounds, and a counter's name ends as Prometheus wants it."""
        if self.bounds:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE

    @property
    def is_open(self) -> bool:
        """Whether a label's values are known at run time only: such a metric has no slots."""
        return OPEN in self.labels.values()

    @property
    def unit(self) -> float:
        """Return the factor from a payload's number to Prometheus's."""
        return 1e-9 if "_seconds" in self.name else 1

    @property
    def buckets(self) -> list[float]:
        """Return a histogram's upper bounds for Prometheus."""
        return [2**k * self.unit for k in self.bounds]

    @property
    def sum_offset(self) -> int:
        """Return the offset of a histogram's sum in its slots."""
        return len(self.bounds) + 1

    def bucket(self, ns: int) -> int:
        """Return the index of the bucket for a duration; the last one is above all bounds."""
        return bisect_left(self.bounds, (ns - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Series:
    """One combination of a signal's label values, and its position in the slot table.

    A histogram has a slot for each bucket, for the overflow above the last bound, and for the sum.
    """

    signal: Signal
    values: tuple[str, ...]
    first: int

    @property
    def width(self) -> int:
        """Return its number of slots."""
        return self.signal.sum_offset + 1 if self.signal.kind is Kind.HISTOGRAM else 1
