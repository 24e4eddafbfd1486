"""What vLLM's own MultiConnector makes of a connector that fails: ``test_isolation`` shows the same with kvobs.

    python -m tests.engine.failing_on_stock [HOOK ...]

starts a server of two ranks for each hook, has the hook fail while ten requests are under way, ends the failure, and
prints what became of these requests, of the server, and of ten more requests.
"""

import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.model import make_model
from kvobs.testing.server import Server, ServerError
from tests.engine.serving import TOKENS, eventually, of_tests, prompt, serve, stock

HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output"),
    *("request_finished_all_groups", "start_load_kv", "save_kv_layer", "get_transfer_results"),
    *("get_kv_connector_stats", "take_events"),
)
REQUESTS = 10
PATIENCE_S = 20.0
"""Seconds after which a client gives up."""
LOADS = {"offer": "stored", "async": True, "load_ms": 10}


def outcomes(server: Server, known: list[str] | None = None) -> list[str]:
    """Ask for every answer at once; return the answers, or with ``known`` ones how each compares."""

    def ask(i: int) -> str:
        params = {"steer": {"steered": LOADS}}
        try:
            answer = server.complete(prompt("failing", i), TOKENS, timeout=PATIENCE_S, kv_transfer_params=params)
        except ServerError as error:
            status = re.search(r"answered (\d+)", str(error))
            return f"HTTP {status[1]}" if status else "no answer"
        said = str(answer.tokens)
        return said if known is None else "answered" if said == known[i] else "another answer"

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, range(REQUESTS)))


def run(hook: str, model: Path, folder: Path) -> str:
    """Return what became of one server."""
    folder.mkdir(parents=True)
    order = folder / "order"
    failing = of_tests("FailingConnector", "connectors_failing", order=str(order), failed=str(folder))
    config = stock(multi_connector(failing, host_memory(), names=[]))
    config["kv_load_failure_policy"] = "recompute"
    with serve(model, folder, config, ranks=2) as server:
        process = server.process
        assert process is not None
        known = outcomes(server)
        server.reset_prefix_cache()
        order.write_text(hook)
        during = Counter(outcomes(server, known))
        order.unlink()
        assert (folder / hook).exists(), f"{hook} was never called"
        ended = eventually(lambda: process.poll() is not None, 12)
        after = "the server is gone" if ended else f"then {_said(Counter(outcomes(server, known)))}"
    return f"{_said(during)}; {after}"


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))


def main(hooks: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvobs-failing-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for hook in hooks or HOOKS:
            print(f"{hook:30} {run(hook, model, folder / hook)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
