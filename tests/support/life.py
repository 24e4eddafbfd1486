"""One life of the second engine of a group, with all that kvobs observes, and what its operator reads of it.

Two ranks, five connectors: a store, two isolated ones, of which one can't be built, and two between engines.
"""

import gc
import json
import logging
import re
import time
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

from kvobs import faults
from kvobs.connectors.specs import STATED_BYTES
from kvobs.log import forget, log
from kvobs.page import writer
from kvobs.page.writer import PageWriter
from kvobs.probe.native import choice
from kvobs.probe.pauses import OF_PROCESS
from kvobs.probe.recorder import NEVER, Recorder
from kvobs.schema import signals
from kvobs.schema.signals import TIMED
from kvobs.telemetry.tracing.journal import RESERVED
from kvobs.testing import BLOCK, Script
from tests.support.cached import LAYER, Cached
from tests.support.contained import contain
from tests.support.front import Front
from tests.support.numbers import numbers
from tests.support.observed import KV, SUFFIX, SYNC, S
from tests.support.rig import entry_for, forget_unused
from tests.support.scripted import Stats
from tests.support.traced import SAMPLED, Traced

NAMES = ["cpu", "absent", "flaky", "near", "far"]
REMOTE: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "10.0.3.17", "remote_port": 5600}
PROMPT = 4 * BLOCK + 1
OF_SCRIPTS = {"request_finished": "request_finished_all_groups"}
"""The hook that is called, where a script notes another name."""


@dataclass
class Life:
    """What is read of it: of /metrics when a load has been open for long, ``during`` a call, and at its end.

    ``calls`` are those that the connectors have noted when the load has been open for long.
    """

    late: str = ""
    during: str = ""
    ended: str = ""
    log: list[str] = field(default_factory=list)
    calls: dict[str, Counts[str]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    spans: list[ReadableSpan] = field(default_factory=list)


@contextmanager
def life(folder: Path) -> Iterator[Life]:
    """Let an engine live, and end by an exception of a connector."""
    with pytest.MonkeyPatch.context() as patch, _listening() as lines:
        # A connector's name stands for its class: a store's options have its size.
        patch.setitem(STATED_BYTES, "ScriptedConnector", {"bytes": False})
        patch.setattr("kvobs.export.engine_watch.SHOWN_NS", 0)
        contain(patch)
        patch.setenv("VLLM_LOG_STATS_INTERVAL", "1e9")  # on a busy machine it lasts long
        patch.setattr("kvobs.telemetry.requests.request_log.CLOSING_S", 60.0)
        slow = dict.fromkeys(TIMED, NEVER) | {"reset_cache": 1}
        patch.setattr(Recorder, "slow_ns", property(lambda _: slow, lambda *_: None), raising=False)
        forget()
        faults.take()
        gc.disable()  # of all calls one would take as long as a collection
        lived = _Living(patch, folder)
        try:
            lived.live()
            found = Life(lived.late, lived.during, lived.text(), list(lines))
            found.spans = lived.engine.spans()
            found.calls = lived.calls
            found.requests = {line["request_id"]: line for line in lived.lines()}
            yield found
        finally:
            gc.enable()
            lived.other.leave()
            lived.engine.front.metrics._forget_last_engine()


@contextmanager
def _listening() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _front(*connectors: Any, **more: Any) -> Front:
    """Return the API server's side with what it shows itself, in the registry of all."""
    front = Front(*connectors, types={kind: kind for kind in (Counter, Gauge, Histogram)}, **more)
    front.shown._is_over.set()
    return front


def _begin_other(engine: Traced) -> PageWriter:
    """Begin the page of the group's first engine, which has nothing to do."""
    config = engine.rig.scheduler.vllm_config
    transfer = SimpleNamespace(engine_id=config.kv_transfer_config.engine_id.removesuffix(SUFFIX))
    of_first: Any = SimpleNamespace(kv_transfer_config=transfer, instance_id=config.instance_id)
    info = engine.rig.connector._telemetry._recorders.page.process.engine
    return writer.begin(of_first, writer.describe(replace(info, index=0), None, is_native=choice().is_native))


class _Living:
    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.path, self.during = patch, folder / "requests", ""
        self.late = ""
        self.calls: dict[str, Counts[str]] = {}
        self.prompts: dict[str, int] = {}
        self.scripts = {name: Script(name) for name in NAMES}
        self.scripts["absent"].raises["__init__"] = OSError("no disk")
        classes = ("ScriptedConnector", *("BestEffortConnector",) * 2, *("PeerConnector",) * 2)
        connectors = [entry_for(self.scripts[name], cls) for name, cls in zip(NAMES, classes, strict=True)]
        connectors[0]["kv_connector_extra_config"] = {"tag": "cpu", "bytes": 1_024_000}
        connectors[-1]["kv_role"] = "kv_consumer"
        patch.setattr(Traced, "make_rig", Cached)
        patch.setattr("tests.support.observed.Front", _front)
        self.engine = Traced(
            patch,
            *self.scripts.values(),
            connectors=connectors,
            names=NAMES,
            best_effort=["flaky", "absent"],
            best_effort_slow_ms=60_000,
            min_tokens={"cpu": 2 * BLOCK},
            link_gbps={"far": 400},
            lookup_timeout_ms=100_000,
            stuck_after_s=0.5,
            request_log=str(self.path),
            verify={"sample_ratio": 1.0},
        )
        self.engine.token_s = 0.005
        self.other = _begin_other(self.engine)
        self.engine.rig.fill["wrong", 1] = {0: 0.0}

    def text(self) -> str:
        self.engine._deliver()
        self.engine.front.export_spans()
        lines = generate_latest(REGISTRY).decode().splitlines(keepends=True)
        return "".join(line for line in lines if re.match(r"(# (HELP|TYPE) )?(kvobs|scripted)_", line))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def request(self, request_id: str, steps: int = 3, *, like: str = "", tokens: int = PROMPT, **more: Any) -> None:
        """Add a request whose prompt nobody has, or that of another one."""
        first = self.prompts.setdefault(like or request_id, len(self.prompts))
        self.engine.rig.add(request_id, [first, *range(tokens - 1)], **more)
        self.engine.step(steps)

    def fresh(self, *args: Any, **more: Any) -> None:
        forget_unused(self.engine.rig)
        self.request(*args, **more)

    def say(self, name: str, *ranks: int, steps: int = 1, **said: str) -> None:
        for rank in ranks:
            self.scripts[name].say(rank, **said)
        self.engine.step(steps)

    def live(self) -> None:
        self._compute_and_save()
        self._load()
        self._fail()
        self._record()
        self._end()

    def _compute_and_save(self) -> None:
        near = self.scripts["near"]
        # Steps to learn from, whose prompts nobody has.
        for i in range(40):
            self.request(f"cold{i}", 1, tokens=20 + 7 * i % 90, max_tokens=1)
        self.engine.step()
        # Computed and noted, and a promised save, later on rank 1.
        near.promises.add("computed")
        self.fresh("computed", max_tokens=3, trace_headers=SAMPLED)
        self.say("near", 0, steps=2, saved="computed")
        self.say("near", 1, saved="computed")

    def _load(self) -> None:
        cpu, far = self.scripts["cpu"], self.scripts["far"]
        # The same loaded in the step, well and wrongly.
        cpu.offers |= {"right": SYNC, "wrong": SYNC}
        self.fresh("right", like="computed", trace_headers=SAMPLED)
        self.fresh("wrong", 5, like="computed", max_tokens=4, trace_headers=SAMPLED)
        # Two lookups wait for the first one; the last one loads from another engine.
        cpu.offers["peer"], far.offers["peer"] = [(None, False), (None, False), (0, False)], (3 * BLOCK, True)
        self.request("peer", 4, trace_headers=SAMPLED, **REMOTE)
        self.say("far", 0, steps=2, received="peer")
        self.say("far", 1, steps=3, received="peer")

    def _fail(self) -> None:
        engine, scripts = self.engine, self.scripts
        cpu, flaky, near, far = (scripts[name] for name in ("cpu", "flaky", "near", "far"))
        # Too few tokens, and an isolated connector that would load in the step; two offers, and a load that fails on
        # rank 1 and goes on from the other connector; one that is aborted.
        cpu.offers["little"], flaky.offers["little"] = (BLOCK, True), SYNC
        self.request("little", max_tokens=1)
        cpu.offers["failed"], near.offers["failed"] = [KV, (0, False)], (3 * BLOCK, True)
        self.request("failed", 1, trace_headers=SAMPLED)
        cpu.say(0, received="failed")
        self.say("cpu", 1, steps=4, failed="failed")
        near.offers["aborted"] = KV
        self.request("aborted", 1)
        engine.rig.abort("aborted")
        self.say("near", 0, 1, steps=2, received="aborted")
        # Rank 1 is late.
        far.offers["stuck"] = KV
        self.request("stuck", 2, **REMOTE)
        self.say("far", 0, steps=5, received="stuck")
        self.say("far", 1, steps=3, received="stuck")

    def _record(self) -> None:
        engine, near, far = self.engine, self.scripts["near"], self.scripts["far"]
        # Own stats, events, copies, a slow call, pauses, malformed trace contexts, and more spans than are kept.
        far.stats = [Stats(data={"n": n}) for n in (3, 4)]
        stored = BlockStored([1, 2], None, [1] * 2 * BLOCK, BLOCK, None, "CPU", None)
        near.answers["take_events"] = [stored, BlockRemoved([1], "STORAGE"), BlockRemoved([2], "CPU")]
        engine.step()
        near.answers.clear()
        cache, buffer = {LAYER: torch.rand(16, 4)}, {LAYER: torch.zeros(8, 4)}
        worker = engine.rig.workers[1]
        worker.set_host_xfer_buffer_ops(copy_kv_blocks)
        worker._connectors[NAMES.index("far")].copy_blocks(cache, buffer, [3, 15], [0, 1], "d2h")
        engine.rig.connector.reset_cache()
        while OF_PROCESS.collects not in gc.callbacks:
            time.sleep(0.01)
        page, collected = engine.rig.connector._telemetry._recorders.page, signals.slot(signals.GC_PAUSES, "scheduler")
        while not numbers(page).counts.get(collected):
            gc.collect(0)  # a short one: while it runs no thread of an engine that another test has left waits
            page.catch_up()
        self.request("garbled", trace_headers={"traceparent": "garbage"}, max_tokens=1)
        with pytest.MonkeyPatch.context() as patch:
            journal = engine.rig.connector._telemetry._recorders.traces._journal
            patch.setattr(journal, "_room", RESERVED + 1.0)  # for one span
            patch.setattr(journal, "_clock", lambda: journal._since)
            self.request("another", 0, trace_headers=SAMPLED, max_tokens=1)
            self.request("untraced", trace_headers=SAMPLED, max_tokens=1)
        # A fault of kvobs, and a line of the request log that is one too many.
        try:
            1 // 0  # noqa: B018
        except ZeroDivisionError:
            faults.contain("record")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvobs.telemetry.requests.request_log.WAITING_AT_MOST", 0)
            self.request("unlogged", max_tokens=1)

    def _end(self) -> None:
        engine, scripts = self.engine, self.scripts
        cpu, flaky, near, far = (scripts[name] for name in ("cpu", "flaky", "near", "far"))
        # The isolated connector fails on rank 1, while rank 0 reports a load that is nobody's; another ends the engine.
        flaky.raises, flaky.raises_on = {"wait_for_save": TimeoutError("no answer")}, {1}
        near.say(0, received="nobody")
        self.request("last", 1, max_tokens=9)
        flaky.raises = {}
        engine.step()
        far.on_call = self._look
        engine.step()
        far.on_call = None
        engine.now_ns += 20 * S
        self.late = self.text()
        self.calls = {
            name: Counts(OF_SCRIPTS.get(hook, hook) for hook, _ in script.calls)
            for name, script in self.scripts.items()
        }
        cpu.raises["build_connector_meta"] = RuntimeError("the disk is gone")
        try:
            engine.step()
        except RuntimeError:
            engine.rig.connector.shutdown()

    def _look(self, hook: str, detail: Any) -> None:
        if hook == "start_load_kv":
            self.during = self.text()  # of rank 0, and then of rank 1
