"""Look for leaked references in the compiled probe: the suite ``probe`` runs it, with a debug build of Python."""

import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvobs.probe import compiled

ROUNDS, AT_MOST = 500, 50


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, 8 * 1000)).cast("q")


def fails(*_: Any, **__: Any) -> None:
    raise OSError


def works(*args: Any, **_: Any) -> Any:
    return args


def notice(_: int, spent: int, __: object) -> int:
    return spent


def failed(*_: object) -> None: ...


def ends(*_: object) -> Any:
    raise SystemExit


def calls(probe: Any) -> Iterator[Any]:
    for call in (works, fails):
        for more in ((-1, notice, failed), (2**62, notice, failed), (-1, ends, ends)):
            target = (call, 0, 10, *more)
            yield probe.timed(*target)
            yield probe.fan_out((target,) * 3, 40)


def refused(probe: Any) -> None:
    for words, ring, buckets in ((bytes(8), 0, 65), (bytearray(80), 9, 65), (bytearray(80), 0, 5)):
        with suppress(ValueError, BufferError):
            compiled.Probe(words, ring, bytes(buckets), 12)  # type: ignore[arg-type]
    outside = (works, 9999, 0, 0, notice, failed)
    for arguments in (outside, (works,)):
        with suppress(ValueError, TypeError):
            probe.timed(*arguments)
    with suppress(ValueError):
        probe.fan_out(((works, 0, 10, 0, notice, failed), outside), 40)
    with suppress(ValueError):
        probe.waits(((0, 0, 9999, 0),), 40, bytes(65), 12)


def once() -> None:
    """Use all there is."""
    probe = compiled.Probe(page(), 900, bytes(65), 12)
    for call in calls(probe):
        for keywords in ({}, {"key": 1}):
            with suppress(OSError, SystemExit):
                call("a", **keywords)
    waits = probe.waits(((22, 22, 60, 1), (-1, 22, 60, 1)), 40, bytes(65), 12)  # type: ignore[arg-type]
    waits.close(True)
    probe.note(1, 2, 3)
    refused(probe)


def more(rounds: int) -> int:
    """Return how many references there are more after so many rounds."""
    gc.collect()
    before: int = sys.gettotalrefcount()
    for _ in range(rounds):
        once()
    gc.collect()
    after: int = sys.gettotalrefcount()
    return after - before


if __name__ == "__main__":
    more(20)
    leaked = more(ROUNDS)
    print(f"{leaked} references more after {ROUNDS} rounds")
    sys.exit(leaked > AT_MOST)
