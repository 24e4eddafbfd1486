"""Tests that share a core with ranks leave it to them."""

import os
import subprocess
import sys
import threading

from tests.support.affinity import keeping_off


def test_a_core_is_left_to_others() -> None:
    """By threads that were there before, by new ones, and by child processes; for as long as it is asked."""
    mine = "import os; print(sorted(os.sched_getaffinity(0)))"
    ours, seen, go_on = os.sched_getaffinity(0), [], threading.Event()

    def see() -> None:
        go_on.wait()
        seen.append(os.sched_getaffinity(0))

    threads = [threading.Thread(target=see)]
    threads[0].start()
    core = min(ours)
    others = ours - {core} or ours
    with keeping_off(core):
        threads.append(threading.Thread(target=see))
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join()
        assert seen == [others, others]
        assert subprocess.check_output([sys.executable, "-c", mine], text=True).strip() == str(sorted(others))
    assert os.sched_getaffinity(0) == ours
    os.sched_setaffinity(0, {core})
    try:
        with keeping_off(core):
            assert os.sched_getaffinity(0) == {core}, "the only core is shared"
    finally:
        os.sched_setaffinity(0, ours)
