"""`kvobs top` as people run it, in a real terminal, and as scripts do; /metrics are kvobs's own, no engine runs."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.cli.here import running
from kvobs.cli.scrapes import fetch
from kvobs.cli.top import live
from kvobs.cli.top.live import HUNG_UP, Watch, keyboard, scrape_all
from kvobs.cli.web import NoAnswerError, url_of
from kvobs.export.connector_rows import Server
from kvobs.export.numbers import Scrape
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from tests.support import watched
from tests.support.page_files import page_folder
from tests.support.top_engines import Engines, count, serving
from tests.support.written import Pages

KVOBS = Path(sys.executable).parent / "kvobs"
QUICK = ("--interval", "0.2")


def busy(recorder: Recorder) -> None:
    count(recorder, 0, signals.LOOKUPS, 3, "hit")
    count(recorder, 0, signals.LOADS, 3, "async", "ok")
    count(recorder, 1, signals.LOOKUPS, 3, "miss")


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """Let all pages of a test be in a new folder."""
    with page_folder() as made:
        yield made


@pytest.fixture
def engines() -> Engines:
    made = Engines("cpu", "disk")
    made.send(busy)
    return made


@pytest.fixture
def address(engines: Engines) -> Iterator[str]:
    with serving(engines) as address:
        yield address


def top(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["top", *arguments])


def test_once_prints_one_table(address: str) -> None:
    result = top(address, "--once", *QUICK)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split("   ") == ["kvobs top", "the last 0.2 s", "as configured"]
    assert [line.split()[0] for line in lines[9:] if line[0] != " "] == ["cpu", "disk"]
    assert "\x1b" not in result.output


def test_once_with_json_prints_one_document(address: str) -> None:
    result = top(address, f"http://{address}/metrics", "127.0.0.1:1", "--once", "--json", *QUICK)
    server, down = json.loads(result.stdout)["servers"]
    assert result.exit_code == 1, "one of them could not be read"
    assert (server["address"], server["error"], server["model"]) == (address, None, "tiny")
    assert [row["connector"] for row in server["connectors"]] == ["cpu", "disk"]
    assert [row["lookups_per_s"] for row in server["connectors"]] == [0, 0]
    assert 0.2 <= server["seconds"] < 60
    assert (down["address"], down["error"], down["connectors"]) == ("127.0.0.1:1", "no answer: Connection refused", [])


def test_a_server_that_does_not_answer_is_waited_for_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped exporter takes connections, and is silent for ten seconds each time."""
    asked: list[str] = []

    def read(url: str, of_vllm: str | None) -> Scrape:
        asked.append(url)
        if "silent" in url:
            raise NoAnswerError("no answer within 10 s")
        return fetch(url, of_vllm)

    monkeypatch.setattr(live, "fetch", read)
    alone = top("silent:1", "--once", "--interval", "60")
    assert (alone.exit_code, asked.count("http://silent:1/metrics")) == (1, 1)
    assert "no answer within 10 s" in alone.output
    beside = top("silent:1", address, "--once", *QUICK)
    assert (beside.exit_code, asked.count("http://silent:1/metrics"), len(asked)) == (1, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ftp://gpu-7"], "'ftp://gpu-7' is not a server address; use"),
        (["gpu-7:8000", "--json"], "--json"),
        (["gpu-7:8000", "--interval", "0"], "--interval"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], says: str) -> None:
    result = top(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", result.output).split())


# Without an address: the engines on this host


def test_without_address_and_engine_it_names_where_it_looked(folder: Path) -> None:
    result = top("--once", *QUICK)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert f"found no running engine in {folder}: run this as the engine's user, on its machine" in text


def test_without_an_address_it_shows_the_engines_of_this_host(engines: Engines, address: str) -> None:
    """The same as their server shows, but without vLLM's own numbers."""
    other = Pages(None, model="other", port=8001)
    result = top("--once", "--json", *QUICK)
    assert result.exit_code == 0
    mine, others = json.loads(result.stdout)["servers"]
    assert (mine["address"], mine["model"], mine["error"]) == ("tiny", "tiny", None)
    assert [row["connector"] for row in mine["connectors"]] == ["cpu", "disk"]
    assert (others["address"], others["model"]) == ("other at port 8001", "other")
    assert [row["connector"] for row in others["connectors"]] == ["one", "two"]
    result = top(address, "--once", "--json", *QUICK)
    (served,) = json.loads(result.stdout)["servers"]
    differ = {key for key in served if served[key] != mine[key]} - {"seconds", "address", "connectors"}
    assert differ == set()
    assert [row["loads_per_s"] for row in served["connectors"]] == [0, 0]
    del other


def test_an_engine_that_ends_is_an_error_and_the_others_continue() -> None:
    with watched.process("ends", None, "hangs") as ends:
        pages = Pages(None, model="stays")
        watches = [Watch(name, read, 1) for name, read in running().items()]
        scrape_all(watches)
        assert [watch.since_start.error for watch in watches] == [None, None]
        ends.kill()
        scrape_all(watches)
    errors = {watch.address: watch.since_start.error for watch in watches}
    assert errors.pop("stays") is None
    assert list(errors.values()) == ["its engine has ended"]
    del pages


def test_into_a_pipe_it_prints_tables_one_after_another(address: str) -> None:
    """And needs no vLLM."""
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"
    command = [sys.executable, "-c", code, "top", address, *QUICK]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    text = ""
    while text.count("kvobs top") < 3:
        text += process.stdout.readline().decode()
    process.terminate()
    process.stdout.close()
    assert process.wait(60) == 0
    assert text.index("since the servers' start") < text.index("the last 0.2 s")
    assert "\x1b" not in text


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str, **env: str) -> None:
        self.fd, self.far = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self.far)
        self.text = ""
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), self.far)
        env = {**inherited, "TERM": "xterm-256color", **env}
        self.process: Any = subprocess.Popen(command, start_new_session=True, env=env, **streams)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait_for(self, *texts: str, seconds: float = 120) -> str:
        """Wait until these texts were shown, one after the other, since the last call; return all that was."""
        deadline = time.monotonic() + seconds
        pattern = ".*".join(map(re.escape, texts))
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < deadline, f"{texts} not shown:\n{self.text}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 65536).decode()
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        with suppress(OSError):  # nobody holds the other side any longer
            while self.process.poll() is None or select.select([self.fd], [], [], 0)[0]:
                if select.select([self.fd], [], [], 0.1)[0]:
                    self.text += os.read(self.fd, 65536).decode()
        return self.process.wait(120)

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.far) == self.settings


@contextmanager
def terminal(*command: str, **env: str) -> Iterator[Terminal]:
    made = Terminal(*command, **env)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        os.close(made.fd)
        os.close(made.far)


ALTERNATE, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def test_keys_sort_and_quit(address: str) -> None:
    with terminal(str(KVOBS), "top", address, *QUICK) as shown:
        shown.wait_for(ALTERNATE)
        shown.wait_for("the last 0.2 s", "as configured", "cpu", "disk", "q quit")
        assert not shown.is_as_before, "keys would be failure_reported"
        shown.type("<")
        shown.wait_for("by errors /s, largest first", "disk")
        for other in ("\x1b[15~", "\x1bOP", "\x1bOQ", "xZ>"):  # function keys have no meaning, nor have letters
            shown.type(other)
            time.sleep(0.1)
        shown.wait_for("as configured", "cpu", "disk")
        shown.type("?")
        shown.wait_for("sched busy", "no step runs meanwhile", "q quit")
        shown.type("?")
        shown.wait_for("as configured", "cpu", "disk")
        shown.type("q")
        assert shown.end() == 0
        assert shown.is_as_before
        assert shown.text.rstrip().endswith((BACK, CURSOR))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "ctrl-d", "no keyboard"])
def test_however_it_ends_the_terminal_is_as_before(address: str, how: Any) -> None:
    """Without a keyboard it refreshes until it is ended."""
    without = "</dev/null" if how == "no keyboard" else ""
    with terminal("bash", "-c", f"exec {KVOBS} top {address} {' '.join(QUICK)} {without}") as shown:
        shown.wait_for(ALTERNATE, "the last 0.2 s", "cpu", "q quit", "q quit")
        assert shown.is_as_before is bool(without)
        if how == "ctrl-d":
            shown.type("\x04")
        else:
            shown.process.send_signal(signal.SIGTERM if without else how)
        assert shown.end() == 0
        assert shown.is_as_before
        assert BACK in shown.text
        assert CURSOR in shown.text
        assert "Traceback" not in shown.text


def test_colours_are_left_out_where_they_are_not_wanted(engines: Engines, address: str) -> None:
    engines.send(gauges={(0, signals.QUARANTINED): 1})
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    for env, wanted in (({}, True), ({"NO_COLOR": "1"}, False)):
        with terminal(str(KVOBS), "top", address, *QUICK, **env) as shown:
            assert bool(coloured.search(shown.wait_for("Quarantined", "q quit"))) is wanted


def test_keys_of_no_terminal_are_none() -> None:
    read, write = os.pipe()
    os.write(write, b"q")
    with keyboard(read) as keys:
        assert keys(0) == ""
    os.close(read)
    os.close(write)


def test_an_error_gives_the_terminal_back() -> None:
    near, far = pty.openpty()
    before = termios.tcgetattr(far)
    with suppress(ZeroDivisionError), keyboard(far) as keys:
        assert termios.tcgetattr(far) != before
        for typed, read in (("ab<", "ab<"), ("\x1b[D", "")):
            os.write(near, typed.encode())
            assert keys(10) == read
        assert keys(0) == ""
        raise ZeroDivisionError
    assert termios.tcgetattr(far) == before
    os.close(near)
    assert keys(10) == HUNG_UP
    os.close(far)


def test_a_watched_server_may_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, url = Engines("cpu"), ""
    with serving(engines) as address:
        url = url_of(address)
        watch = Watch(url, lambda: fetch(url), 1)
        assert watch.lately.error == watch.since_start.error == "no answer yet"
        scrape_all([watch])
        assert (watch.lately.address, watch.lately.error, watch.lately.connectors) == (address, "one answer so far", ())
        assert watch.since_start.connectors[0].loads_per_s == 0
        engines.send(lambda recorder: count(recorder, 0, signals.LOADS, 3, "async", "ok"))
        scrape_all([watch])
        assert watch.lately.connectors[0].loads_per_s * (watch.lately.seconds or 0) == pytest.approx(3)
    scrape_all([watch])
    assert watch.lately == watch.since_start == Server(address, error="no answer: Connection refused")
    later = time.monotonic() + 60
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: later))
    scrape_all([watch])
    assert str(watch.lately.error).startswith("for 60 s: no answer: ")
    with serving(engines) as address:
        url = url_of(address)
        scrape_all([watch])
        assert watch.lately.error == "one answer so far"
        scrape_all([watch])
        assert watch.lately.connectors[0].loads_per_s == 0
