"""Reports about one request, and the times of ranks that took so long."""

from kvobs.state.transfers import Report, ReportKind, Times

BEGAN_NS = 100


def report(  # noqa: PLR0917 - what most tests say of a report, in the order of its fields
    rank: int, kind: ReportKind, request: str, index: int = 0, time_ns: int = 0, spent_ns: int = 0, began_ns: int = 0
) -> Report:
    """Return a rank's report about one request."""
    return Report(rank, kind, index, time_ns, (request,), (spent_ns,), (began_ns,))


def took(*spent_ns: int) -> dict[int, Times | None]:
    """Return the times of each rank, from 0 on, that took so long."""
    return {rank: (BEGAN_NS + ns, ns, BEGAN_NS) for rank, ns in enumerate(spent_ns)}
