"""Best-effort connectors that fail in each of their hooks in turn, under load: every answer is there, and the same."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.server import Server
from kvobs.vllm_api.hooks import HOOKS, Side
from tests.engine.connectors_failing import FAILING
from tests.engine.metered import assert_promtool_finds_no_fault, configuration
from tests.engine.serving import TOKENS, ServedEngine, of_tests, prompt, total

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NAMES = ("red", "green", "blue", "grey", "pink")
NEVER_CALLED = {"get_finished", "finish_forward", "register_finished_partial_tail", "has_pending_block_frees"}  # here
PROMPTS = [prompt("isolated", i) for i in range(2 * len(NAMES))]


def failing_entry(name: str, folder: Path) -> dict[str, Any]:
    (folder / f"{name}.failed").mkdir()
    options = {"order": str(folder / name), "failed": str(folder / f"{name}.failed")}
    return of_tests("FailingConnector", "connectors_failing", tag=name, **options)


@pytest.fixture(scope="module")
def server(served_engine: ServedEngine, folder: Path) -> Iterator[Server]:
    config = configuration(*(failing_entry(name, folder) for name in NAMES), host_memory(), names=[*NAMES, "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"best_effort": list(NAMES)}
    with served_engine(config, ranks=2) as server:
        yield server


def ask_all(server: Server) -> list[tuple[int, ...]]:
    """Ask for every prompt: each connector loads two of them."""

    def ask(i: int) -> tuple[int, ...]:
        plan = {"offer": "stored", "async": True, "load_ms": 10}
        return server.complete(PROMPTS[i], TOKENS, kv_transfer_params={"steer": {NAMES[i % len(NAMES)]: plan}}).tokens

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, range(len(PROMPTS))))


def those_out(server: Server) -> set[str]:
    return {s.labels["connector"] for s in server.metrics() if s.name == "kvobs_quarantined" and s.value == 1}


class Watch:
    """Reads /metrics all the time, in a thread, and notes which connectors were out; a back-off lasts a second only."""

    def __init__(self, server: Server, failed: Callable[[], set[str]]) -> None:
        self.seen: set[str] = set()
        self._failed = failed
        self._server, self._is_over = server, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._is_over.wait(0.05):
            self.seen |= those_out(self._server)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _turn in range(20):  # some hooks are called when all is done, and reported with the next step
            keep_busy(self._server)
            if self._failed() <= self.seen:
                break
        self.seen |= those_out(self._server)
        self._is_over.set()
        self._thread.join()


def keep_busy(server: Server) -> None:
    """Let the engine step: time passes for it in steps only."""
    server.complete("busy", 1)
    time.sleep(0.1)


def test_every_hook_in_turn(server: Server, folder: Path) -> None:
    """Five connectors at a time; half of the worker's hooks fail on one of the two ranks only."""
    expected = ask_all(server)
    log = server.log
    turns = [FAILING[i : i + len(NAMES)] for i in range(0, len(FAILING), len(NAMES))]
    seen: set[str] = set()
    for turn, hooks in enumerate(turns):
        before = {name: changes(log, name).count("in quarantine") for name in NAMES}
        server.reset_prefix_cache()
        for i, (name, hook) in enumerate(zip(NAMES, hooks, strict=False)):
            on_one_rank = HOOKS[hook].side is Side.WORKER and (turn + i) % 2
            (folder / name).write_text(f"{hook} 1" if on_one_rank else hook)
        noted = dict(zip(NAMES, hooks, strict=False))

        def failed(noted: dict[str, str] = noted) -> set[str]:
            return {name for name, hook in noted.items() if (folder / f"{name}.failed" / hook).exists()}

        with Watch(server, failed) as watch:
            assert ask_all(server) == expected, hooks
        assert watch.seen <= failed()
        seen |= watch.seen
        assert {name for name in NAMES if changes(log, name).count("in quarantine") > before[name]} == failed()
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        while any(changes(log, name)[-1:] == ["in quarantine"] for name in NAMES):
            keep_busy(server)
        assert not those_out(server)
        server.reset_prefix_cache()  # a good load ends the probation: one that fails during it is out for twice as long
        assert ask_all(server) == expected, "and with all of them back"
    assert seen == set(NAMES), "the gauge says so"
    all_failed = {path.name for name in NAMES for path in (folder / f"{name}.failed").iterdir()}
    assert all_failed == set(FAILING) - NEVER_CALLED
    errors = {s.labels["error_type"] for s in server.metrics() if s.name == "kvobs_call_errors_total"}
    assert "ConnectionError" in errors
    assert errors <= {"ConnectionError", "KeyError", "AssertionError"}, "of its own, once it has missed something"
    assert total(server, "kvobs_internal_errors_total") == 0
    assert_promtool_finds_no_fault(server)


def changes(log: Path, name: str) -> list[str]:
    """Return the log's words for each begin and each end of a connector's quarantine, and of its probation."""
    return re.findall(rf"connector '{name}'.* (in quarantine|left quarantine|left probation)", log.read_text())
