"""The environment in which vLLM's CPU build takes its default path on GPUs; see ``host/sitecustomize.py``."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.connectors.packages import importing

HOST = Path(__file__).parent / "host"
ROOT = Path(__file__).parents[2]
COUNTS = "GPU_PATH_COUNTS"
V2_RUNNER = "vllm.v1.worker.cpu.model_runner"
"""Module of the V2 runner's class on CPUs: without Triton vLLM takes the V1 runner, in silence."""


def gpu_path(
    *, is_async: bool = True, is_v2: bool = True, stages: int = 1, counts: Path | None = None
) -> dict[str, str]:
    """Return the variables of a process that runs an engine, and which that engine's processes inherit.

    Args:
        is_async: Leave async scheduling as vLLM decides it: on, unless an argument switches it off.
        is_v2: Have the V2 model runner, on Triton's interpreter, which is fetched where it is missing.
        stages: The pipeline parallel size.
        counts: A file for what connectors are asked, counted without kvobs; `counted` reads it.
    """
    folders = [str(HOST), *(importing("triton") if is_v2 else ()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    switches = {"GPU_PATH_ASYNC": is_async, "GPU_PATH_STAGES": stages > 1 and not is_v2, "TRITON_INTERPRET": is_v2}
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONHASHSEED": "0",  # all processes give a block the same hash
        **{name: "1" for name, is_on in switches.items() if is_on},
        **({COUNTS: str(counts)} if counts else {}),
    }


class Counted(NamedTuple):
    """What a connector was asked, as its class's own methods saw it."""

    lookups: int
    """Requests for which it answered with a hit, and those with a miss, and those with 'not yet'; however often."""
    loads: int
    """Allocations with tokens."""
    tokens: int
    """Of these allocations."""


def counted(path: Path) -> dict[str, Counted]:
    """Return what a file of `gpu_path` says of each connector, by its class."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    answers = {(n["connector"], n["request"], n["tokens"] and n["tokens"] > 0) for n in lines if n["call"] == "lookup"}
    lookups = Counter(name for name, *_ in answers)
    loads = [(n["connector"], n["tokens"]) for n in lines if n["call"] == "allocation" and n["tokens"]]
    tokens = {name: [each for loader, each in loads if loader == name] for name in lookups}
    return {name: Counted(asked, len(tokens[name]), sum(tokens[name])) for name, asked in lookups.items()}
