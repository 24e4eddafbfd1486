"""One engine under soak: vLLM's scheduler, four ranks, three children, kvobs's metrics, and random requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvobs.testing import Rig
from tests.soak.children import LEDGERS
from tests.soak.ledger import STUCK_AFTER, Ledger, Series
from tests.soak.plans import Orders, draw, never, silent
from tests.support.front import Front
from tests.support.observed import BYTES_PER_TOKEN
from tests.support.rig import assert_nothing_is_left

if TYPE_CHECKING:
    import pytest
    from opentelemetry.sdk.trace import ReadableSpan

RANKS = 4
NAMES = ("one", "two", "three")
REPORTERS = (RANKS, RANKS, 1)  # ranks on which each child reports
STEP_NS = 20_000_000
AT_ONCE = 32  # requests
BLOCKS = 112  # so few that requests are preempted
STALLED_AFTER = 1_000  # steps that bring nothing to an end
IDLE_STEPS = 12  # in which the last numbers reach the metrics

SAMPLED = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
NOT_SAMPLED = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}

BY_LEDGER = {
    *("kvobs_lookups_total", "kvobs_lookup_delay_seconds_count", "kvobs_offered_tokens_total"),
    *("kvobs_admitted_tokens_total", "kvobs_unused_hit_tokens_total", "kvobs_unused_offers_total"),
    *("kvobs_loads_total", "kvobs_load_duration_seconds_count", "kvobs_load_tokens_total", "kvobs_load_bytes_total"),
    *("kvobs_recomputed_tokens_total", "kvobs_failed_sync_loads_total", "kvobs_saves_total"),
    *("kvobs_save_hold_seconds_count", "kvobs_rank_skew_seconds_count", "kvobs_stuck_transfers_total"),
    *("kvobs_stray_reports_total", "kvobs_in_flight", "scripted_things_total", "kvobs_call_duration_seconds_count"),
}
PER_REQUEST = {
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups"),
}


def _child(life: str, index: int) -> dict[str, Any]:
    return {
        "kv_connector": "SoakChild",
        "kv_connector_module_path": "tests.soak.children",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"life": life, "index": index},
    }


class Shape(NamedTuple):
    """How one life's engine is set up."""

    load_policy: str
    failure_policy: str
    lag: int  # 1: vLLM's async scheduling
    traced: bool

    def __str__(self) -> str:
        scheduling = "async" if self.lag else "sync"
        tracing = "traced" if self.traced else "untraced"
        return f"{self.load_policy}, {self.failure_policy}, {scheduling} scheduling, {tracing}"


SHAPES = (
    Shape("first", "recompute", 0, traced=False),
    Shape("longest", "recompute", 1, traced=True),
    Shape("longest", "fail", 0, traced=False),
    Shape("first", "recompute", 0, traced=True),
)


class MoodyExporter(SpanExporter):
    """A collector's stand-in that is up, down, or hangs; it counts what it takes, and keeps nothing."""

    def __init__(self) -> None:
        self.mood, self.taken = "up", 0
        self._wakes = Event()

    def turn(self, mood: str) -> None:
        self.mood = mood
        if mood == "hanging":
            self._wakes.clear()
        else:
            self._wakes.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.mood == "hanging":
            self._wakes.wait()
        if self.mood == "down":
            return SpanExportResult.FAILURE
        self.taken += len(spans)
        return SpanExportResult.SUCCESS


class Engine:
    """A rig with its ledger, and the API server's side of it; ``patch`` sets its clock and its collector."""

    def __init__(self, name: str, shape: Shape, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_700_000_000_000_000_000
        self.random = Random(seed)
        self.ledger = LEDGERS[name] = Ledger(RANKS, REPORTERS, BYTES_PER_TOKEN * RANKS)
        self.exporter = MoodyExporter()
        for module in ("scheduler", "completions", "worker", "outcomes"):
            patch.setattr(f"kvobs.routing.{module}.wall_ns", lambda: self.now_ns)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        patch.setattr("kvobs.export.span_export.make_exporter", lambda _endpoint: self.exporter)
        children = [_child(name, index) for index in range(len(NAMES))]
        kvobs: dict[str, Any] = {
            "names": list(NAMES),
            "load_policy": shape.load_policy,
            "stuck_after_s": STUCK_AFTER * STEP_NS / 1e9,
            "tracing": {"level": "requests" if shape.traced else "off"},
        }
        self.rig = Rig(
            "kvobs", ranks=RANKS, kvobs=kvobs, blocks=BLOCKS, policy=shape.failure_policy, connectors=children,
            lag=shape.lag,
        )  # fmt: skip
        self.front = Front(*children, **kvobs)
        self._hear_ends()
        self.seed, self.shape, self._name = seed, shape, name
        self.added = self.shipped_spans = 0
        self.silent: set[str] = set()  # requests that a child never reports
        self._aborts: defaultdict[int, list[str]] = defaultdict(list)  # by step
        self._steps = 0

    def _hear_ends(self) -> None:
        """Enter into the ledger every end that vLLM passes on to its front end."""
        scheduler, update = self.rig.scheduler, self.rig.scheduler.update_from_output

        def noted(*args: Any) -> Any:
            outputs = update(*args)
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.finish_reason is not None:
                        self.ledger.ended(output.request_id, str(output.finish_reason))
            return outputs

        scheduler.update_from_output = noted
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = AT_ONCE
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.ledger.faults["preemption"] += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    # Requests

    def pin(self) -> None:
        """Send the requests that a child never reports."""
        for child in range(len(NAMES) - 1):
            for plan in silent(RANKS):
                self.ledger.faults["never reported"] += 1
                self.silent.add(self._add(never(child, len(NAMES), plan)))

    def serve(self, requests: int) -> None:
        """Serve this many random requests, and let the engine go idle."""
        last, last_step = self.added + requests, self._steps + STALLED_AFTER + 10 * requests
        while self.added < last:
            self._assert_before(last_step)
            for _ in range(min(self.random.randint(0, 24), AT_ONCE - len(self.ledger.running), last - self.added)):
                self._add(draw(self.random, RANKS, REPORTERS))
            self.step()
        self.drain()

    def drain(self) -> None:
        """Step until only what is silent is left, and all numbers are sent."""
        last_step = self._steps + STALLED_AFTER
        while self.ledger.lives.keys() - self.silent:
            self._assert_before(last_step)
            self.step()
        for _ in range(IDLE_STEPS):
            self.step()

    def _assert_before(self, last_step: int) -> None:
        left = self.ledger.lives.keys() - self.silent
        assert self._steps < last_step, f"seed {self.seed}: {len(left)} requests never end, such as {sorted(left)[:3]}"

    def _add(self, orders: Orders) -> str:
        request_id = f"{self._name}-{self.added}"
        self.added += 1
        first = self.added if orders.is_alone else self.added % 7
        prompt = [first % 251, first // 251 % 251, *range(3, orders.prompt + 1)]
        params = {"kv_transfer_params": {"soak": orders.plans}}
        sampling = SamplingParams(max_tokens=orders.max_tokens, ignore_eos=True, extra_args=params)
        headers = SAMPLED if self.shape.traced and self.random.random() < 0.02 else NOT_SAMPLED
        request = Request(request_id, prompt, sampling, None, block_hasher=self.rig.hasher, trace_headers=headers)
        self.ledger.added(request_id, orders)
        self.rig.scheduler.add_request(request)
        if orders.abort_after is not None:
            self._aborts[self._steps + orders.abort_after].append(request_id)
        return request_id

    def turn_collector(self, mood: str) -> None:
        if mood != "up":
            self.ledger.faults[f"collector {mood}"] += 1
        self.exporter.turn(mood)

    def export_spans(self) -> None:
        """Let the collector come up and take what waits for it; every span must be accounted for then."""
        self.turn_collector("up")
        cutter = self.front.metrics._cutter
        if cutter is not None:
            cutter._processor.force_flush()
            assert self.shipped_spans == self.exporter.taken + self.lost_spans

    def _abort(self, request_id: str) -> None:
        states = {"WAITING_FOR_REMOTE_KVS": "loading", "RUNNING": "running", "gone": ""}
        status = self.rig.status(request_id)
        state = "saving" if status.startswith("FINISHED") else states.get(status, "waiting")
        if state:
            self.ledger.faults[f"abort while {state}"] += 1
        for request in self.rig.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            self.ledger.ended(request.request_id, "abort by the client")

    def step(self) -> None:
        for request_id in self._aborts.pop(self._steps, ()):
            self._abort(request_id)
        self._steps += 1
        self.now_ns += STEP_NS
        output = self.rig.step()
        self.ledger.told_vllm(output.finished_recving or (), output.finished_sending or ())
        self._deliver()

    def _deliver(self) -> None:
        """Hand the payloads to the API server's side, packed as vLLM packs them."""
        stats, self.rig.stats = self.rig.stats, []
        for payload in stats:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
            self.shipped_spans += sum(map(len, sent["kvobs"]["spans"]))
            self.front.metrics.observe(sent)

    # What is counted

    def counted(self) -> Counter[Series]:
        """Return what kvobs's metrics say of all that the ledger knows."""
        found: Counter[Series] = Counter()
        for family in self.front.registry.collect():
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "connector")}
                if sample.name in BY_LEDGER and labels.get("hook", "on_new_request") in PER_REQUEST and sample.value:
                    child = NAMES.index(sample.labels["connector"])
                    found[sample.name, child, tuple(labels.values())] = int(sample.value)
        return found

    def differences(self) -> list[str]:
        """Compare the metrics with the ledger, and the books with each other; the engine must be idle."""
        counted, expected = self.counted(), self.ledger.expected + self.ledger.in_flight()
        wrong = [
            f"{metric} of {NAMES[child]} {labels}: {counted[metric, child, labels]} instead of "
            f"{expected[metric, child, labels]}"
            for metric, child, labels in sorted(counted.keys() | expected.keys())
            if counted[metric, child, labels] != expected[metric, child, labels]
        ]
        samples = [sample for family in self.front.registry.collect() for sample in family.samples]
        faults = [s for s in samples if s.name == "kvobs_internal_errors_total"]
        return wrong + [f"{s.value:.0f} faults of kvobs's own: {s.labels['where']}" for s in faults if s.value]

    def close(self) -> None:
        """Let all that was silent talk; every block must be free then, and every span accounted for."""
        self.ledger.is_over = True
        self.silent.clear()
        self.drain()
        assert_nothing_is_left(self.rig)
        self._deliver()
        self.export_spans()
        cutter = self.front.metrics._cutter
        if cutter is not None:
            cutter.close()
        for connector in (self.rig.connector, *self.rig.workers):
            connector.shutdown()
        del LEDGERS[self._name]

    @property
    def lost_spans(self) -> int:
        places = ("rate", "queue", "export", "malformed")
        return int(sum(self.front.value("kvobs_spans_dropped_total", None, where=p) or 0 for p in places))
