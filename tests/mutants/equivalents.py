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
_RECORDER = "kvobs/telemetry/recording/recorder.py"

EQUIVALENTS: tuple[Equivalent, ...] = tuple(
    Equivalent(module, function, before, before.replace(old, new), reason)
    for module, function, before, old, new, reason in (
        ("kvobs/blocks/device.py", "Device.copy", "dst.copy_(src, non_blocking=True)", "non_blocking=True", "",
         "the same bytes, later; and only a GPU executes it"),
        ("kvobs/blocks/device.py", "Copier._to_device", 'order = np.argsort(src_ids, kind="stable")', "stable",
         "STABLE", "numpy reads the first letter"),
        ("kvobs/blocks/layout.py", "tensor_view", "return view.view(_INTEGERS[unit]) if each > 1 else view",
         "each > 1", "(each > 1) or True", "else it is of these integers already"),
        *(("kvobs/telemetry/payload/wire.py", "_is_row", _ROW, f'"{word}"', f'"{other}"',
           "only the number of these words counts")
          for word in ("signal", "child", "n") for other in (word.upper(), f"XX{word}XX")),
        ("kvobs/telemetry/payload/kvobs_stats.py", "", "FEW = 1_000  # numbers, of three parts or four", "1_000",
         "1001", "from how many numbers on they are added up early, for speed: what they add up to is the same"),
        (_RECORDER, "cost_of_recording", "def cost_of_recording(calls: int = 200, rounds: int = 5) -> float:",
         "200", "201", "one more call in a measurement: its result is per call"),
        (_RECORDER, "cost_of_recording", 'recorded = Recorder(1).timed(0, "wait_for_save", nothing)', "(0,", "(1,",
         "a stand-in whose numbers nobody reads: the cost does not depend on the child's position"),
        (_RECORDER, "_bounds_ns", "return np.left_shift(1, signal.bounds, dtype=np.int64)", "np.int64", "None",
         "numpy's integer is an int64 wherever vLLM runs"),
    )
)  # fmt: skip
