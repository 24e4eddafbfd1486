"""Print recordings as tables: the processes, transfers in progress, and the slowest loads."""

from collections.abc import Sequence

from kvobs.cli.output import NONE, clock, duration, table
from kvobs.cli.timeline.recordings import Process, Slice, engine_names, process_names, request_name
from kvobs.cli.timeline.transfers import Joined

IN_PROGRESS_AT_MOST = 10
SLOWEST_AT_MOST = 5
RAISED_AT_MOST = 5
_LEFT = ("in progress", "slowest loads", "request", "waits for", "last rank", "connector")


def of_processes(processes: Sequence[Process]) -> list[str]:
    """Return a table of how much is recorded of each process."""
    rows = []
    for name, process in zip(process_names(processes), processes, strict=True):
        kinds = [transfer.kind for transfer in process.transfers if transfer.end is not None]
        counts = (len(process.slices), kinds.count("load"), kinds.count("save"))
        seconds = (process.last_ns - process.first_ns) / 1e9
        time = f"{seconds:.1f} s" if seconds >= 1 else duration(seconds)
        state = "running" if process.is_alive else "ended"
        rows.append((name, str(process.pid), state, *(f"{n:,}" for n in counts), time, clock(process.last_ns)))
    heads = ("process", "pid", "state", "calls", "loads", "saves", "time", "until")
    return table(heads, rows, texts=("process", "state"))


def of_calls(processes: Sequence[Process]) -> list[str]:
    """Return a line for each of the last calls that raised, and for each that was running when its recording ended."""
    raised, running = [], []
    for name, process in zip(process_names(processes), processes, strict=True):
        for call in process.raised:
            where = f"{name}: {_connector(process, call)} raised in {call.name}"
            raised.append((call.start, f"{where} at {clock(call.end or call.start)}"))
        for call in process.open:
            of = f" of {_connector(process, call)}" if call.track else ""
            age = duration((process.read_ns - call.start) / 1e9)
            running.append(f"{name} was in {call.name}{of} since {clock(call.start)} ({age})")
    return [line for _, line in sorted(raised)[-RAISED_AT_MOST:]] + running


def _connector(process: Process, call: Slice) -> str:
    return process.track_name(call.track).partition(":")[0]


def in_progress(joined: Sequence[Joined]) -> list[str]:
    """Return a table of lookups, loads and saves that have not ended, the oldest first."""
    unended = [transfer for transfer in joined if transfer.is_open]
    rows = [
        (transfer.kind, *_cells(transfer), _ranks(transfer.waits_for), place or NONE)
        for transfer, place in zip(unended, _places(unended, joined), strict=True)
    ]
    heads = ("in progress", "age", "request", "tokens", "waits for", "connector")
    lines = table(heads, rows[:IN_PROGRESS_AT_MOST], texts=_LEFT)
    more = len(rows) - IN_PROGRESS_AT_MOST
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def slowest_loads(joined: Sequence[Joined]) -> list[str]:
    ended = [transfer for transfer in joined if transfer.kind == "load" and not transfer.is_open]
    slowest = sorted(ended, key=lambda load: -load.spent_ns)[:SLOWEST_AT_MOST]
    rows = []
    for load, place in zip(slowest, _places(slowest, joined), strict=True):
        outcome = "" if load.outcome == "ok" else f", {load.outcome}"
        rows.append((clock(load.start), *_cells(load), _last_rank(load), place + outcome))
    return table(("slowest loads", "took", "request", "tokens", "last rank", "connector"), rows, texts=_LEFT)


def _places(transfers: Sequence[Joined], joined: Sequence[Joined]) -> list[str]:
    """Return the connector of each transfer, behind its run and engine where the recordings have several."""
    keys = [(transfer.run, transfer.engine) for transfer in joined]
    names = dict(zip(keys, engine_names(keys), strict=True))
    return [", ".join(filter(None, (names[t.run, t.engine], t.connector))) for t in transfers]


def _cells(transfer: Joined) -> tuple[str, str, str]:
    return duration(transfer.spent_ns / 1e9), request_name(transfer.request)[:8], _tokens(transfer)


def _tokens(transfer: Joined) -> str:
    return f"{transfer.tokens:,}" if transfer.tokens else NONE


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else NONE


def _last_rank(transfer: Joined) -> str:
    """Return the rank that took longest, and how much longer than the quickest."""
    if transfer.slowest is None:
        return NONE
    rank, skew_ns = transfer.slowest
    return f"{rank} +{duration(skew_ns / 1e9)}"
