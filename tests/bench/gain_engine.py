"""One real engine that is asked each prompt twice, computed and then loaded: ``python -m``, see ``gain``.

The engine is vLLM's own, in this process, so that what kvobs announces of a load can be put beside the times of the
same two requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from kvobs.demo.model import FIRST_BYTE, VOCAB, make_model
from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.routing.scheduler import SchedulerSide
from kvobs.state.transfer_listener import TransferListener, TransferListeners
from kvobs.state.transfers import Gain, Load

CONNECTORS = ("host memory", "slow memory", "files")
LENGTHS = (200, 400, 600, 900, 1200, 1500, 1900)
"""Tokens of the prompts."""
WARM_UP = 14
"""Rounds of prompts that are only computed, from which kvobs learns what that costs."""
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


class Announced(TransferListener):
    """What kvobs announced of the latest load."""

    latest: Gain | None = None

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        self.latest = gain


class Engine:
    """A real engine with one connector behind kvobs.

    Args:
        connector: of ``CONNECTORS``.
        busy: number of other requests that it always serves.
        folder: for the model, and for the files of a connector.
    """

    def __init__(self, connector: str, busy: int, folder: Path) -> None:
        child = files(folder / "files") if connector == "files" else host_memory(2**30)
        if connector == "slow memory":
            spec = {"spec_name": "SlowMemorySpec", "spec_module_path": "tests.bench.slow_memory"}
            child["kv_connector_extra_config"] |= spec
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
                kv_transfer_config=multi_connector(child, names=["only"]),
            )
        )
        self.announced = Announced()
        core: Any = self.engine.engine_core
        side: SchedulerSide = core.engine_core.scheduler.connector._side
        side.gains._listener = TransferListeners([side.gains._listener, self.announced])
        self._busy = busy
        self._others: set[str] = set()
        self._number = 0
        self._random = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_BYTE, VOCAB) for _ in range(tokens)]

    def first_token_ms(self, prompt: Sequence[int]) -> float:
        """Ask, and return the time to the first token."""
        begin = time.perf_counter()
        request = self._add(prompt, 1)
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


def measure(engine: Engine, rounds: int) -> list[Pair]:
    """Ask each length's prompts twice, in an order of their own in each round."""
    order = random.Random(2)
    for _ in range(WARM_UP):
        for tokens in order.sample(LENGTHS, len(LENGTHS)):
            engine.first_token_ms(engine.prompt(tokens + order.randrange(-40, 40)))
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


def main() -> None:
    connector, busy, rounds, results = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        pairs = measure(Engine(connector, int(busy), Path(folder)), int(rounds))
    Path(results).write_text(json.dumps(pairs), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the engine's own end is not measured, and takes seconds


if __name__ == "__main__":
    main()
