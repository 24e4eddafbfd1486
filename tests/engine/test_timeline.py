"""A server that hangs in a connector and is killed: `kvobs timeline` shows what each of its processes was in."""

import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.demo.run import host_memory, multi_connector
from kvobs.page import files
from kvobs.testing.server import group_members
from tests.engine.endings import kill
from tests.engine.serving import TOKENS, ServedEngine, eventually, hang_up, of_tests, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECRET = "s3cr3t-" + "0123456789" * 3
HANGS = {"sleep_in": "wait_for_save", "sleep_ms": {"1": 600_000}}  # on rank 1


@pytest.fixture
def linked() -> Iterator[Path]:
    """A folder for links to the pages: an engine of another test may start, and remove those of dead processes."""
    with tempfile.TemporaryDirectory(dir=files.folder().parent, prefix="pages-") as folder:
        yield Path(folder)


def shown(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["timeline", *map(str, arguments)], env={"COLUMNS": "100"})
    assert found.exit_code == 0, found.output
    return found.output


def test_a_killed_server_leaves_the_last_calls(
    served_engine: ServedEngine, tmp_path: Path, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    config, trace = (
        multi_connector(of_tests("SteeredConnector"), host_memory(), names=["steered", "cpu"]),
        tmp_path / "t",
    )
    with served_engine(config, ranks=2) as server:
        assert server.process is not None
        for pid in group_members(server.process.pid):
            for page in files.folder().glob(f"*-{pid}{files.SUFFIX}"):
                (linked / page.name).hardlink_to(page)
        monkeypatch.setattr(files, "folder", lambda: linked)
        prompts = [prompt(SECRET, i) for i in range(3)]
        for text in prompts:
            server.complete(text, TOKENS, headers={"X-Request-Id": SECRET})
        last: dict[str, Any] = {"kv_transfer_params": {"steer": {"steered": HANGS}}}
        client = threading.Thread(target=hang_up, args=(server, 20, prompt("last")), kwargs=last)
        client.start()
        where = "in wait_for_save of connector 'steered' for"
        assert eventually(lambda: f"  is {where} " in shown())
        assert re.findall(r"^(scheduler|rank \d), pid \d+: (\w+)", shown(), re.MULTILINE) == [
            ("scheduler", "alive"), ("rank 0", "alive"), ("rank 1", "alive")
        ]  # fmt: skip
        kill("EngineCor")(server)
        client.join()
    assert eventually(lambda: shown().count(": died, last seen at ") == 3)
    assert f"  was {where} at least " in shown("--chrome", trace).partition("rank 1")[2]
    held = b"".join(path.read_bytes() for path in (*linked.iterdir(), trace))
    for text in (SECRET, *(text[:40] for text in prompts)):
        assert text.encode() not in held
