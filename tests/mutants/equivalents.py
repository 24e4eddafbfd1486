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


_RECORDER = "kvobs/probe/recorder.py"

EQUIVALENTS: tuple[Equivalent, ...] = tuple(
    Equivalent(module, function, before, before.replace(old, new), reason)
    for module, function, before, old, new, reason in (
        ("kvobs/blocks/device.py", "Device.copy", "dst.copy_(src, non_blocking=True)", "non_blocking=True", "",
         "the same bytes, later; and only a GPU executes it"),
        ("kvobs/blocks/device.py", "Copier._to_device", 'order = np.argsort(src_ids, kind="stable")', "stable",
         "STABLE", "numpy reads the first letter"),
        ("kvobs/blocks/layout.py", "tensor_view", "return view.view(_INTEGERS[unit]) if each > 1 else view",
         "each > 1", "(each > 1) or True", "else it is of these integers already"),
        ("kvobs/routing/completions.py", "Completions._sent", "if len(ended) <= 1 or meta is None:", "1", "2",
         "of two members, a set of a set of a set has the order of the first set"),
        ("kvobs/routing/isolation.py", "Isolation.asks",
         "visibility.drop(request_id, taints=asked.get(request_id, False))", "(request_id, False)", "(request_id, )",
         "None counts as False"),
        ("kvobs/export/feed.py", "Feed._add", "self._waiting.add(Increments({_DROPPED: lost}, [], {}))", "[]", "None",
         "None counts as empty"),
        *((f"kvobs/export/{name}.py", "", line, old, new, "however much is read at a time, the same is read")
          for name, line, n in (("process", "READ = 1 << 16  # bytes", 16), ("feed", "READ = 1 << 16  # bytes", 16),
                                ("http_server", "READ = 1 << 14  # bytes", 14))
          for old, new in (("1 <<", "2 <<"), (f"<< {n}", f"<< {n + 1}"))),
        ("kvobs/prediction/reuse.py", "ReuseDistances.observe",
         "weight = run if place >= thinned else run * self._scales.item(place)", ">=", ">",
         "from there on all scales are 1"),
        ("kvobs/export/totals.py", "Exposition.forget", 'self._last = -FRESH_S, "", b""', 'b""', 'b"XXXX"',
         "a text of no type is never served"),
        *(("kvobs/telemetry/tracing/sampling.py", "Verdicts.__init__",
           "self._sampler = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).sampler",
           "shutdown_on_exit=False", other, "it has no processor that could be shut down")
          for other in ("shutdown_on_exit=True", "")),
        ("kvobs/telemetry/payload/kvobs_stats.py", "", "FEW = 1_000  # numbers, of three parts or four", "1_000",
         "1001", "from how many numbers on they are added up early, for speed: what they add up to is the same"),
        (_RECORDER, "cost_of_recording", "def cost_of_recording(calls: int = 200, rounds: int = 5) -> float:",
         "200", "201", "one more call in a measurement: its result is per call"),
        (_RECORDER, "cost_of_recording", 'recorded = Recorder(1).timed(0, "wait_for_save", nothing)', "(0,", "(1,",
         "a stand-in whose numbers nobody reads: the cost does not depend on the child's position"),
    )
)  # fmt: skip
