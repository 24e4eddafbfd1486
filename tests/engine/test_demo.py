"""`kvobs demo`, as a person runs it: real processes, real exit codes, a real vLLM server."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvobs.export.numbers import PROMPT_TOKENS, Numbers
from kvobs.schema import signals
from kvobs.testing.server import parse_metrics
from tests.engine.serving import eventually

pytestmark = pytest.mark.engine

KVOBS = Path(sys.executable).parent / "kvobs"
TAG = "KVOBS_TEST_TAG"


class Run:
    """A `kvobs demo` in a process of its own, whose descendants can all be found by a tag in their environment."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, tmp: Path, tag: str) -> None:
        self.process, self.out, self.tmp, self.tag = process, out, tmp, tag

    def output(self) -> str:
        """Return what it has printed so far."""
        return self.out.read_text()

    def wait_for(self, text: str, seconds: float) -> str:
        """Wait until it has printed a text; return all it has printed."""
        deadline = time.monotonic() + seconds
        while text not in self.output():
            assert self.process.poll() is None, f"it ended before it said {text!r}:\n{self.output()}"
            assert time.monotonic() < deadline, f"it never said {text!r}:\n{self.output()}"
            time.sleep(0.1)
        return self.output()

    def finish(self, seconds: float) -> tuple[int, str]:
        """Wait for its end; return its exit code and output."""
        return self.process.wait(seconds), self.output()

    def left_behind(self) -> list[str]:
        """Return what still runs of it, and the files it left."""
        return self.processes() + [str(path) for path in self.tmp.iterdir()]

    def processes(self) -> list[str]:
        """Return the command lines of it and its descendants, in whatever session or group they are."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.tag.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it ended while we looked
                continue
        return found


@contextmanager
def demo(*arguments: str, **env: str) -> Iterator[Run]:
    """Start `kvobs demo` with its own TMPDIR; kill it at the end if it still runs."""
    tag = uuid.uuid4().hex
    # A short path: sockets below it have short names only.
    tmp = Path("/tmp") / f"kt-{tag[:6]}"
    tmp.mkdir()
    out = tmp.with_suffix(".out")
    environ = os.environ | {TAG: tag, "TMPDIR": str(tmp), "COLUMNS": "100"} | env
    try:
        with out.open("wb") as file:
            command = [str(KVOBS), "demo", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
        try:
            yield Run(process, out, tmp, tag)
        finally:
            process.kill()
            process.wait()
    finally:
        out.unlink()
        shutil.rmtree(tmp, ignore_errors=True)


def printed_rows(output: str) -> dict[str, dict[str, int]]:
    """Return the counts in the table, by connector and title."""
    lines = output.partition("What each connector did")[2].splitlines()
    names = lines[1].split()
    assert names == ["cpu", "disk"], output
    found = re.findall(r"^ *(\S[a-z -]*[a-z]) +([\d,]+) +([\d,]+)$", "\n".join(lines), re.MULTILINE)
    return {name: {row[0]: int(row[i].replace(",", "")) for row in found} for i, name in enumerate(names, 1)}


def test_a_port_in_use_is_named_and_nothing_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with demo("--port", str(port)) as run:
            code, output = run.finish(30)
    assert code == 1
    assert f"Port {port} on 127.0.0.1 can't be used: Address already in use." in output
    assert "Traceback" not in output
    assert "log" not in output


@pytest.mark.demo
def test_the_demo_shows_both_connectors_loading() -> None:
    with demo("--requests", "32") as run:
        code, output = run.finish(300)
        assert code == 0, output
        assert run.left_behind() == []
    rows = printed_rows(output)
    for row in rows.values():
        assert row["lookups"] >= 32
        # Each round that is a connector's begins with a miss of vLLM's own cache per document.
        assert row["hits"] >= row["loads"] >= 4
        assert row["tokens offered"] >= row["tokens loaded"] > 0
    assert rows["disk"]["lost to a shorter offer"] > 0, "the last round offers more on disk than in host memory"
    assert "the same answers, token for token" in output
    shares = r"\d+ % computed, \d+ % in vLLM's own cache, \d+ % loaded by cpu, \d+ % loaded by disk"
    assert re.search(rf"Of [\d,]+ prompt tokens: {shares}\.", " ".join(output.split()))
    assert "--kv-transfer-config '{" in output
    shown = output.split("Trace of the slowest load", 1)[1]
    assert re.search(r"llm_request .*kv\.lookup (cpu|disk) .*kv\.load \1 .*kv\.load\.rank 0 ", shown, re.DOTALL), shown


def test_with_the_exporter_its_numbers_equal_vllms() -> None:
    """With --keep Ctrl-C is the server's regular end; its own /metrics have none of kvobs; spans arrive."""
    with demo("--keep", "--requests", "16", "--exporter") as run:
        output = run.wait_for("The server keeps running.", 300)
        url = re.search(r"curl -s (\S+/metrics)", output)
        server = re.search(r"vLLM with kvobs is up on (\S+)", output)
        assert url
        assert server
        assert f"kvobs's metrics are at {url[1]}" in output
        page = url[1].removesuffix("metrics")
        assert f"its status page is at {page}" in output
        with urllib.request.urlopen(page, timeout=20) as answer:
            status = answer.read().decode()
        assert [name in status for name in ("<bdi>cpu</bdi>", "<bdi>disk</bdi>")] == [True, True]
        ours, theirs = Numbers.of(scrape(url[1])), Numbers.of(scrape(f"{server[1]}/metrics"))
        top = [str(KVOBS), "top", url[1].removesuffix("/metrics"), "--once", "--json", "--interval", "0.2"]
        shown_by_top = json.loads(subprocess.run(top, capture_output=True, check=True, timeout=60).stdout)["servers"][0]
        run.process.send_signal(signal.SIGINT)
        code, _ = run.finish(40)
        assert code == 0
        assert eventually(lambda: run.processes() == [], 15 + 5), "the exporter ends soon after its engine"
        assert [log.stat().st_size > 0 for log in run.tmp.glob("*/server.log")] == [True]
    assert not [name for name in theirs.by_name if name.startswith("kvobs_")]
    assert not [name for name in ours.by_name if not name.startswith("kvobs_")]
    for name, row in printed_rows(output).items():
        assert row["loads"] == ours.total(signals.LOADS, outcome="ok", connector=name) > 0
        assert row["tokens loaded"] == ours.total(signals.LOAD_TOKENS, connector=name) > 0
    assert ours.total(signals.LOAD_TOKENS) == theirs.sum(PROMPT_TOKENS, source="external_kv_transfer")
    assert "Trace of the slowest load" in output
    assert [connector["connector"] for connector in shown_by_top["connectors"]] == ["cpu", "disk"]
    assert (shown_by_top["model"], shown_by_top["internal_errors"]) == ("tiny", 0)


def scrape(url: str) -> list[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Return the samples of a page of metrics, without times of creation."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        samples = parse_metrics(answer.read().decode())
    return [((s.name, frozenset(s.labels.items())), s.value) for s in samples if not s.name.endswith("_created")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "patience", "number"),
    [("server ", 60, signal.SIGINT), ("is up on", 240, signal.SIGINT), ("server ", 60, signal.SIGTERM)],
    ids=["ctrl-c while it starts", "ctrl-c during the load", "kill while it starts"],
)
def test_nothing_is_left_running_after_an_interruption(when: str, patience: float, number: signal.Signals) -> None:
    with demo("--requests", "4000") as run:
        run.wait_for(when, patience)
        time.sleep(2)  # into the start of the engine, or into the first round
        assert len(run.processes()) > 1
        run.process.send_signal(number)
        code, output = run.finish(40)
        assert run.left_behind() == []
    assert code == 130
    assert "Stopped. Nothing is left running." in output
    assert "Traceback" not in output


def test_a_server_that_dies_shows_the_end_of_its_log() -> None:
    with demo(VLLM_LOGGING_LEVEL="NOPE") as run:
        code, output = run.finish(120)
        assert run.processes() == []
        log = re.search(r"The end of its log, (\S+):", output)
        assert log, output
        assert "NOPE" in Path(log[1]).read_text()
    assert code == 1
    assert "The server exited before it was ready (exit status 1)." in output
    assert re.search(r"The error in its log: \w+Error: .*NOPE", output)
    assert "Traceback (most recent call last)" not in output.split("The end of its log")[0]
