"""A server that hangs in a child and is killed: the files of its processes say what each of them did last."""

import json
import re
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.cli.timeline import recordings
from kvobs.demo.run import host_memory, multi_connector
from tests.engine.endings import kill
from tests.engine.serving import BOTH_RANKS_ON_ONE_CORE, TOKENS, ask_all, eventually, hang_up, of_tests, prompt, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECRET = "s3cr3t-" + "0123456789" * 3
LOADS = {"offer": 64, "async": True, "load_ms": {"0": 20, "1": 60}, "promise": True, "save_ms": {"0": 10, "1": 30}}
HANGS = {"sleep_in": "wait_for_save", "sleep_ms": {"1": 600_000}}  # on rank 1


def test_a_killed_server_leaves_the_last_calls(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    folder, out = tmp_path / "timeline", tmp_path / "timeline.json"
    config = multi_connector(of_tests("SteeredChild"), host_memory(), names=["steered", "cpu"])
    config["kv_connector_extra_config"]["kvobs"]["timeline"] = {"dir": str(folder)}
    with serve(model, tmp_path, config, tensor_parallel=2, timeout=360, env=BOTH_RANKS_ON_ONE_CORE) as server:

        def hangs() -> bool:
            return any(process.rank == 1 and doing(process) == "wait_for_save" for process in recordings.load(folder))

        prompts = [prompt(SECRET, i) for i in range(3)]
        ask_all(server, prompts)
        for text in prompts:
            server.reset_prefix_cache()
            server.complete(
                text, TOKENS, headers={"X-Request-Id": SECRET}, kv_transfer_params={"steer": {"steered": LOADS}}
            )
        last = {"steer": {"steered": HANGS}}
        client = threading.Thread(
            target=hang_up, args=(server, 20, prompt("last")), kwargs={"kv_transfer_params": last}
        )
        client.start()
        assert eventually(hangs)
        kill("EngineCor")(server)
        client.join()

    assert eventually(lambda: not any(process.is_alive for process in recordings.load(folder)))
    found = CliRunner().invoke(cli.app, ["timeline", str(folder), "-o", str(out)], env={"COLUMNS": "100"})
    assert found.exit_code == 0, found.output
    assert re.findall(r"^(scheduler|rank \d) +\d+ +(\w+)", found.output, re.MULTILINE) == [
        ("scheduler", "ended"),
        ("rank 0", "ended"),
        ("rank 1", "ended"),
    ]
    assert re.search(r"^rank 1 was in wait_for_save of steered since \d\d:", found.output, re.MULTILINE)
    assert "rank 0 was in" not in found.output

    events = json.loads(out.read_bytes())["traceEvents"]
    arrows = [event["cat"] for event in events if event["ph"] == "f"]
    assert arrows.count("save") == 3 * 2, "each to both ranks"
    assert arrows.count("load") >= 3 * 2
    loads = [e for e in events if e["ph"] == "b" and e["name"] == "load steered" and e["pid"] == 1]
    assert [(e["args"]["tokens"], e["args"]["outcome"]) for e in loads] == [(64, "ok")] * 3

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o400}
    held = b"".join(path.read_bytes() for path in folder.iterdir())
    for text in (SECRET, *(text[:40] for text in prompts)):
        assert text.encode() not in held
        assert text not in out.read_text()


def doing(process: recordings.Process) -> str:
    return process.open[0].name if process.open else ""
