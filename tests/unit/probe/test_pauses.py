"""Time in which the process did not run is known: collections of garbage, and stops, of real processes."""

import ctypes
import gc
import os
import signal
import time
from collections.abc import Sequence
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.page.writer import PageWriter, describe, plain
from kvobs.probe import pauses
from kvobs.probe.pauses import AT_MOST, OF_PROCESS, Pauses
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import slot
from tests.support.numbers import numbers
from tests.support.pending import Signalled, in_collections

HOOK = "wait_for_save"
SLOW = signals.word(0, slot(signals.SLOW_CALLS, HOOK))
TOOK = signals.word(0, slot(signals.CALL_DURATION, HOOK)) + signals.CALL_DURATION.sum_offset


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 9)), max_size=2 * AT_MOST), st.integers(0, 99), st.integers(0)
)
def test_pauses_are_no_part_of_a_calls_time(gaps: Sequence[tuple[int, int]], begin: int, spent: int) -> None:
    mine, now, paused = Pauses(), 0, list[range]()
    for gap, length in gaps:
        paused.append(range(now + gap, max(now, now + gap) + length))
        now = paused[-1].stop
        mine.note(paused[-1].start, now)
    inside = {ns for pause in paused[-AT_MOST:] for ns in pause if begin <= ns < begin + spent}
    assert mine.ran_ns(begin, spent) == spent - len(inside)


@pytest.mark.parametrize(("rank", "process"), [(None, "scheduler"), (0, "worker")])
def test_a_call_is_not_slow_because_of_a_collection(rank: int | None, process: str) -> None:
    mine, graph = Pauses(), [[i] for i in range(200_000)]
    mine.collects("stop", {})  # of a collection that began before it was installed
    gc.callbacks.append(mine.collects)
    try:
        begin = time.perf_counter_ns()
        gc.collect()
        spent = time.perf_counter_ns() - begin
    finally:
        gc.callbacks.remove(mine.collects)
    collected = spent - mine.ran_ns(begin, spent)
    assert 0 < collected < spent
    for seen, is_slow in ((mine, False), (Pauses(), True)):
        page = PageWriter(describe(plain(["one"]), rank))
        page.grown.append((slot(signals.GC_PAUSES, process), seen.take_collected_ns))
        recorder = Recorder(1, spent - collected // 2, page=page)
        recorder.pauses = seen
        recorder.notice(0, HOOK, begin, spent)
        recorder.count_slow(0, HOOK, begin, spent)
        recorder.count_slow(0, HOOK, begin - spent, spent)
        page.catch_up()
        counts = numbers(recorder).counts
        assert counts[SLOW] == 2 * is_slow + 1
        assert (counts.get(slot(signals.GC_PAUSES, process), 0) >= collected) is not is_slow
    assert graph


def test_no_signal_that_comes_during_a_collection_is_lost() -> None:
    """The first Python code after it handles a signal: a callback of the collector would swallow what that raises."""
    mine = Pauses()
    with in_collections(mine.collects):
        for _ in range(300):
            with pytest.raises(Signalled):
                gc.collect(0)
    assert mine.take_collected_ns() > 0 == mine.take_collected_ns()


@pytest.mark.usefixtures("hasty_threads")
def test_no_collection_is_lost_or_counted_twice_by_threads() -> None:
    mine, taken, n = Pauses(), list[int](), 10_000
    threads = [Thread(target=lambda: taken.extend(mine.take_collected_ns() for _ in range(n))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(n):
        mine._unread.append((1, 2))
    for thread in threads:
        thread.join()
    assert sum(taken) + mine.take_collected_ns() == n


def test_one_callback_exists_until_an_engines_last_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_TIMES", (ctypes.c_long * 4)(0, pauses.LATE_NS, 0, 10**8))  # ten looks a second
    mine, seen = Pauses(), list[int]()

    def look() -> bool:
        seen.append(gc.callbacks.count(mine.collects))
        return len(seen) < 4

    watches = [Thread(target=mine.watch, args=(look,)) for _ in range(2)]
    for watch in watches:
        watch.start()
    for watch in watches:
        watch.join()
    assert (seen[2:4], gc.callbacks.count(mine.collects)) == ([1, 1], 0)
    assert len(mine._delays) > 1


def test_no_call_waits_for_a_thread_that_an_error_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: int, size: int) -> bytes:
        raise OSError(file, size)

    mine = Pauses()
    monkeypatch.setattr(os, "read", read)
    with pytest.raises(OSError, match="8"):
        mine.watch(lambda: True)
    slept: list[float] = []
    monkeypatch.setattr(pauses, "sleep", slept.append)
    assert mine.ran_ns(time.perf_counter_ns() + 9 * pauses.LOOK_NS, 1) == 1
    assert slept == []
    assert mine.collects not in gc.callbacks


@pytest.mark.parametrize(
    ("begin", "spent", "waited"), [(4, 50, 0), (5, 50, 27), (9, 50, 27), (10, 50, 20), (10, 15, 15), (99, 50, 20)]
)
def test_a_call_may_have_waited_for_a_core(
    begin: int, spent: int, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Pauses()
    mine._delays += (5, 100), (10, 107)
    monkeypatch.setattr(pauses, "run_delay_ns", lambda thread: 127)
    assert mine.waited_ns(begin, spent) == waited


def test_the_thread_may_note_a_delay_while_a_call_looks_at_them() -> None:
    mine = Pauses()
    mine._delays += [(i, 0) for i in range(AT_MOST)]

    class Begin(int):
        """A time, at whose first comparison the thread runs."""

        def __ge__(self, other: object) -> bool:
            mine._delays.append((AT_MOST, 0))
            return False

    assert mine.waited_ns(Begin(1), 5) == 0, "no delay is known of the time before"


def test_another_threads_wait_for_a_core_is_unknown() -> None:
    mine, waited = Pauses(), list[int]()
    mine._delays.append((0, -(10**18)))
    assert mine.waited_ns(1, 5) == 5
    thread = Thread(target=lambda: waited.append(mine.waited_ns(1, 5)))
    thread.start()
    thread.join()
    assert waited == [0]


FAULTS = {
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the GIL": lambda: ctypes.PyDLL(None).sleep(4),  # no other thread runs
    "waits": lambda: time.sleep(4),
}


def fork_with(fault: str) -> int:
    """Let a process with this fault exit with 1 if its call was slow, plus 2 if it is counted as long."""
    if pid := os.fork():
        return pid
    try:
        recorder = Recorder(1, 2 * 10**9)
        recorder.pauses = OF_PROCESS
        OF_PROCESS._looked_ns = 0  # the parent's thread may have looked, and is not in this process
        pauses.NOTED_WITHIN = 10**6  # a busy machine may let the thread wait
        Thread(target=OF_PROCESS.watch, args=(lambda: True,), daemon=True).start()
        while not OF_PROCESS._looked_ns:
            time.sleep(0.01)
        recorder.timed(0, HOOK, FAULTS[fault])()
        counts = numbers(recorder).counts
        os._exit(counts.get(SLOW, 0) + 2 * (counts.get(TOOK, 0) > 2 * 10**9))
    finally:
        os._exit(9)


def test_a_call_in_which_the_process_was_stopped_is_not_slow() -> None:
    """Nor is it counted as long: it would seem to block the scheduler."""
    pids = {fault: fork_with(fault) for fault in FAULTS}
    _, status = os.waitpid(pids["is stopped"], os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(4)
    os.kill(pids["is stopped"], signal.SIGCONT)
    codes = {fault: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for fault, pid in pids.items()}
    assert codes == {"is stopped": 0, "holds the GIL": 3, "waits": 3}
