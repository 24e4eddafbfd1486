"""Serve with each version, check that both connectors load and answers stay the same, and keep what came of it.

    python -m tests.versions [--all | VERSION ...]

Without any it is the oldest and the newest. Two run side by side, each on a core of its own. A run of all versions
writes ``results.json``, of which the table of versions in docs/runs.md is made.
"""

import json
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvobs.testing.server import CORES, cores
from tests.versions.engines import VERSIONS, engine

RESULTS = Path(__file__).parent / "results.json"
PATIENCE_S = 600
SIDE_BY_SIDE = 2


def serve(version: str, folder: Path, core: int) -> dict[str, Any]:
    """Serve with one version, its rank on this core; return what each connector did; RuntimeError: the log's end."""
    made = engine(version)
    found, log = folder / f"{version}.json", folder / f"{version}.log"
    with log.open("wb") as words:
        command = [str(made.python), "-m", "tests.versions.serve", str(found)]
        env = made.environment | {CORES: str(core)}
        done = subprocess.run(command, env=env, cwd=folder, stdout=words, stderr=words, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM {version} ended with {done.returncode}:\n{log.read_text()[-4000:]}")
    result: dict[str, Any] = json.loads(found.read_text())
    if not result["vllm"].startswith(version):
        raise RuntimeError(f"asked for vLLM {version}, got {result['vllm']}")
    for name, connector in result["connectors"].items():
        loads = connector["loads"]
        if not connector["hits"] or not loads["ok"] or loads["failed"] or loads["aborted"]:
            raise RuntimeError(f"vLLM {version}: the connector {name} should have served: {connector}")
    return {name: connector["loads"]["ok"] for name, connector in result["connectors"].items()}


def main(arguments: list[str]) -> int:
    """Serve with these versions, with all, or with the oldest and the newest; return how many failed."""
    versions = [*VERSIONS] if arguments == ["--all"] else arguments or [min(VERSIONS), max(VERSIONS)]
    if unknown := set(versions) - set(VERSIONS):
        raise SystemExit(f"no recipe for vLLM {', '.join(sorted(unknown))}; known: {', '.join(VERSIONS)}")
    results: dict[str, dict[str, int]] = {}
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in cores(SIDE_BY_SIDE):
        free.put(core)

    def run(version: str) -> None:
        core, begin = free.get(), time.monotonic()
        try:
            results[version] = serve(version, Path(folder), core)
            words = ", ".join(f"{name} loaded {loads} times" for name, loads in results[version].items())
        except (RuntimeError, subprocess.SubprocessError) as error:
            words = f"FAILED: {error}"
        free.put(core)
        print(f"vLLM {version:7} {time.monotonic() - begin:5.0f} s  {words}", flush=True)

    with tempfile.TemporaryDirectory(prefix="kvobs-versions-") as folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(run, versions))
    results = {version: results[version] for version in VERSIONS if version in results}
    if len(results) == len(VERSIONS):
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return len(versions) - len(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
