"""Serve a cell's scenarios with a real engine in this process, and write what came of it.

    python -m tests.gpu_path.serve CELL MODEL RESULT

CELL and RESULT are JSON. The engine, its worker and the connectors are in one process, so that it can be asked which
scheduler and runner it has, and what they hold when it is idle.
"""

import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.samples import Sample
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import RequestStatus

from kvobs.demo.run import multi_connector
from kvobs.schema.signals import VERIFIED_BLOCKS
from kvobs.testing.server import parse_metrics
from tests.connectors.engine import connectors_of
from tests.engine.serving import stock
from tests.gpu_path.cells import Cell, Found
from tests.gpu_path.environment import COUNTS, Counted, counted
from tests.gpu_path.scenarios import SCENARIOS, Asked
from tests.gpu_path.stores import STORES, Faults
from tests.support.rig import assert_nothing_is_left

BLOCKS = 32
"""Of the KV cache, one of them vLLM's: too few for the requests that are to be preempted."""
PATIENCE = 2_000
"""Steps of one round; one that needs more waits for ever."""
METRICS = ("kvobs_lookups_total", "kvobs_loads_total", "kvobs_admitted_tokens_total")
"""In the order of `Counted`."""
DRAFTS: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": 2}
"""V2's kernel for n-grams has a mask that Triton's interpreter refuses."""
LAST = Asked("last", [7], 24)
"""Shorter than a block: after its steps nothing is left to copy."""


class Engine:
    """A real engine, its worker in this process."""

    def __init__(self, cell: Cell, model: str) -> None:
        self.cell = cell
        self.plugs = [STORES[name](name) for name in cell.stores]
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="float32",
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_model_len=512,
                max_num_batched_tokens=2048,
                max_num_seqs=16,
                block_size=32,
                num_gpu_blocks_override=BLOCKS,
                enable_chunked_prefill=False,  # ExampleConnector takes a prompt for computed when its first chunk is
                async_scheduling=None if cell.is_async else False,
                scheduling_policy="priority" if cell.extra == "priority" else "fcfs",
                speculative_config=DRAFTS | {"model": model} if cell.extra == "speculation" else None,
                kv_transfer_config=self._connectors(),
            )
        )
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        for attribute, owner in (("on_scheduler", self.scheduler.connector), ("workers", self.worker)):
            sides = connectors_of(owner) if cell.router in ("stock", "kvobs") else [owner]
            for plug, side in zip(self.plugs, sides, strict=False):
                setattr(plug, attribute, {0: side} if attribute == "workers" else side)
        runner = self.core.model_executor.driver_worker.worker.model_runner
        self.found = Found([type(self.scheduler).__name__, type(runner).__module__])
        self._watch_preemptions()

    def _connectors(self) -> Any:
        if self.cell.router == "none":
            return None
        entries = [plug.config() for plug in self.plugs]
        config = multi_connector(*entries, names=self.cell.stores)
        if self.cell.extra == "isolate":
            config["kv_connector_extra_config"]["kvobs"]["best_effort"] = list(self.cell.stores)
        config["kv_connector_extra_config"]["kvobs"]["verify"] = {"sample_ratio": 1.0}
        config = {"alone": entries[0], "stock": stock(config), "kvobs": config}[self.cell.router]
        return {**config, "kv_load_failure_policy": "recompute"}

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def preempted(*args: Any, **kwargs: Any) -> None:
            statuses = {request.status for request in self.scheduler.requests.values()}
            self.found.preemptions += 1
            self.found.while_loading += RequestStatus.WAITING_FOR_REMOTE_KVS in statuses
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempted

    def serve(self, name: str) -> None:
        """Serve one scenario; without connectors nothing is aborted, so that every answer is whole."""
        scenario = SCENARIOS[name]
        for number in range(scenario.rounds):
            if number and self.plugs:
                Faults.store, Faults.is_raised = scenario.fails, scenario.is_raised
            self.forget()
            for _ in self.ask(scenario.round(name, number)):
                pass
        Faults.store = ""

    def forget(self) -> None:
        """Empty vLLM's own cache, once nothing holds its blocks."""
        for _ in range(PATIENCE):
            if self.engine.reset_prefix_cache():
                return
            self.step()
        raise RuntimeError("blocks are held for ever")

    def ask(self, asked: Sequence[Asked]) -> Iterator[None]:
        """Send requests and step until all have ended, or are aborted; yield after each step."""
        aborts = {one.name: one.abort_at for one in asked if one.abort_at is not None and self.plugs}
        tokens: defaultdict[str, list[int]] = defaultdict(list)
        for one in asked:
            kind = RequestOutputKind.DELTA if one.is_streamed else RequestOutputKind.CUMULATIVE
            params = SamplingParams(
                max_tokens=one.tokens, temperature=0, ignore_eos=True, detokenize=False, output_kind=kind
            )
            priority = one.priority if self.cell.extra == "priority" else 0
            self.engine.add_request(one.name, {"prompt_token_ids": list(one.prompt)}, params, priority=priority)
        streamed = {one.name for one in asked if one.is_streamed}
        for _ in range(PATIENCE):
            for output in self.step():
                new = list(output.outputs[0].token_ids)
                tokens[output.request_id] = tokens[output.request_id] + new if output.request_id in streamed else new
            due = [name for name, at in aborts.items() if len(tokens[name]) >= at]
            self.engine.abort_request(due)
            for name in due:
                del aborts[name]
            self.found.answers.update(tokens)
            if not self.engine.has_unfinished_requests():
                return
            yield
        raise RuntimeError(f"some of these wait for ever: {sorted(self.scheduler.requests)}")

    def step(self) -> list[Any]:
        for plug in self.plugs:
            plug.tick()
        return self.engine.step()

    def close(self) -> None:
        """Take kvobs's numbers, those of the independent count, and what is left."""
        for _ in self.ask([LAST]):
            pass
        self.forget()
        if self.plugs:
            self.found.counted = counted(Path(os.environ[COUNTS]))
            self.found.kvobs = self.numbers() if self.cell.router == "kvobs" else {}
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        lines = [line for plug in self.plugs for line in plug.leftovers()]
        self.found.drafted = sum(int(s.value) for s in samples("vllm:spec_decode_num_accepted_tokens_total"))
        self.found.left = [line for line in lines if LAST.name not in line]  # of which they learn in the next step
        self.found.left += [f"{BLOCKS - 1 - free} blocks"] if free != BLOCKS - 1 else []
        if self.cell.router == "kvobs":
            for sample in samples(VERIFIED_BLOCKS.name):
                outcome = sample.labels["outcome"]
                self.found.verified[outcome] = self.found.verified.get(outcome, 0) + int(sample.value)
            self.found.left += [f"{s.labels['kind']}: {s.value:.0f}" for s in samples("kvobs_in_flight") if s.value]
            assert_nothing_is_left(self.as_rig(free))

    def numbers(self) -> dict[str, Counted]:
        """Return what kvobs's metrics say of each connector, by its class."""
        totals = {
            store: [sum(s.value for s in samples(metric) if s.labels["connector"] == store) for metric in METRICS]
            for store in self.cell.stores
        }
        return {STORES[store].connector: Counted(*map(int, total)) for store, total in totals.items()}

    def as_rig(self, free: int) -> Any:
        """Return what looks like a rig to `assert_nothing_is_left`."""
        connector = self.scheduler.connector
        return SimpleNamespace(
            run=lambda _: None, scheduler=self.scheduler, free_blocks=free, connector=connector, workers=[self.worker]
        )


def samples(metric: str) -> list[Sample]:
    """Return the samples of a metric as Prometheus would read them."""
    return [s for s in parse_metrics(generate_latest().decode()) if s.name == metric]


def main(cell: str, model: str, result: str) -> None:
    """Serve a cell's scenarios; an exception that ends the engine is part of what is found."""
    engine = Engine(Cell.parse(cell), model)
    try:
        for name in engine.cell.scenarios:
            engine.serve(name)
        engine.close()
    except Exception as error:
        traceback.print_exc()
        engine.found.ended = f"{type(error).__name__}: {error}"
    engine.found.failed_loads = Faults.failed
    Path(result).write_text(json.dumps(asdict(engine.found)))
    sys.stdout.flush()
    os._exit(0)  # the end of an engine is tested elsewhere, and takes seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
