"""Ray on this machine, with two places for ranks: a cluster of one node, started for a test and ended with it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvobs.testing.server import claim_port, end_group, environment, kill_all
from kvobs.vllm_api.proc import stat
from tests.connectors.packages import importing
from tests.engine.hosts import AS_HOST
from tests.engine.serving import eventually, importing_tests, listens

NODE = "127.0.0.2"
"""Not 127.0.0.1, which Ray takes for the machine's outward address: vLLM then waits for a place there, for ever."""
OTHER_NODE = "127.0.0.3"
MARK = "KVOBS_TEST_CLUSTER"
"""In the environment of all processes of a cluster: its folder."""
ON_CPU = Path(__file__).parent / "ray_on_cpu"
RANKS = 2
OBJECTS = 80 * 1024 * 1024
ASKED_S = 20
EXECUTORS = {name: {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": str(n)} for n, name in enumerate(("ray", "ray-v2"))}
ON_RAY = ("--distributed-executor-backend", "ray")
STARTED = "Ray runtime started."


@dataclass(frozen=True)
class Cluster:
    folder: Path
    address: str
    env: Mapping[str, str]
    """For a server that is to run its ranks here, beside what the cluster's own processes have."""

    def processes(self) -> dict[int, str]:
        return _marked(self.folder)

    def workers(self) -> list[int]:
        return sorted(pid for pid, name in self.processes().items() if name.startswith("ray::") and "Worker" in name)


def rank_env(**more: str) -> dict[str, str]:
    """Return what processes of a cluster, and of a server that uses it, have in common."""
    folders = [str(ON_CPU), *importing("ray"), importing_tests()["PYTHONPATH"]]
    return {
        **environment(RANKS),
        "PYTHONPATH": os.pathsep.join(folders),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": NODE,
        **more,
    }


@contextmanager
def cluster(ranks: int = RANKS, /, **env: str) -> Iterator[Cluster]:
    """Run a cluster inside the ``with`` block whose processes have these variables; nothing of it is left after it."""
    folder = Path(tempfile.mkdtemp(prefix="kvobs-ray-"))  # short, because sockets in it have short names only
    port = claim_port(0)
    variables = rank_env(**env) | {MARK: str(folder)}
    command = [
        *_start(NODE, ranks), "--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(folder),
    ]  # fmt: skip
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, process_group=0)
    try:
        assert eventually(lambda: _is_up(process, folder, port), 180), "Ray is not up"
        yield Cluster(folder, f"{NODE}:{port}", {**variables, "RAY_ADDRESS": f"{NODE}:{port}"})
    except BaseException:
        print(f"{time.strftime('%H:%M:%S')}, Ray:", (folder / "start.log").read_text(), _marked(folder), sep="\n")
        raise
    finally:
        end_group(process, grace=ASKED_S)
        _kill_the_rest(folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined(ranks: Cluster, **env: str) -> Iterator[None]:
    """Add another host with a place for one rank; its processes have these variables, too."""
    variables = {**ranks.env, "VLLM_HOST_IP": OTHER_NODE, **env}
    with (ranks.folder / "joined.log").open("wb") as log:
        command = [*AS_HOST, *_start(OTHER_NODE, 1), "--address", ranks.address]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, process_group=0)
    try:
        assert eventually(lambda: STARTED in (ranks.folder / "joined.log").read_text(), 180)
        yield
    finally:
        end_group(process, grace=ASKED_S)


def _start(node: str, ranks: int) -> list[str]:
    """Return the command that starts the processes of a node."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", node, "--num-cpus", "4",
        "--resources", f'{{"NPU": {ranks}}}', "--disable-usage-stats", "--object-store-memory", str(OBJECTS),
        "--min-worker-port", "0", "--max-worker-port", "0",  # any free ones: Ray's own range has the claimed port in it
    ]  # fmt: skip


def _is_up(process: subprocess.Popen[bytes], folder: Path, port: int) -> bool:
    assert process.poll() is None, "Ray ended by itself"
    return STARTED in (folder / "start.log").read_text() and listens(port, NODE)


def _marked(folder: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if f"{MARK}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                name, (state, *_) = stat(int(entry.name))
                title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
                if state not in "ZX":
                    found[int(entry.name)] = title if title.startswith("ray::") else name
    return found


def _kill_the_rest(folder: Path) -> None:
    """Kill what Ray left of the cluster, some of it in sessions of its own."""
    kill_all(lambda: _marked(folder), limit_s=10, pause_s=0.1)
