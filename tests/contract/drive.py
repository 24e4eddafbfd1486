"""Let kvobs's MultiConnector live in a rig, in both roles, and call the hooks that such a life does not call.

Import this module after anything that changes vLLM's base classes.
"""

import inspect
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvobs.export import span_export
from kvobs.schema.signals import VLLM_LABELS
from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector, entry_of
from tests.support.example import TESTS, imported
from tests.support.scripted import Handshake, Stats, Tally

from .members import hooks, parameters, public_members

SPAN = "cd" * 8  # of the requests' client
HEADERS = {"traceparent": f"00-{'ab' * 16}-{SPAN}-01"}
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"  # so that requests are traced
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "10"  # ms
SPANS = ["kv.load Loader", "kv.lookup", "kv.save Saver"]  # of the request
METRICS: Any = ({each: each for each in (Counter, Gauge, Histogram)}, [*VLLM_LABELS], {0: ["tiny", "0"]})
TOKENS = 64  # that are loaded


def _noting(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorded.append((name, (*args, *kwargs.values())))
        return getattr(ScriptedConnector, name)(self, *args, **kwargs)

    return hook


_HOOKS: Any = {name: _noting(name) for name, member in public_members().items() if inspect.isfunction(member)}


class Recording(ScriptedConnector):
    """Notes each call of a hook and its arguments in ``recorded``, whatever hooks the vLLM at hand has."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.recorded: list[tuple[str, tuple[Any, ...]]] = []
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    vars().update(_HOOKS)


class Engine(Rig):
    """A rig with recording connectors; each call of a hook is kept, with what came back and which connectors got it."""

    def __init__(self, *scripts: Script, **more: Any) -> None:
        place = {"kv_connector": "Recording", "kv_connector_module_path": __name__}
        connectors = [entry_of(script, **place) for script in scripts]
        super().__init__("kvobs", connectors=connectors, kvobs={"names": [script.tag for script in scripts]}, **more)
        self.calls: list[dict[str, Any]] = []
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}  # of a hook's last call, by connector
        for connector in (self.connector, *self.workers):
            for name, hook in hooks().items():
                if hook["kind"] == "method" and hasattr(connector, name):
                    setattr(connector, name, partial(self._call, name, getattr(connector, name), connector))

    def _call(self, name: str, plain: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        connectors = connector._connectors
        for sub_connector in connectors:
            sub_connector.recorded.clear()
        answer = plain(*args, **kwargs)
        if inspect.isgenerator(answer):
            answer = list(answer)
        recorded = [[hook for hook, _ in sub_connector.recorded] for sub_connector in connectors]
        self.calls.append({"hook": name, "answer": _plain(answer), "recorded": recorded})
        self.arguments[name] = [
            given for sub_connector in connectors for hook, given in sub_connector.recorded if hook == name
        ]
        return answer


def drive() -> dict[str, Any]:
    """Take a request through a load, a save and its end; return the calls and what the scheduler has read."""
    loader, saver = (Script(name, handshake=Handshake(name)) for name in ("Loader", "Saver"))
    loader.offers["r1"] = TOKENS, True
    saver.promises.add("r1")
    saver.params["r1"] = {"saver": "was here"}
    loader.stats = [Stats(data={"n": n}) for n in (2, 3)]
    rig = Engine(loader, saver)
    worker, server, seen = rig.workers[0], ApiServer(rig), dict[str, Any]()
    seen["signatures"] = {"scheduler": _signatures(rig.connector), "worker": _signatures(worker)}

    def call(connector: Any, hook: str, *args: Any) -> Any:
        return getattr(connector, hook)(*args) if hasattr(connector, hook) else None

    # Start.
    layer = torch.zeros(32, 2, BLOCK, 64)
    call(worker, "get_mem_pool_context")
    call(worker, "register_kv_caches", {"layer.0": layer})
    call(worker, "register_cross_layers_kv_cache", layer, None)
    call(worker, "set_host_xfer_buffer_ops", print)
    call(worker, "reset_capture_state")
    handshake = call(worker, "get_handshake_metadata")
    for hook, key in (("set_xfer_handshake_metadata", 0), ("set_xfer_handshake_metadata_pp_aware", (0, 0))):
        call(rig.connector, hook, {key: handshake})
        seen[hook] = [[part.tag for part in given.values()] for (given,) in rig.arguments[hook]]
    call(rig.connector, "get_finished_count")
    call(rig.connector, "bind_kv_cache_manager", SimpleNamespace(block_pool=SimpleNamespace()))
    call(rig.connector, "bind_gpu_block_pool", SimpleNamespace())

    # A request that is offered tokens and gets blocks for them; its end, with what a connector promises.
    received, sent = list[str](), list[str]()

    def step(loaded: str = "", saved: str = "") -> None:
        for script, tally in ((loader, 1), (saver, 2)):
            script.worker_meta[0] = Tally(tally)
        loader.say(0, received=loaded)
        saver.say(0, saved=saved)
        output = rig.step()
        received.extend(output.finished_recving or ())
        sent.extend(output.finished_sending or ())

    request = rig.add("r1", 100, 1, HEADERS)
    step()
    seen["allocated"] = [given[2] for given in rig.arguments["update_state_after_alloc"]]
    call(rig.connector, "get_loaded_kv_cache_group_ids", request)
    call(rig.connector, "get_external_cache_hit_sources", request, TOKENS)
    call(worker, "finish_forward")
    call(worker, "get_finished", set())  # still public, no longer called by vLLM
    step(loaded="r1")
    call(rig.connector, "register_finished_partial_tail", request, ([1, 2],), [])
    step()
    seen["finished"] = next(c["answer"] for c in rig.calls if c["hook"] == "request_finished_all_groups")
    step(saved="r1")
    step()
    seen["received"], seen["sent"] = received, sent
    seen["still bound"] = worker.has_connector_metadata()

    # What is asked now and then.
    server.scrape()
    call(rig.connector, "request_finished", request, [3])
    for hook in ("has_pending_block_frees", "has_pending_push_work", "reset_cache", "shutdown"):
        call(rig.connector, hook)
    for hook in ("unregister_kv_caches", "restore_kv_caches", "shutdown"):
        call(worker, hook)
    seen |= {"noted": server.report(), "aggregator": type(rig.aggregator).__module__, "class": on_the_class(rig)}
    return {"calls": rig.calls, "seen": seen}


class Examples(Rig):
    """Two of vLLM's example connectors; there is no forward."""

    def __init__(self, scratch: Path) -> None:
        extras = [{"shared_storage_path": str(scratch / f"store{i}")} for i in (0, 1)]
        entry = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        connectors = [entry | {"kv_connector_extra_config": extra} for extra in extras]
        super().__init__("kvobs", connectors=connectors, hybrid=False)

    def _forward(self, worker: Any, scheduled: Any) -> None:
        worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        worker.wait_for_save()


def drive_examples(scratch: Path) -> dict[str, Any]:
    """Return their answers about one request, and in a step."""
    rig = Examples(scratch)
    rig.step()
    request, connector = rig.add("r"), rig.connector
    return {
        "get_num_new_matched_tokens": connector.get_num_new_matched_tokens(request, 0),
        "request_finished_all_groups": connector.request_finished_all_groups(request, ([1, 2],)),
        "build_connector_meta": type(rig.scheduled.kv_connector_metadata).__name__,
        "reset_cache": connector.reset_cache(),
    }


def run_example(scratch: Path) -> dict[str, Any]:
    """Return which tests of the example passed, and the states of the load's request."""
    with imported(scratch) as example:
        for name in TESTS:
            getattr(example, name)()
    return {"passed": TESTS, "statuses": statuses()}


def statuses() -> list[str]:
    """Return the states of a request whose load ends on one rank, then on the other, and is then saved by both."""
    script = Script("a", offers={"r": (32, True)}, promises={"r"})
    rig = Rig("kvobs", script, ranks=2)
    rig.add("r")
    rig.step()
    seen = [rig.status("r")]
    for rank in (0, 1):
        script.say(rank, received="r")
        rig.run(1 + 4 * rank)
        seen.append(rig.status("r"))
    for rank in (0, 1):
        script.say(rank, saved="r")
    rig.run(2)
    assert rig.held_blocks == 0
    return [*seen, rig.status("r")]


class ApiServer:
    """Shows the metrics of an engine, from its pages, and takes the connectors' own stats as this vLLM sends them."""

    def __init__(self, rig: Engine) -> None:
        self._rig, self._class, self._exported = rig, type(rig.connector), InMemorySpanExporter()
        span_export.make_exporter = lambda endpoint: self._exported
        self._metrics = self._class.build_prom_metrics(rig.scheduler.vllm_config, *METRICS)

    def scrape(self) -> list[Any]:
        return [sample for family in REGISTRY.collect() for sample in family.samples]

    def report(self) -> dict[str, Any]:
        """Return what its metrics and its log show now that the engine has ended."""
        logged: Any = None
        for sent in self._rig.stats:
            packed = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=sent))
            arrived = MsgpackDecoder(SchedulerStats).decode(packed).kv_connector_stats
            self._metrics.observe(arrived, 0)
            rebuilt = self._class.build_kv_connector_stats(arrived)
            logged = rebuilt if logged is None else logged.aggregate(rebuilt)
        samples, deadline = self.scrape(), time.monotonic() + 60
        while (spans := self._spans()) != SPANS and time.monotonic() < deadline:
            time.sleep(0.05)
        calls = [s for s in samples if s.name == "kvobs_call_duration_seconds_count"]
        return {
            "hits": {s.labels["connector"]: s.value for s in samples if s.name == "kvobs_lookups_total"},
            "loaded": {s.labels["connector"]: s.value for s in samples if s.name == "kvobs_load_tokens_total"},
            "calls": {s.labels["connector"]: s.value for s in calls if s.labels["hook"] == "build_connector_meta"},
            "steps": sum(call["hook"] == "build_connector_meta" for call in self._rig.calls),
            "spans": spans,
            "log": logged.reduce() if logged is not None else None,
        }

    def _spans(self) -> list[str]:
        """Return the names of the exported spans of the client's request."""
        spans = self._exported.get_finished_spans()
        return sorted(span.name for span in spans if span.parent and span.parent.span_id == int(SPAN, 16))


def on_the_class(rig: Rig) -> dict[str, Any]:
    """Return the answers of the hooks that vLLM asks of the class, without an instance."""
    cls, config = type(rig.connector), rig.scheduler.vllm_config
    transfer = config.kv_transfer_config
    questions: dict[str, tuple[Any, ...]] = {
        "requires_piecewise_for_cudagraph": (transfer.kv_connector_extra_config,),
        "supports_sleep_mode": (transfer,),
        "get_required_kvcache_layout": (config,),
        "build_kv_connector_stats": (None,),
        "build_prom_metrics": (config, *METRICS),
    }
    known = hooks()
    return {hook: _plain(getattr(cls, hook)(*arguments)) for hook, arguments in questions.items() if hook in known}


def _signatures(connector: Any) -> dict[str, Any]:
    """Return the parameters that the connector's own hooks take, as seen from outside: on the object, not the class."""
    return {name: parameters(getattr(connector, name)) for name, hook in hooks().items() if hook["kind"] != "property"}


def _plain(value: Any) -> Any:
    """Return what JSON can hold as it is, and the name of its type for the rest."""
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
