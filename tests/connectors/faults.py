"""Faults of stores, which change the bytes in them, and what verification found of each (docs/reliability.md)."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.published import write_row

RESULTS = Path(__file__).parent / "faults.json"
"""What the last published run found."""
PUBLISH = "KVOBS_FAULTS"
"""An environment variable: with it, a run replaces the results."""

Pages = list[list[Any]]
"""Of each stored block its parts, such as layers, as arrays of bytes."""
Fault = Callable[[Pages], None]


def flip(pages: Pages) -> None:
    """Flip the bits of one byte of each page."""
    for number, page in enumerate(pages):
        data = page[number % len(page)].reshape(-1)
        data[(number * 37) % data.size] ^= 0xFF


def shift(pages: Pages) -> None:
    """Give each page the bytes of the next one, as if keys had been swapped."""
    copies = [[part.copy() for part in page] for page in pages]
    for page, other in zip(pages, copies[1:] + copies[:1], strict=True):
        for part, theirs in zip(page, other, strict=True):
            part[:] = theirs


def blank(pages: Pages) -> None:
    """Zero the second half of each page, as in a file whose end was never written."""
    for page in pages:
        for part in page:
            part.reshape(-1)[part.size // 2 :] = 0


TITLES = {flip: "a byte's bits flipped", shift: "another block's bytes", blank: "the second half empty"}
REUSED = "filled again before it was read"


def record(connector: str, fault: str, wrong: int | None, outcomes: Mapping[str, float], **more: Any) -> None:
    """Publish what was found of a fault: how many wrong blocks were loaded, if counted, and all by outcome.

    ``ranks`` were blamed, so many ``seconds`` after the first of these loads had begun; ``at`` says on which engines.
    """
    if os.environ.get(PUBLISH):
        row = {"connector": connector, "fault": fault, "wrong": wrong, "at": "", "seconds": None, **more}
        row |= {"ranks": sorted(more["ranks"]), "outcomes": {name: int(n) for name, n in sorted(outcomes.items()) if n}}
        write_row(RESULTS, f"{connector}: {fault}", row)
