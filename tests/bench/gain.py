"""Whether a load's announced gain is the real one: saved minus waited, beside two times to the first token.

Real engines, idle and busy, with a quick connector, a slow one and one that loads within the step. Each prompt is asked
twice: computed first, then loaded. How much earlier its first token came is the real gain. The table of all cases goes
to ``docs/gain.md``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from docs import pages
from tests.bench.gain_engine import CONNECTORS, LENGTHS, Pair
from tests.bench.report import Budget, Line, Part

ROUNDS = 8
BUSY = {"idle": 0, "busy": 4}
ERROR = Budget(25)
SIGNS = Budget(95, at_least=True)


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
    for connector in CONNECTORS:
        for engine, others in BUSY.items():
            say(f"  {connector}, {engine} engine")
            pairs = _run(connector, others, rounds)
            cases += [
                Case(connector, engine, tokens, [pair for pair in pairs if pair.tokens == tokens]) for tokens in LENGTHS
            ]
    pages.write(pages.FOLDER / "gain.md", "run", "gain", _table(cases))
    errors = [
        Line(f"{connector}, {engine} engine", "%", statistics.median(found), tuple(found), budget=ERROR)
        for connector in CONNECTORS
        for engine in BUSY
        if (found := [case.error for case in cases if case[:2] == (connector, engine)])
    ]
    right = 100 * sum(case.has_right_sign for case in cases) / len(cases)
    share = Line(f"the right sign, of {len(cases)} cases", "%", right, (right,), budget=SIGNS)
    return Part(
        f"A load's announced gain, prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens: the difference from the real one",
        [*errors, share],
    )


def _run(connector: str, busy: int, rounds: int) -> list[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        results = Path(folder) / "pairs.json"
        command = [sys.executable, "-m", "tests.bench.gain_engine", connector, str(busy), str(rounds), str(results)]
        # The engine's core in the same process; enough KV cache for the busy engine's requests.
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
        ended = subprocess.run(command, check=False, env=os.environ | own, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        return [Pair(*pair) for pair in json.loads(results.read_text(encoding="utf-8"))]


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
