"""Lay out the words of a page: marks of calls, counts, rows of open series, the ring of spans, the ring of calls.

A page begins with a head and a description (see ``description``). Its 64-bit words follow.
"""

from __future__ import annotations

import struct
import zlib
from itertools import accumulate

from kvobs.page import calls
from kvobs.page.description import FIELDS
from kvobs.schema.signals import DYNAMIC_COUNTERS, TABLE_DIGEST, word
from kvobs.schema.spans import Record
from kvobs.vllm_api.hooks import HOOKS, Cadence

WORD = 8  # bytes
HEAD = struct.Struct("<8sII")  # magic, version, length of the description
MAGIC = b"KVOBSPAG"
HOOK_NAMES = tuple(HOOKS)
LAYER_HOOKS = tuple(hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER)

NAME = 64  # bytes of an exception's class
# Single words, the first of a page.
(
    ENDED,  # 1: the process ended as vLLM asked it to
    SINCE,  # start of a worker's step; 0: it is in none
    STEPS,  # number of steps that have ended
    LOOKED,  # when the thread looked last
    RAISED,  # when an exception that crashes the engine last ended a call
    RAISED_IN,  # position of this call's marks
    RAISED_STEPS,  # number of steps that have ended once its step has
    RAISED_CLASS,
) = range(8)
FAN_OUTS = RAISED_CLASS + NAME // WORD  # of each layer hook their number, and the end of the last one
MARKS = FAN_OUTS + 2 * len(LAYER_HOOKS)

# A row of an open series: its count, which signal and connector, the length of its text + 1, and the text.
ROW_COUNT, ROW_KEY, ROW_LENGTH, ROW_TEXT = range(4)
ROW = 24  # words
TEXT = (ROW - ROW_TEXT) * WORD  # bytes
ROWS = 768  # without the rows of further values

# A ring of spans: where the newest record ends and the oldest begins, in bytes written so far, and the bytes.
RING_HEAD, RING_TAIL, RING_BYTES = range(3)
ORDINARY, URGENT = 0, 1
SPAN_BYTES = (384 << 10, 128 << 10)
"""Of the rings: slow and failed spans have a separate one, so that ordinary ones never displace them."""
CALLS = 1 << 16
"""Calls that the ring of calls holds."""

_FORM = TABLE_DIGEST, HOOK_NAMES, ROW, ROWS, SPAN_BYTES, calls.WORDS, FIELDS, Record._fields
VERSION = zlib.crc32(repr((5, *_FORM)).encode())
"""Of the positions, the description and the spans: a reader of another version refuses the page."""


class Layout:
    """The positions of the words of a page with this many connectors, and this many positions in its ring of calls.

    ``counts`` is where the counts of the ``slots`` begin. The first rows of open series are for further values, one for
    each connector and signal. ``ring`` is the ring of calls. ``words`` is the number of words.
    """

    def __init__(self, connectors: int, positions: int = 0) -> None:
        self.connectors, self.calls = connectors, positions
        self.counts = MARKS + 2 * connectors * len(HOOK_NAMES)
        self.slots = word(connectors, 0)
        self.rows = self.counts + self.slots
        self.row_count = connectors * len(DYNAMIC_COUNTERS) + ROWS
        *spans, self.ring = accumulate(
            [RING_BYTES + size // WORD for size in SPAN_BYTES], initial=self.rows + self.row_count * ROW
        )
        self._spans = spans
        self.words = self.ring + positions * calls.WORDS

    def spans(self, ring: int) -> int:
        """Return the position of a ring of spans."""
        return self._spans[ring]

    @staticmethod
    def marks(index: int, hook: str) -> int:
        """Return the position of a call's two marks: its last start, and the latest start of a call that ended.

        The call is in progress while the first is later. Of calls that overlap, on two threads or within each other,
        the one that began last is seen. Layer hooks, called hundreds of times a step, mark only their start.
        """
        return MARKS + 2 * (index * len(HOOK_NAMES) + HOOK_NAMES.index(hook))

    @staticmethod
    def fan_outs(hook: str) -> int:
        """Return the position of the two words of a layer hook: its fan-outs, and the end of the last one."""
        return FAN_OUTS + 2 * LAYER_HOOKS.index(hook)


def first(description: bytes) -> int:
    """Return the position of the first word in a page with this description, in bytes."""
    return -(-(HEAD.size + len(description)) // WORD) * WORD
