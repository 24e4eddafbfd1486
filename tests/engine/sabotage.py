"""Break kvobs's telemetry from inside, in every process of a server, as files in a folder say.

The server gets the folder's path in its environment under ``SWITCH``. A child connector by this module's path brings
the module into every process: EngineCore, workers and API server import it when they read the configuration, before
kvobs makes its objects there. In the folder:

    broken    while it exists, every seventh passage of every point in every seam raises, from the first on
    jumping   while it exists, kvobs's clock jumps by an hour, forward and back
    raising   while it exists, the child's reset_cache raises
    hit       gets a file for each seam that was broken
    written   gets a line for each file that kvobs opens for writing
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

from .children_stats import StatsChild
from .seams import instrument

__all__ = ["SWITCH", "Breaker", "BusyChild", "SabotageError", "Writes", "jumping"]

SWITCH = "KVOBS_TESTS_SABOTAGE"
EVERY = 7
"""Of so many passages of a point the first one raises: the others lead to what is behind it."""
HOUR_NS = 3600 * 10**9
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SabotageError(Exception):
    """What kvobs must contain."""


class Breaker:
    """Raises at those points of kvobs's seams that ``is_on`` says, and notes in which; at every so manieth passage."""

    def __init__(self, is_on: Callable[[str, int], bool], every: int = EVERY) -> None:
        self.hit: set[str] = set()
        self._is_on = is_on
        self._every = every
        self._passages: dict[tuple[str, int], Iterator[int]] = defaultdict(count)

    def __call__(self, seam: str, number: int) -> None:
        if self._is_on(seam, number) and next(self._passages[seam, number]) % self._every == 0:
            self.hit.add(seam)
            self.note(seam)
            raise SabotageError(f"{seam}, at {number}")

    def note(self, seam: str) -> None:
        """Inform others of a seam that is about to raise."""


class NotingBreaker(Breaker):
    """Leaves a file for each seam."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda _seam, _number: (folder / "broken").exists())
        self._hit = folder / "hit"

    def note(self, seam: str) -> None:
        (self._hit / seam).touch()


def jumping(is_on: Callable[[], bool]) -> Callable[[], int]:
    """Return a clock that is an hour ahead at one reading and an hour behind at the next."""
    jumps = cycle((HOUR_NS, -HOUR_NS, 0))
    return lambda: perf_counter_ns() + (next(jumps) if is_on() else 0)


def replace_clock(clock: Callable[[], int], replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Have all of kvobs that is imported read this clock."""
    readings = {"perf_counter_ns": clock, "perf_counter": lambda: clock() / 1e9}
    for name, module in list(sys.modules.items()):
        for kind in readings.keys() & vars(module).keys() if name.startswith("kvobs.") else ():
            replace(module, kind, readings[kind])


class Writes:
    """An audit hook that notes which files kvobs opens for writing; what its children write is theirs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & _WRITING:
            opener = self._opener(sys._getframe(1))
            if opener.startswith("kvobs."):
                self._note(f"{opener} {arguments[0]}")

    @staticmethod
    def _opener(frame: FrameType | None) -> str:
        """Return the module that is behind it: the nearest of kvobs, of vLLM or of a test."""
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith(("kvobs.", "vllm.", "tests.")):
                return name
            frame = frame.f_back
        return ""


class BusyChild(StatsChild):
    """Copies a block through the operation that vLLM hands it in every step, and fails to reset its cache on demand."""

    copy_blocks: Callable[..., None] | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        blocks = self._kv_cache_config.num_blocks
        self._caches = dict(list(kv_caches.items())[:1])
        self._buffers = {}
        for layer, cache in self._caches.items():
            dim = list(cache.shape).index(blocks)
            self._buffers[layer] = cache.narrow(dim, 0, 4).clone()

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.copy_blocks = copy_operation

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self.copy_blocks is not None:
            self.copy_blocks(self._caches, self._buffers, [1, 2], [0, 1], "d2h")

    def reset_cache(self) -> bool:
        if (Path(os.environ[SWITCH]) / "raising").exists():
            raise RuntimeError("made to raise in reset_cache")
        return True


def prepare(folder: Path) -> None:
    """Put everything in place; nothing is broken yet."""
    instrument(NotingBreaker(folder))
    replace_clock(jumping((folder / "jumping").exists))

    def note(line: str) -> None:
        with (folder / "written").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    sys.addaudithook(Writes(note))


if SWITCH in os.environ:
    prepare(Path(os.environ[SWITCH]))
