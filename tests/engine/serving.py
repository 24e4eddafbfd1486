"""What the tests on real servers share: servers that can import the tests' connectors, prompts, and readings."""

import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvobs.demo.run import entry, on_one_core
from kvobs.testing.model import NAME
from kvobs.testing.server import HOST, Server, cores, group_members
from kvobs.vllm_api.proc import stat
from tests.connectors.packages import importing
from tests.engine.forked_server import ForkedServer
from tests.support.affinity import keeping_off

ROOT = Path(__file__).parents[2]
TOKENS = 8
LINES = 40

THE_CORE = cores(1)[0]
BOTH_RANKS_ON_ONE_CORE = on_one_core(2)
"""While a transfer is pending vLLM's workers spin: on all of two cores, the server and the test may get no CPU for
seconds (Linux 6.18), and what is to happen during the transfer happens after it. `serve` leaves that core to them."""

ServedEngine = Callable[..., AbstractContextManager[Server]]
"""The fixture `served_engine`: `serve` with the tests' model, and a folder for each engine if none is given."""
START_S = 500
"""For a server to come up; more than any needs, with ranks that Ray starts on a machine that others share."""


def importing_tests(*packages: str) -> dict[str, str]:
    """Return what lets a process import the tests' connectors, and these sets of packages."""
    folders = (str(ROOT), os.environ.get("PYTHONPATH", ""), *(importing(*packages) if packages else ()))
    return {"PYTHONPATH": os.pathsep.join(folders)}


@contextmanager
def serve(
    model: Path,
    folder: Path,
    config: dict[str, Any] | None,
    *args: str,
    ranks: int = 1,
    packages: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    is_spawned: bool = False,
    **more: Any,
) -> Iterator[Server]:
    """Run a server that can import the tests' connectors; a test that fails prints what the server said last.

    Tests get it from the fixture `served_engine`; other programs call it.

    Args:
        model: Folder of the model.
        folder: Where its log is, `server.log`.
        config: Of its connectors; none without one.
        args: More arguments of `vllm serve`.
        ranks: Shares of each layer, which have one core, if no variable says otherwise.
        packages: Sets of packages that it imports from; see `tests.connectors.packages`.
        env: More variables.
        is_spawned: Start it anew, instead of forked: where a test is about processes that start or end, about what they
            import, or about its command line.
        more: Further fields of `Server`.
    """
    env = importing_tests(*packages) | (BOTH_RANKS_ON_ONE_CORE if ranks > 1 else {}) | dict(env or {})
    shares = BOTH_RANKS_ON_ONE_CORE.items() <= env.items()
    kind = Server if is_spawned else ForkedServer
    more = {"tensor_parallel": ranks, "timeout": START_S, **more}
    with kind(model, folder / "server.log", config, args=args, env=env, **more) as server:
        try:
            with keeping_off(THE_CORE) if shares else nullcontext():
                yield server
        except BaseException:
            print(f"{time.strftime('%H:%M:%S')}, the server:", server.tail(LINES), *states(server), sep="\n")
            raise


def states(server: Server) -> list[str]:
    """Return what each of a server's processes does: its state and the CPU time it has had."""
    assert server.process is not None
    found = []
    for pid in group_members(server.process.pid):
        with suppress(OSError):
            name, (state, *rest) = stat(pid)
            found.append(f"{name}: {state}, {(int(rest[10]) + int(rest[11])) / os.sysconf('SC_CLK_TCK'):.1f} s of CPU")
    return found


def stock(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration for vLLM's own MultiConnector."""
    extra = {key: value for key, value in config["kv_connector_extra_config"].items() if key != "kvobs"}
    rest = {key: value for key, value in config.items() if key != "kv_connector_module_path"}
    return rest | {"kv_connector_extra_config": extra}


def of_tests(cls: str, module: str = "connectors", **extra: Any) -> dict[str, Any]:
    return {**entry(cls, **extra), "kv_connector_module_path": f"tests.engine.{module}"}


def total(server: Server, metric: str, **labels: str) -> float:
    """Add up the samples that carry these labels."""
    return sum(s.value for s in server.metrics() if s.name == metric and labels.items() <= s.labels.items())


def listens(port: int, host: str = HOST) -> bool:
    """Return whether something accepts connections at a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Return whether it came true in time, which is long: a machine that others share may stand still for a while."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def prompt(*parts: object) -> str:
    """Return some 200 tokens that depend on the parts."""
    rng = random.Random(repr(parts))
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(36))


def hit(server: Server, engine: str = "0") -> float:
    """Ask one engine twice, vLLM's own cache emptied in between; check the answer, return the tokens loaded."""

    def loaded() -> float:
        return total(server, "kvobs_load_tokens_total", engine=engine)

    text, headers = prompt("hit", engine), {"X-data-parallel-rank": engine}
    first = server.complete(text, TOKENS, headers=headers)
    server.reset_prefix_cache()
    before = loaded()
    assert server.complete(text, TOKENS, headers=headers).tokens == first.tokens
    assert eventually(lambda: loaded() > before)
    return loaded() - before


def ask_all(server: Server, prompts: list[str]) -> dict[str, tuple[int, ...]]:
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(prompts, pool.map(lambda text: server.complete(text, TOKENS).tokens, prompts), strict=True))


def resident(server: Server, part: str = "") -> int:
    """Return the memory, in bytes, of the API server, or of the processes whose name has this part, as EngineCore's."""
    assert server.process is not None
    found = 0
    for pid in group_members(server.process.pid) if part else [server.process.pid]:
        status = Path(f"/proc/{pid}/status").read_text()
        if part in re.findall(r"Name:\s+(.*)", status)[0]:
            found += int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024
    assert found, f"no process of the server is called {part}"
    return found


def hang_up(server: Server, when: float | Callable[[], bool], text: str, **body: Any) -> None:
    """Ask for a long answer, and close the connection before it can be there: after so many seconds, or when it is."""
    asked = {"model": NAME, "prompt": text, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, **body}
    with closing(HTTPConnection(HOST, server.port, timeout=30)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        if callable(when):
            assert eventually(when)
        else:
            time.sleep(when)
