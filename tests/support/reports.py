"""Reports of ranks that took a given time."""

from kvobs.state.transfers import Report, ReportKind

BEGAN_NS = 100


def took(*spent_ns: int) -> dict[int, Report]:
    """Return the report of each rank, from 0 on, that took so long."""
    return {
        rank: Report(rank, ReportKind.RECEIVED, "r", 0, BEGAN_NS + ns, ns, BEGAN_NS) for rank, ns in enumerate(spent_ns)
    }
