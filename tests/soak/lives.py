"""The soak of pages: many lives of engines, which end as they should or are killed, and of those who read them.

Afterwards the folder has no file of theirs, and this process no more threads, file descriptors and memory than before.
"""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from unittest import mock
from uuid import uuid4

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from kvobs.export.engine import Engine
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.prometheus import Shown
from kvobs.export.totals import Totals, TotalsCollector
from kvobs.page import files, layout
from kvobs.page.description import Identity
from kvobs.page.reader import names_of
from kvobs.testing import Rig, Script
from tests.engine.serving import eventually
from tests.soak import memory
from tests.soak.report import Result
from tests.support.contexts import TRACING
from tests.support.watched import begin, config

REQUESTS, STEPS = 2, 8
KILLED = 0.3
"""Share of the lives that are killed."""
SAMPLES = 12
ENDS_S = 30.0
"""Threads that look once a second end within this, on a machine that others share."""
COUNTED = 7


def held() -> tuple[int, int]:
    """Return how many threads and file descriptors this process has."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _until_ended(before: tuple[int, int]) -> bool:
    """Wait until the threads of earlier lives have ended; return whether this process has no more than before."""
    return eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), ENDS_S)


def run(requests: int, seed: int, show: Callable[[str], None]) -> Result:
    """Let engines live one after the other until they have served so many requests."""
    result, random, lives = Result("Lives of engines", budget_mib=5), Random(seed), requests // REQUESTS
    samples, killed = result.memory.setdefault("this process", []), set[str]()
    with mock.patch.object(layout, "CALLS", 1024):  # or the killed ones of ten seconds fill a container's memory
        _live()  # what is made once
        before = held()
        with result.measured():
            for life in range(lives):
                if random.random() < KILLED:
                    name = f"soak-{uuid4()}"
                    killed.add(Identity.of(config(name)).server)
                    result.wrong += _be_killed(name)
                    result.faults["killed"] += 1
                else:
                    result.wrong += _live()
                    result.ends["shut down"] += 1
                result.requests += REQUESTS
                if life % max(1, lives // SAMPLES) == 0:
                    _until_ended(before)
                    samples.append(memory.sample(result.requests))
                    show(f"{life:,} of {lives:,} lives, {samples[-1].resident / memory.MIB:,.0f} MiB, {held()}")
        with mock.patch.object(files, "NEW_NS", 0):  # else files of the last ten seconds may not be locked yet
            begin(f"soak-{uuid4()}", None).close()
    if not _until_ended(before):
        result.wrong.append(f"threads and file descriptors: {before} before, {held()} after")
    left = [name for name in os.listdir(files.folder()) if name.partition("-")[0] in killed]
    return replace(result, wrong=[*result.wrong, *(f"{name} is left" for name in left)])


def _live() -> list[str]:
    """Let an engine with an API server serve, and shut it down; return what is wrong."""
    rig = Rig("kvobs", Script("lives", offers={f"r{i}": (16, False) for i in range(REQUESTS)}), ranks=2)
    server = Identity.of(rig.scheduler.vllm_config).server
    shown = Shown(server, {0: "tiny"}, replace(TRACING, is_on=False))
    for i in range(REQUESTS):
        rig.add(f"r{i}", max_tokens=2)
    rig.run(STEPS)
    lookups = (
        f'kvobs_lookups_total{{connector="ScriptedConnector",engine="0",model_name="tiny",outcome="hit"}} {REQUESTS}'
    )
    wrong = [] if lookups in _text(shown.collector) else ["lookups are not counted"]
    if len(names_of(server)) != 1 + len(rig.workers):
        wrong.append(f"the pages of an engine are {names_of(server)}")
    rig.connector.shutdown()
    for worker in rig.workers:
        worker.shutdown()
    shown.close()
    return wrong + [f"{name} is of an engine that was shut down" for name in names_of(server)]


def _be_killed(name: str) -> list[str]:
    """Fork a process with a page, which is read before and after it is killed; return what is wrong."""
    if not (pid := os.fork()):
        page = begin(name, None)
        page.add(0, COUNTED)
        time.sleep(600)
        os._exit(1)
    engine = Engine(f"{Identity.of(config(name)).server}-0-")
    totals = Totals(engine, EngineWatch(engine))

    def is_read() -> bool:
        engine.find()
        return any(page.pid == pid and page.counts[0] == COUNTED for page in engine.all())

    wrong = [] if eventually(is_read, 20) else ["a page can't be read"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _text(TotalsCollector(lambda: [totals]))
    if engine.is_alive or not is_read():
        wrong.append("a killed process is alive, or its last numbers are gone")
    return wrong


def _text(collector: TotalsCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
