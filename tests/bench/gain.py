"""Whether a load's announced gain is the real one: saved minus waited, beside two times to the first token.

Real engines, idle and busy, with a quick connector, a slow one and one that loads within the step. Each prompt is asked
twice: computed first, then loaded. How much earlier its first token came is the real gain. The table of all cases goes
to ``docs/performance.md``. Each engine is vLLM's own in a process with nothing else, so that what kvobs announces of a
load can be compared with the times of the same two requests.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from docs import pages
from kvobs.demo.host_offload import HostOffloadingSpec, HostWorker
from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.routing.scheduler import SchedulerSide
from kvobs.state.transfers import Gain, Load
from kvobs.telemetry.composed import Composed
from kvobs.telemetry.estimates.compute_cost import ComputeCost
from kvobs.telemetry.estimates.gains import Gains
from kvobs.telemetry.events import TelemetryObserver
from kvobs.testing.model import FIRST_BYTE, VOCAB, make_model
from kvobs.vllm_api.versions import chunks_of
from tests.bench.report import Budget, Line, Part

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, TransferResult

ROUNDS = 8
BUSY = {"idle": 0, "busy": 4}
ERROR = Budget(25)
SIGNS = Budget(95, at_least=True)
CONNECTORS = ("host memory", "slow memory", "files")
LENGTHS = (200, 400, 600, 900, 1200, 1500, 1900)
"""Tokens of the prompts."""
WARM_UP = 14
"""Rounds of prompts that are only computed, from which kvobs learns what that costs."""
WARM_UP_ANSWER = 2
"""Tokens of their answers: if it never decodes, an idle engine does not show how long its shortest step is, and nothing
is announced of a load that leaves less than any prompt had."""
REST_S = 0.12
"""After a prompt was computed: for its save."""
OTHERS_PROMPT, OTHERS_ANSWER = 100, 600
"""Tokens of a busy engine's other requests."""


class Pair(NamedTuple):
    """A prompt's two times to the first token, and what kvobs announced of its load; in ms."""

    tokens: int
    computed: float
    loaded: float
    saved: float
    waited: float


class Announced(TelemetryObserver):
    """What kvobs announced of the latest load."""

    latest: Gain | None = None

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        self.latest = gain


class Checked(ComputeCost):
    """Compares each step with prefills to what was expected of it."""

    observed_s = error_s = 0.0

    def observe(self, seconds: float, tokens: int, pairs: int, decodes: int, context: int) -> None:
        if tokens and self._prefill.is_ready:
            expected = self._decode.expect(decodes, context) + self._prefill.expect(tokens, pairs)
            self.observed_s += seconds
            self.error_s += abs(expected - seconds)
        super().observe(seconds, tokens, pairs, decodes, context)


class Engine:
    """A real engine with one connector behind kvobs.

    Args:
        connector: of ``CONNECTORS``.
        busy: number of other requests that it always serves.
        folder: for the model, and for the files of a connector.
    """

    def __init__(self, connector: str, busy: int, folder: Path) -> None:
        sub_connector = files(folder / "files") if connector == "files" else host_memory(2**30)
        if connector == "slow memory":
            spec = {"spec_name": "SlowMemorySpec", "spec_module_path": "tests.bench.gain"}
            sub_connector["kv_connector_extra_config"] |= spec
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(make_model(folder / "model")),
                dtype="float32",
                enforce_eager=True,
                max_model_len=2048,
                max_num_batched_tokens=2048,
                max_num_seqs=16,
                block_size=32,
                enable_prefix_caching=False,  # a prompt that is asked again would be found there
                skip_tokenizer_init=True,
                kv_transfer_config=multi_connector(sub_connector, names=["only"]),
            )
        )
        self.announced = Announced()
        core: Any = self.engine.engine_core
        side: SchedulerSide = core.engine_core.scheduler.connector._side
        observer: Any = side.observer
        gains = next(each for each in observer.observers if isinstance(each, Gains))
        gains._cost = self.cost = Checked(gains._cost._budget)
        gains._listener = Composed([gains._listener, self.announced])
        self._busy = busy
        self._others: set[str] = set()
        self._number = 0
        self._random = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_BYTE, VOCAB) for _ in range(tokens)]

    def first_token_ms(self, prompt: Sequence[int], answer: int = 1) -> float:
        """Ask, and return the time to the first token."""
        begin = time.perf_counter()
        request = self._add(prompt, answer)
        while request not in self._step():
            pass
        return (time.perf_counter() - begin) * 1e3

    def run_for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._step()

    def _add(self, prompt: Sequence[int], answer: int) -> str:
        self._number += 1
        request = f"r{self._number}"
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(request, {"prompt_token_ids": list(prompt)}, params)
        return request

    def _step(self) -> set[str]:
        """Run a step, and return the requests with output."""
        outputs = self.engine.step()
        self._others -= {output.request_id for output in outputs if output.finished}
        while len(self._others) < self._busy:
            self._others.add(self._add(self.prompt(OTHERS_PROMPT), OTHERS_ANSWER))
        return {output.request_id for output in outputs}


def pairs_of(engine: Engine, rounds: int) -> list[Pair]:
    """Ask each length's prompts twice, in an order of their own in each round."""
    order = random.Random(2)
    for _ in range(WARM_UP):
        for tokens in order.sample(LENGTHS, len(LENGTHS)):
            engine.first_token_ms(engine.prompt(tokens + order.randrange(-40, 40)), WARM_UP_ANSWER)
            engine.run_for(REST_S)
    pairs: list[Pair] = []
    for _ in range(rounds):
        for tokens in order.sample(LENGTHS, len(LENGTHS)):
            prompt = engine.prompt(tokens)
            computed = engine.first_token_ms(prompt)
            engine.run_for(REST_S)
            engine.announced.latest = None
            loaded = engine.first_token_ms(prompt)
            gain = engine.announced.latest
            if gain is None or gain.saved_ns is None:
                raise SystemExit(f"a prompt of {tokens} tokens was not loaded, or not estimated: {gain}")
            pairs.append(Pair(tokens, computed, loaded, gain.saved_ns / 1e6, gain.waited_ns / 1e6))
            engine.run_for(REST_S)
    return pairs


def serve() -> None:
    """Serve in a process with nothing else; write down the pairs, and the estimate's error in per cent of the steps."""
    connector, busy, rounds, results = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        engine = Engine(connector, int(busy), Path(folder))
        pairs, cost = pairs_of(engine, int(rounds)), engine.cost
    Path(results).write_text(json.dumps([pairs, 100 * cost.error_s / cost.observed_s]), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the engine's own end is not measured, and takes seconds


START_S, BLOCK_S = 0.02, 0.0005
"""Of a load: before the first block, and for each."""


class SlowMemorySpec(HostOffloadingSpec):
    """Offloading to host memory with a worker that takes its time."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        """Return this process's worker, made on the first call."""
        if self._worker is None:
            self._worker = SlowWorker(kv_caches, self.blocks_per_chunk, chunks_of(self))
        assert isinstance(self._worker, SlowWorker)
        return self._worker


class SlowWorker(HostWorker):
    """Copies at once, and reports a load only when its time is over; it blocks nobody meanwhile."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        super().__init__(kv_caches, blocks_per_chunk, chunks)
        self.under_way: list[tuple[float, TransferResult]] = []

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **urgency: bool) -> bool:
        """Copy host memory to engine blocks."""
        submitted = super().submit_load(job_id, src_spec, dst_spec, **urgency)
        due = time.perf_counter() + START_S + BLOCK_S * len(dst_spec.block_ids)
        self.under_way.append((due, self.finished.pop()))
        return submitted

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs finished since the last call."""
        now = time.perf_counter()
        self.finished += [result for due, result in self.under_way if due <= now]
        self.under_way = [(due, result) for due, result in self.under_way if due > now]
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs are finished."""
        for due, result in self.under_way:
            if result.job_id in job_ids:
                time.sleep(max(0.0, due - time.perf_counter()))


class Case(NamedTuple):
    """The pairs of one length, in one engine."""

    connector: str
    engine: str
    tokens: int
    pairs: Sequence[Pair]

    @property
    def real_ms(self) -> float:
        return statistics.median(pair.computed - pair.loaded for pair in self.pairs)

    @property
    def announced_ms(self) -> float:
        return statistics.median(pair.saved - pair.waited for pair in self.pairs)

    @property
    def error(self) -> float:
        """How far the announced gain is from the real one, in per cent of the real one."""
        return abs(self.announced_ms - self.real_ms) / max(abs(self.real_ms), 1e-3) * 100

    @property
    def has_right_sign(self) -> bool:
        return (self.announced_ms > 0) is (self.real_ms > 0)


def measure(rounds: int, say: Callable[[str], None]) -> Part:
    """Measure every connector in an idle and in a busy engine, each in a process of its own."""
    cases: list[Case] = []
    steps: list[Line] = []
    for connector in CONNECTORS:
        for engine, others in BUSY.items():
            say(f"  {connector}, {engine} engine")
            pairs, step_error = _run(connector, others, rounds)
            steps.append(Line(f"a step that prefills, {connector}, {engine} engine", "%", [step_error]))
            cases += [
                Case(connector, engine, tokens, [pair for pair in pairs if pair.tokens == tokens]) for tokens in LENGTHS
            ]
    pages.write(pages.FOLDER / "performance.md", "gain", _table(cases))
    errors = [
        Line(f"{connector}, {engine} engine", "%", found, budget=ERROR)
        for connector in CONNECTORS
        for engine in BUSY
        if (found := [case.error for case in cases if case[:2] == (connector, engine)])
    ]
    right = 100 * sum(case.has_right_sign for case in cases) / len(cases)
    share = Line(f"the right sign, of {len(cases)} cases", "%", [right], budget=SIGNS)
    return Part(
        f"A load's announced gain, prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens: the difference from the real one",
        [*errors, share, *steps],
    )


def _run(connector: str, busy: int, rounds: int) -> tuple[list[Pair], float]:
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        results = Path(folder) / "pairs.json"
        command = [sys.executable, "-m", __name__, connector, str(busy), str(rounds), str(results)]
        # The engine's core in the same process; enough KV cache for the busy engine's requests.
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
        ended = subprocess.run(command, check=False, env=os.environ | own, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        pairs, step_error = json.loads(results.read_text(encoding="utf-8"))
        return [Pair(*pair) for pair in pairs], step_error


def _table(cases: Sequence[Case]) -> str:
    head = ["connector", "engine", "tokens", "computed, ms", "loaded, ms", "real gain, ms", "announced gain, ms"]
    rows = [
        [
            *(case.connector, case.engine, f"{case.tokens:,}"),
            f"{statistics.median(pair.computed for pair in case.pairs):.1f}",
            f"{statistics.median(pair.loaded for pair in case.pairs):.1f}",
            f"{case.real_ms:.1f}",
            f"{case.announced_ms:.1f}",
        ]
        for case in cases
    ]
    return pages.table(head, rows)


if __name__ == "__main__":
    serve()
