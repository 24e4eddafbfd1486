"""Both probes count the same, whatever is called; vLLM and a connector call each other as if there were none."""

import gc
import subprocess
import sys
import weakref
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvobs.page.layout import RAISED_CLASS
from kvobs.probe.layer_calls import ARGUMENTS, WAITS, LayerCall, LayerCalls
from kvobs.probe.pure import Target
from kvobs.probe.recorder import SUM
from kvobs.schema.signals import LOOKUPS, slot
from tests.support.numbers import numbers
from tests.support.pending import Signalled, handled, sender, sent
from tests.support.probes import PROBES, Kind, each_probe, recorder_of

CONNECTORS = 3
STEP_HOOKS = ("start_load_kv", "wait_for_save", "get_finished")
SLOW_NS = 200_000
durations = st.integers(0, 2**18) | st.integers(0, 2**41)
ways = st.sampled_from(["returns", "raises", "is ended", "calls again"])
calls = st.tuples(st.just("call"), st.sampled_from(STEP_HOOKS), st.integers(0, CONNECTORS - 1), durations, ways)
layers = st.tuples(
    st.just("layers"),
    st.sampled_from(sorted(ARGUMENTS)),
    st.lists(st.tuples(durations, ways), min_size=CONNECTORS, max_size=CONNECTORS),
    st.booleans(),
)
QUICK, LATE = [(0, "returns")] * CONNECTORS, (200_001, "returns")
others = st.tuples(st.sampled_from(["close", "close, waiting", "count", "look"]))


class Engine:
    """Runs a program of calls into connectors by a fake clock, and records events, arguments and answers."""

    traces_all = False

    def __init__(self, kind: Kind) -> None:
        self.now, self.story = 10**9, list[Any]()
        self.recorder = recorder_of(kind, CONNECTORS, SLOW_NS, listener=self, clock=lambda: self.now)
        self.acts: list[tuple[int, str]] = []
        targets = [LayerCall(i, self.act) for i in range(CONNECTORS)]
        self.layers = {hook: LayerCalls(hook, targets, self.recorder) for hook in ARGUMENTS}
        self.calls = {
            (hook, i): self.recorder.timed(i, hook, self.act) for hook in STEP_HOOKS for i in range(CONNECTORS)
        }

    def note(self, event: Any) -> None:
        self.story.append(event._replace(subject=str(event.subject)))

    def act(self, *args: Any, **kwargs: Any) -> Any:
        ns, way = self.acts.pop(0)
        self.story.append((args, kwargs))
        self.now += ns
        if way == "calls again":
            self.acts.insert(0, (ns // 2, "returns"))
            self.calls["get_finished", 1]("inner")
        if way in ("raises", "is ended"):
            raise OSError(ns) if way == "raises" else KeyboardInterrupt
        return args

    def run(self, what: str, hook: str = "", *more: Any) -> None:
        if what == "call":
            index, ns, way = more
            self.acts = [(ns, way)]
            with suppress(OSError, KeyboardInterrupt):
                self.story.append(self.calls[hook, index]("r", key=ns))
        elif what == "layers":
            self.acts, has_keywords = list(more[0]), more[1]
            with suppress(OSError, KeyboardInterrupt):
                self.story.append(self.layers[hook].fan_out(*ARGUMENTS[hook], **({"key": 1} if has_keywords else {})))
        elif what == "count":
            self.recorder.count(1, slot(LOOKUPS, "hit"), 2)
        elif what == "look":
            self.story += numbers(self.recorder)
        else:
            self.story += [self.layers[hook].close_step(what == "close, waiting") for hook in WAITS]


@given(st.lists(calls | layers | others, max_size=25))
@example([("call", "get_finished", 1, 2, "calls again")])
@example([("layers", "save_kv_layer", QUICK, False), ("layers", "save_kv_layer", [*QUICK[1:], LATE], True)])
def test_both_count_the_same(program: list[Any]) -> None:
    stories, pages = [], []
    for kind in PROBES.values():
        engine = Engine(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvobs.probe.recorder.perf_counter_ns", lambda: 0)
            for step in [*program, ("close",), ("look",)]:
                engine.run(*step)
        stories.append(sorted(map(repr, engine.story)))  # slow layers are noticed at once, or after the last one
        words, at_ = engine.recorder.words, engine.recorder.page.layout
        for at in [at_.marks(i, hook) for hook in STEP_HOOKS for i in range(CONNECTORS)]:
            assert words[at] <= words[at + 1], "no call is in progress, though one may be within another"
        pages.append(
            (words[at_.counts : at_.ring].tolist(), words[RAISED_CLASS : at_.marks(0, STEP_HOOKS[0])].tolist())
        )
    assert stories[0] == stories[1]
    assert pages[0] == pages[1]


@each_probe
def test_no_connector_is_blamed_for_the_notice_of_the_one_before(kind: Kind) -> None:
    now = 10**9

    def passes(ns: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            nonlocal now
            now += ns

        return call

    def ran_ns(_: int, spent: int) -> int:
        passes(10**8)()  # as where it waits for the thread that notes pauses
        return spent

    recorder = recorder_of(kind, 2, SLOW_NS, clock=lambda: now)
    recorder.pauses = mock.Mock(ran_ns=ran_ns, waited_ns=lambda *_: 0)
    targets = [LayerCall(0, passes(10**9)), LayerCall(1, passes(1000))]
    layers = LayerCalls("save_kv_layer", targets, recorder)
    layers.fan_out(*ARGUMENTS["save_kv_layer"])
    assert layers.close_step() == [10**9, 1000]


class Suicidal:
    """A connector that drops what holds it in its call, and whose end raises."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __del__(self) -> None:
        raise RuntimeError("at the end")

    def hook(self, *_: Any) -> str:
        self.held.clear()
        gc.collect()
        return "done"


@each_probe
@pytest.mark.parametrize("hook", ["get_finished", "save_kv_layer"])
def test_a_connector_may_end_within_its_call(kind: Kind, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda at: raised.append(str(at.exc_value)))
    held: dict[str, Any] = {}
    recorder = recorder_of(kind, 1)
    connector = Suicidal(held)
    ended = weakref.ref(connector)
    if hook in ARGUMENTS:
        held["call"] = LayerCalls(hook, [LayerCall(0, connector.hook)], recorder).fan_out
    else:
        held["call"] = recorder.timed(0, hook, connector.hook)
    del connector
    assert held["call"](*ARGUMENTS.get(hook, "r")) == ("done" if hook not in ARGUMENTS else None)
    numbers(recorder)
    first = recorder.calls(0, hook)
    assert sum(recorder.words[first : first + SUM]) == 1, "its call was counted"
    del recorder
    gc.collect()
    assert (held, ended(), raised) == ({}, None, ["at the end"]), "it is gone, and nothing of it is left"


@each_probe
def test_a_call_in_a_circle_is_collected(kind: Kind) -> None:
    recorder = recorder_of(kind, 1)

    class Connector:
        def hook(self) -> None: ...

    connector: Any = Connector()
    connector.call = recorder.timed(0, "get_finished", connector.hook)
    ended = weakref.ref(connector)
    del connector
    gc.collect()
    assert ended() is None


@each_probe
def test_calls_leave_no_reference(kind: Kind) -> None:
    recorder, subject, answer, error = recorder_of(kind, 2, 1), object(), object(), OSError()

    def fails(*_: Any) -> None:
        raise error

    made = [recorder.timed(0, "get_finished", lambda *_: answer), recorder.timed(0, "get_finished", fails)]
    made += [LayerCalls("save_kv_layer", [LayerCall(0, lambda *_: answer), LayerCall(1, call)], recorder).fan_out
             for call in (lambda *_: answer, fails)]  # fmt: skip
    nones = []
    for _ in range(3):
        gc.collect()  # of what other tests have left
        before = [sys.getrefcount(each) for each in (subject, answer, error, None)]
        for call in made * 100:
            with suppress(OSError):
                call(subject, 1, 2)
        error.__traceback__ = None
        gc.collect()  # of frames that were looked at
        after = [sys.getrefcount(each) for each in (subject, answer, error, None)]
        assert [n - m for n, m in zip(after[:3], before[:3], strict=True)] == [0, 0, 0]
        nones.append(abs(after[3] - before[3]))
    assert min(nones) < 50, "of None: a leak is in each round, what other threads hold is not"


@each_probe
@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("hook", ["get_finished", *ARGUMENTS])
def test_no_signal_is_lost_while_a_call_is_counted(kind: Kind, hook: str, has_failed: bool) -> None:
    """The first Python code after it handles a signal: here what a slow or failed call is handed to."""
    recorder, arguments = recorder_of(kind, 2, -1), ARGUMENTS.get(hook, ("request",))
    connector = sender(len(arguments))  # without Python code
    if has_failed:
        connector.restype = dict[int, int]().__getitem__
    call = sent(connector)
    timed = recorder.timed(0, hook, call)
    if hook in ARGUMENTS:
        timed = LayerCalls(hook, [LayerCall(0, lambda *_: None), LayerCall(1, call)], recorder).fan_out
    with handled():
        for _ in range(200):
            with pytest.raises(Signalled) as raised:
                timed(*arguments)
            assert isinstance(raised.value.__context__, KeyError) is has_failed
    begun = recorder.page.marks(hook in ARGUMENTS, hook)
    ended = recorder.page.fan_outs(hook) + 1 if hook in ARGUMENTS else begun + 1
    assert 0 < recorder.words[begun] <= recorder.words[ended], "it is not in progress"


@each_probe
@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), CancelledError()], ids=repr)
def test_what_ends_the_process_passes(kind: Kind, error: BaseException, has_failed: bool) -> None:
    probe = kind(memoryview(bytearray(8000)).cast("q"), 900, bytes(65), 12)

    def ends(*_: object) -> Any:
        raise error

    for call in (probe.timed(*(target := Target({}.__getitem__ if has_failed else str, 0, 10, -1, ends, ends))),
                 probe.fan_out((target,) * 2, 40)):  # fmt: skip
        before = sys.getrefcount(error)
        for _ in range(100):
            with pytest.raises(type(error)) as raised:
                call("key")
            assert raised.value is error
            error.__traceback__ = error.__context__ = None
        del raised
        assert sys.getrefcount(error) <= before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((bytearray(80), 8, bytes(65), 12), "3 words at 8 are not in a page of 10"),
        ((bytearray(80), 0, bytes(64), 12), "buckets are 65 numbers below 12"),
        ((bytearray(80), 0, bytes([12] * 65), 12), "buckets are 65 numbers below 12"),
        ((bytes(80), 0, bytes(65), 12), "not writable|read-only"),
    ],
)
def test_the_compiled_one_refuses_what_is_not_in_its_page(arguments: Any, text: str) -> None:
    with pytest.raises((ValueError, BufferError), match=text):
        PROBES["c"](*arguments)


def test_the_compiled_one_refuses_positions_outside_of_its_page() -> None:
    probe: Any = PROBES["c"](memoryview(bytearray(800)).cast("q"), 90, bytes(65), 12)
    for begun, histogram in ((99, 0), (-1, 0), (0, 88), (0, -1)):
        with pytest.raises(ValueError, match="words at"):
            probe.timed(len, begun, histogram, 0, len, len)
    refused: list[Callable[[], object]] = [
        lambda: probe.fan_out((), 99),
        lambda: probe.waits(((0, 0, 90, 0),), 0, bytes(65), 12),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="words at"):
            call()


# With one GIL for all, as they were before 3.12: numpy has no others either.
SUBINTERPRETERS = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
    create = lambda: interpreters.create("legacy")
else:
    import _xxsubinterpreters as interpreters
    create = lambda: interpreters.create(isolated=False)
program = '''
from kvobs.probe import compiled
words = memoryview(bytearray(800)).cast("q")
probe = compiled.Probe(words, 90, bytes(65), 12)
assert probe.timed(len, 0, 2, 2**62, len, len)("four") == 4
assert words[2] == 1
'''
for _ in range(3):
    one = create()
    interpreters.run_string(one, program)
    interpreters.destroy(one)
exec(program)
"""


def test_interpreters_of_a_process_have_one_each() -> None:
    subprocess.run([sys.executable, "-c", SUBINTERPRETERS], check=True, timeout=60)
