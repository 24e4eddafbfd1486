"""The cells: a path through vLLM, connectors and who routes between them, what is served, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.testing.server import CORES, environment
from tests.gpu_path.environment import V2_RUNNER, Counted, gpu_path
from tests.gpu_path.scenarios import SCENARIOS
from tests.support.published import write_row

PUBLISH = "KVOBS_GPU_PATH"
"""An environment variable: with it, all cells are run, and they replace the results."""
RESULTS = Path(__file__).parent / "results.json"
"""What the last published run saw; docs/runs.md shows it."""
PATIENCE_S = 500
GOOD = ("reuse", "streams", "preemptions")
SERVED = (*GOOD, "async failures")


@dataclass(frozen=True)
class Cell:
    """One engine.

    Attributes:
        is_v2: The V2 model runner, else V1.
        is_async: Async scheduling.
        router: `none`, no connector; `alone`, one without a router; `stock`, vLLM's MultiConnector; or `kvobs`.
        stores: The connectors, in their order: keys of `stores.STORES`.
        scenarios: What is served, in this order: keys of `SCENARIOS`.
        extra: `priority`, vLLM's policy; `isolate`, kvobs isolates all; `speculation`, the model drafts for itself.
    """

    is_v2: bool = True
    is_async: bool = True
    router: str = "none"
    stores: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = SERVED
    extra: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.path, self.connectors, self.extra)))

    @property
    def title(self) -> str:
        """Return its name among the results."""
        return f"{self}: {', '.join(self.scenarios)}"

    @property
    def path(self) -> str:
        return f"V{1 + self.is_v2} {'async' if self.is_async else 'sync'}"

    @property
    def connectors(self) -> str:
        return f"{self.router}: {' '.join(self.stores)}" if self.stores else "none"

    @property
    def chosen(self) -> tuple[str, str]:
        """Return the class of the scheduler and the module of the runner of this path."""
        runner = V2_RUNNER if self.is_v2 else "vllm.v1.worker.cpu_model_runner"
        return "AsyncScheduler" if self.is_async else "Scheduler", runner

    @classmethod
    def parse(cls, text: str) -> Cell:
        found: dict[str, Any] = json.loads(text)
        return cls(**found | {name: tuple(found[name]) for name in ("stores", "scenarios")})

    def run(self, model: Path, folder: Path) -> Found:
        """Serve the scenarios in a process with the variables of this path.

        Raises:
            RuntimeError: The process failed, or vLLM chose another path: it falls back to others in silence.
        """
        counts, result, log = (folder / name for name in ("counts", "result.json", "engine.log"))
        one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", CORES: "nobind", "OMP_NUM_THREADS": "1"}
        env = environment() | gpu_path(is_async=self.is_async, is_v2=self.is_v2, counts=counts) | one_process
        command = [sys.executable, "-m", "tests.gpu_path.serve", json.dumps(asdict(self)), str(model), str(result)]
        with log.open("wb") as words:
            code = subprocess.run(
                command, env=env, cwd=folder, stdout=words, stderr=words, timeout=PATIENCE_S, check=False
            ).returncode
        if code:
            raise RuntimeError(f"{self} ended with {code}:\n{log.read_text()[-4000:]}")
        found = Found(**json.loads(result.read_text()))
        if tuple(found.chosen) != self.chosen:
            raise RuntimeError(f"{self} is not what vLLM chose: {found.chosen}")
        return found


class Cells(NamedTuple):
    """All cells of a test, and those of them that CI runs."""

    every: Sequence[Cell]
    quick: Sequence[Cell]

    @property
    def chosen(self) -> Sequence[Cell]:
        return self.every if os.environ.get(PUBLISH) else self.quick


PATHS = ((True, True), (True, False), (False, True), (False, False))
"""V2 and async, which vLLM takes on GPUs, and the others."""
ROUTED = (
    Cell(scenarios=GOOD),
    Cell(router="alone", stores=("host",)),
    Cell(router="alone", stores=("disk",), scenarios=GOOD),
    Cell(router="stock", stores=("host", "disk")),
    Cell(router="kvobs", stores=("host", "disk")),
    Cell(router="kvobs", stores=("disk", "host"), scenarios=GOOD),
)


def _serving() -> Cells:
    every = [replace(cell, is_v2=is_v2, is_async=is_async) for is_v2, is_async in PATHS for cell in ROUTED]
    for i, cell in enumerate(every):
        if not cell.is_v2 and cell.stores[:1] == ("disk",):
            # ExampleConnector looks for the prompt and answer of a request that V1 resumes: its files have prompts.
            every[i] = replace(cell, scenarios=("reuse", "streams"))
    both = Cell(router="kvobs", stores=("host", "disk"))
    more = [replace(both, scenarios=GOOD[2:], extra="priority"), replace(both, scenarios=GOOD, extra="speculation")]
    default = [*every[: len(ROUTED)], *more]
    quick = [cell for cell in every[len(ROUTED) :] if (cell.router, cell.scenarios) == ("kvobs", SERVED)]
    return Cells([*default, *every[len(ROUTED) :]], [*default, *quick])


def _failing() -> Cells:
    every = [
        Cell(*path, router=router, stores=("disk",), scenarios=("sync failures",))
        for path in PATHS[:3]
        for router in ("alone", "stock", "kvobs")
    ]
    return Cells(every, [cell for cell in every if cell.is_async and cell.router != "stock"])


SERVING, FAILING = _serving(), _failing()
RECOMPUTED = Cell(*PATHS[3], router="kvobs", stores=("disk",), scenarios=("sync failures",))
ISOLATED = Cell(*PATHS[1], router="kvobs", stores=("disk",), scenarios=("raised",), extra="isolate")
EVERY = (*SERVING.every, *FAILING.every, RECOMPUTED, ISOLATED)


@dataclass
class Found:
    """What came of a cell; ``ended`` is the exception that ended its engine."""

    chosen: list[str]
    answers: dict[str, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    while_loading: int = 0
    """Of these preemptions, those with a load under way."""
    failed_loads: int = 0
    drafted: int = 0
    """Tokens that were accepted from the drafting model."""
    counted: dict[str, Counted] = field(default_factory=dict)
    kvobs: dict[str, Counted] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    """Loaded blocks by outcome: kvobs verifies all."""
    left: list[str] = field(default_factory=list)
    ended: str = ""

    def wrong(self, base: Found, scenario: str) -> list[str]:
        """Return the requests of a scenario without the base's answer, or without its beginning where aborted."""
        aborted = SCENARIOS[scenario].aborted(scenario)
        expected = {name: answer for name, answer in base.answers.items() if name.startswith(f"{scenario}-")}
        got = {name: self.answers.get(name, []) for name in expected}
        return [
            name
            for name, answer in expected.items()
            if got[name] != (answer[: len(got[name])] if name in aborted else answer)
        ]


def publish(cell: Cell, found: Found, base: Found) -> None:
    """Write what a run saw of a cell, if it is to be published."""
    if not os.environ.get(PUBLISH):
        return
    right = {}
    for scenario in cell.scenarios:
        asked = sum(name.startswith(f"{scenario}-") for name in base.answers)
        right[scenario] = [asked - len(found.wrong(base, scenario)), asked]
    row = {
        "path": cell.path,
        "connectors": cell.connectors + (f", {cell.extra}" if cell.extra else ""),
        "right": right,
        "counts": [sum(counted[i] for counted in found.kvobs.values()) for i in range(3)] if found.kvobs else [],
        "equal": found.kvobs == found.counted,
        "left": len(found.left),
        "ended": found.ended.partition(":")[0],
    }
    write_row(RESULTS, cell.title, row, [each.title for each in EVERY])
