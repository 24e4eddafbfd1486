"""Faults that no test can find: the changed code does the same. Each has its reason.

The keys are of text, not of line numbers: a test names the entries that no longer belong to any possible fault.
"""

from typing import NamedTuple


class Equivalent(NamedTuple):
    """A change of one or more lines of a function."""

    module: str
    function: str
    before: str
    after: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self[:4]


_ROW = 'if not isinstance(row, list) or len(row) < len(("signal", "child", "n")):'


def _row(word: str) -> tuple[Equivalent, ...]:
    changed = (_ROW.replace(f'"{word}"', f'"{other}"') for other in (word.upper(), f"XX{word}XX"))
    return tuple(
        Equivalent("kvobs/telemetry/payload/wire.py", "_is_row", _ROW, after, "only the number of these words counts")
        for after in changed
    )


EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        "kvobs/blocks/device.py",
        "Device.copy",
        "dst.copy_(src, non_blocking=True)",
        "dst.copy_(src, )",
        "the same bytes, later; and only a GPU executes it",
    ),
    Equivalent(
        "kvobs/blocks/device.py",
        "Copier._to_device",
        'order = np.argsort(src_ids, kind="stable")',
        'order = np.argsort(src_ids, kind="STABLE")',
        "numpy reads the first letter",
    ),
    Equivalent(
        "kvobs/blocks/layout.py",
        "tensor_view",
        "return view.view(_INTEGERS[unit]) if each > 1 else view",
        "return view.view(_INTEGERS[unit]) if (each > 1) or True else view",
        "else it is of these integers already",
    ),
    *_row("signal"),
    *_row("child"),
    *_row("n"),
    Equivalent(
        "kvobs/telemetry/payload/kvobs_stats.py",
        "",
        "FEW = 1_000  # numbers, of three parts or four",
        "FEW = 1001  # numbers, of three parts or four",
        "from how many numbers on they are added up early, for speed: what they add up to is the same",
    ),
    Equivalent(
        "kvobs/telemetry/recording/recorder.py",
        "cost_of_recording",
        "def cost_of_recording(calls: int = 200, rounds: int = 5) -> float:",
        "def cost_of_recording(calls: int = 201, rounds: int = 5) -> float:",
        "one more call in a measurement: its result is per call",
    ),
    Equivalent(
        "kvobs/telemetry/recording/recorder.py",
        "cost_of_recording",
        'recorded = Recorder(1).timed(0, "wait_for_save", nothing)',
        'recorded = Recorder(1).timed(1, "wait_for_save", nothing)',
        "a stand-in whose numbers nobody reads: the cost does not depend on the child's position",
    ),
    Equivalent(
        "kvobs/telemetry/recording/recorder.py",
        "_bounds_ns",
        "return np.left_shift(1, signal.bounds, dtype=np.int64)",
        "return np.left_shift(1, signal.bounds, dtype=None)",
        "numpy's integer is an int64 wherever vLLM runs",
    ),
)
