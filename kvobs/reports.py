"""What workers report about loads and saves, rank by rank, on their way to the scheduler's ledger."""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a worker can report about a request and a child."""

    RECEIVED = 0  # the child says that its async load has arrived on this rank
    FAILED = 1  # it says that the load has failed here: an arrival too, of nothing
    SPOILED = 2  # it named bad blocks that vLLM can't map to the request: the whole load has failed
    HOLED = 3  # it named bad blocks that vLLM was told of: vLLM recomputes them by itself
    SAVED = 4  # it says that the promised save is done here
    SYNC_DONE = 5  # this rank's step with a sync load is over
    SYNC_FAILED = 6  # the same, and the child named bad blocks


class Report(NamedTuple):
    """One report of one rank.

    ``began_ns`` is when this rank was told of the load or save (0: unknown), ``time_ns`` when it ended here; both are
    wall-clock time (ns since the epoch). ``spent_ns`` is what a synchronous load took of this rank's step; how long an
    asynchronous one took is seen from outside.
    """

    rank: int
    kind: Kind
    request: str
    child: int
    time_ns: int
    spent_ns: int = 0
    began_ns: int = 0


class Foreign(NamedTuple):
    """A report about something its child does not own. ``kind`` is a label value of ``kvobs_foreign_reports_total``."""

    child: int
    kind: str
    request: str
