"""Write the calls of processes as a Chrome trace: a track for each process, with a row for each connector.

The calls of a connector's layer hook have a row below it: in a step they are one slice, which ends with the last one.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvobs.clock import WALL_OFFSET
from kvobs.probe.black_box import Call, Page, Record
from kvobs.vllm_api.hooks import HOOKS, Cadence


class Recorded(Protocol):
    """A process, with the calls on its page."""

    page: Page
    calls: list[Call]
    records: list[Record]


def write(path: Path, processes: Sequence[tuple[str, Recorded]]) -> int:
    """Write named processes to a new file, compressed if it ends with .gz; return the number of events.

    Raises:
        OSError: it exists, or can't be written.
    """
    begins = [call.begin_ns for _, process in processes for call in process.records[:1]]
    begins += [call.since_ns for _, process in processes for call in process.calls]
    zero_ns, number = min(begins, default=0), 0
    with path.open("xb") as file, gzip.GzipFile(fileobj=file, mode="wb") if path.suffix == ".gz" else file as out:
        out.write(b'{"traceEvents": [')
        for name, process in processes:
            for event in _events(name, process, zero_ns):
                out.write((",\n" if number else "\n").encode() + json.dumps(event).encode())
                number += 1
        out.write(f'\n], "otherData": {{"begin_unix_ns": {zero_ns + WALL_OFFSET}}}}}\n'.encode())
    return number


def _events(name: str, process: Recorded, zero_ns: int) -> Iterator[dict[str, Any]]:
    pid, rank = process.page.pid, process.page.rank
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": -1 if rank is None else rank}}
    rows: dict[str, int] = {}
    calls: list[Record | Call] = [*process.records, *process.calls]
    for call in calls:
        is_of_layers = HOOKS[call.hook].cadence is Cadence.LAYER
        row = f"{call.connector}: {call.hook}" if is_of_layers else call.connector
        if row not in rows:
            rows[row] = len(rows) + 1
            yield {"ph": "M", "pid": pid, "tid": rows[row], "name": "thread_name", "args": {"name": row}}
        event = {"name": call.hook, "pid": pid, "tid": rows[row]}
        if isinstance(call, Call):  # its end is missing
            yield event | {"ph": "B", "ts": (call.since_ns - zero_ns) / 1e3}
        else:
            times = {"ts": (call.begin_ns - zero_ns) / 1e3, "dur": call.spent_ns / 1e3}
            yield event | times | {"ph": "X", "args": {"calls": call.calls, "failed": call.has_raised}}
