"""Name the processes and requests of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class OfEngine(Protocol):
    """A record of an engine of a run."""

    @property
    def run(self) -> str: ...

    @property
    def engine(self) -> int: ...


class OfProcess(OfEngine, Protocol):
    """A record of a process."""

    @property
    def name(self) -> str: ...


def of_processes(processes: Sequence[OfProcess]) -> list[str]:
    """Return the shortest distinct name for each process, such as "run 2, engine 0 rank 1"."""
    return [
        (f"{run}, " if run else "") + (f"{engine} " if engine else "") + one.name
        for (run, engine), one in zip(_places(processes), processes, strict=True)
    ]


def of_engines(several: Sequence[OfEngine]) -> list[str]:
    """Return the run and the engine of each, where there are several."""
    return [", ".join(filter(None, place)) for place in _places(several)]


def _places(several: Sequence[OfEngine]) -> list[tuple[str, str]]:
    runs = list(dict.fromkeys(one.run for one in several))
    engines = {one.engine for one in several}
    return [
        (f"run {runs.index(one.run) + 1}" * (len(runs) > 1), f"engine {one.engine}" * (len(engines) > 1))
        for one in several
    ]


def of_request(request: int) -> str:
    """Return the hash of a request's id in hexadecimal digits."""
    return f"{request & (1 << 64) - 1:016x}"


def short(request: int) -> str:
    """Return the first eight digits of this hash, for a line of 80 columns."""
    return of_request(request)[:8]
