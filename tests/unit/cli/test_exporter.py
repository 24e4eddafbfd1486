"""`kvobs exporter`, as a person or a sidecar runs it: before any engine, over two lives, beside others."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands
from kvobs.page import files
from kvobs.page.layout import HEAD, MAGIC, VERSION
from tests.support.contexts import no_otel_variables
from tests.support.exporting import Page, end, exporter, started, state_of, writing
from tests.support.page_files import page_folder
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

_COMMAND = """if True:
    import sys
    from pathlib import Path
    sys.modules['vllm'] = sys.modules['torch'] = None
    from kvobs.page import files
    files.folder = lambda: Path({folder!r})
    from kvobs.export import process
    process.AFTER_SIGTERM_S = 0.3
    from kvobs.cli import app
    app()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    no_otel_variables(monkeypatch)
    with page_folder() as made:
        yield made


class ByHand:
    """The command, in a process without vLLM and torch."""

    def __init__(self, *arguments: str) -> None:
        self.page = Page()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this
        code = _COMMAND.format(folder=str(files.folder()))
        command = [sys.executable, "-c", code, "exporter", "--port", str(self.page.port), *arguments]
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def hits(self) -> float:
        return self.page.hits()

    def ends_by(self, number: int, seconds: float = 30) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def by_hand(*arguments: str) -> Iterator[ByHand]:
    made = ByHand(*arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made._log.close()


def serve_a_life(mine: ByHand, n: int) -> None:
    with writing(at_once=n, per_second=1) as engine:
        assert eventually(lambda: mine.hits() == engine.n), mine.log
        assert mine.page.value("kvobs_engine_up") == 1
        end(engine.pid, signal.SIGTERM)
        assert eventually(lambda: not state_of(engine.server)), "it has let go of it"


def test_it_starts_before_any_engine_and_serves_each_life() -> None:
    """And needs neither vLLM nor torch; what it logs is seen in each life."""
    with by_hand() as mine:
        assert eventually(lambda: f"is waiting for an engine with pages in {files.folder()}" in mine.log)
        for n in (10, 20):
            serve_a_life(mine, n)
            assert mine.log.count(f"kvobs's metrics are at http://127.0.0.1:{mine.page.port}/metrics") == n / 10
        assert mine.process.poll() is None
        assert mine.ends_by(signal.SIGTERM) == 0
        assert "Traceback" not in mine.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("has_engine", [True, False])
def test_it_ends_when_it_is_asked_to(number: int, has_engine: bool) -> None:
    with by_hand() as mine:
        assert eventually(lambda: "is waiting for an engine" in mine.log)
        if has_engine:
            with writing() as engine:
                assert eventually(mine.hits)
                assert mine.ends_by(number) == 0
                assert state_of(engine.server)["positions"], "for the next one"
        else:
            assert mine.ends_by(number) == 0
        assert "Traceback" not in mine.log


def test_it_takes_over_at_anothers_end_and_serves_a_lone_server() -> None:
    with writing() as first:
        with exporter(first.server, port=Page().port), by_hand() as mine:
            text = "another exporter already serves the engines of a server; this one takes over when that one exits"
            assert eventually(lambda: text in mine.log)
            time.sleep(2)
            assert mine.log.count(text) == 1
            with writing(at_once=5000, per_second=1) as second:
                assert eventually(lambda: mine.hits() == second.n), "though the other server has one"
                mine.page.get()  # twice: after a single one it waits 15 s for the next
                end(second.pid, signal.SIGTERM)
            assert eventually(lambda: not state_of(second.server))
        with by_hand() as later:
            assert eventually(later.hits)
            assert started(first.server, port=Page().port) == (0, ""), "an engine's ends at once"


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(commands.app, ["exporter", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "0"], "--port: found 0: Input should be greater than or equal to 1"),
        (["--port", "65536"], "--port: found 65536: Input should be less than or equal to 65535"),
        (["--port", "many"], "'--port': Input should be a valid integer"),
        (["--web-config", "tls.yaml"], "--web-config: found 'tls.yaml': Input should be an absolute path"),
        (["--runbook", "wiki"], "--runbook: found 'wiki': Input should be an address with http:// or https://"),
        (["--host", ""], "--host: found '': String should have at least 1 character"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], says: str) -> None:
    result = invoked(*arguments)
    assert result.exit_code != 0
    assert says in " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", result.output).split())


def test_a_page_that_it_can_not_read_is_reported(folder: Path) -> None:
    with writing() as engine:
        (folder / f"{engine.server}-0-rank0-1-1{files.SUFFIX}").write_bytes(HEAD.pack(MAGIC, VERSION ^ 1, 8) + bytes(9))
        with by_hand() as mine:
            assert eventually(mine.hits)
            assert mine.page.value("kvobs_internal_errors_total", "where", "version") == 1
            assert mine.log.count("it was written by another version of kvobs") == 1
