"""The command `kvobs`, as a person runs it: real processes, real exit codes, a real vLLM server."""

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
from typer.testing import CliRunner

from kvobs import cli

TAG = "KVOBS_TEST_TAG"


def kvobs(*arguments: str) -> tuple[int, str]:
    """Run the command in this process and return its exit code and all it printed."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output


def test_help_lists_the_commands() -> None:
    """A bare `kvobs` is a call for help."""
    for arguments in (["--help"], []):
        output = kvobs(*arguments)[1]
        assert "demo" in output
        assert "topology" in output


def test_the_command_is_installed() -> None:
    """Beside the Python that runs the tests."""
    out = subprocess.run([Path(sys.executable).parent / "kvobs", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in out.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--port", "70000"], "--port"), (["--requests", "3"], "--requests"), (["--prot", "1"], "--prot")],
)
def test_options_out_of_range_are_refused(arguments: list[str], says: str) -> None:
    """With exit code 2 and the option's name, before anything starts."""
    code, output = kvobs("demo", *arguments)
    assert code == 2
    assert says in re.sub(r"\x1b\[[0-9;]*m", "", output)


def test_a_port_in_use_is_named_and_nothing_starts() -> None:
    """Exit code 1, without a traceback or a log: there is none."""
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


def test_without_vllm_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than failing at some import."""
    monkeypatch.setattr(cli, "find_spec", lambda _name: None)
    code, output = kvobs("demo")
    assert code == 1
    assert "kvobs demo needs vLLM: pip install 'kvobs[engine]'" in output


PAIR = ("--prefill-tp", "4", "--decode-tp", "2")


def test_topology_prints_a_row_for_each_read() -> None:
    """Both decode ranks, the four prefill ranks, and the heads that go from these to those."""
    code, output = kvobs("topology", *PAIR, "--kv-heads", "8", "--decode-block-size", "32")
    assert code == 0
    rows = [line.split() for line in output.splitlines() if re.match(r" *\d+   ", line)]
    assert rows == [
        ["0", "0-3", "0-1", "0", "2"],
        ["0", "0-3", "2-3", "1", "2"],
        ["1", "4-7", "4-5", "2", "2"],
        ["1", "4-7", "6-7", "3", "2"],
    ]


def test_topology_prints_json_for_scripts() -> None:
    """All of the output is one JSON document."""
    code, output = kvobs("topology", *PAIR, "--kv-heads", "2", "--json")
    assert code == 0
    assert json.loads(output) == {
        "prefill": {"tp_size": 4, "block_size": 16, "ranks_per_head": 2, "unread": [[1, 1], [3, 3]]},
        "decode": {"tp_size": 2, "block_size": 16, "ranks_per_head": 1},
        "reads": [
            {"rank": 0, "heads": [0, 0], "sources": [{"rank": 0, "heads": [0, 0]}], "blocks": 1},
            {"rank": 1, "heads": [1, 1], "sources": [{"rank": 2, "heads": [1, 1]}], "blocks": 1},
        ],
    }


@pytest.mark.parametrize(
    ("config", "same_as"),
    [({"num_key_value_heads": 8}, ["--kv-heads", "8"]), ({"kv_lora_rank": 512}, ["--mla", "--kv-heads", "128"])],
    ids=["heads", "mla"],
)
def test_topology_takes_the_model_s_numbers_from_its_folder(
    tmp_path: Path, config: dict[str, int], same_as: list[str]
) -> None:
    """Just as if they had been typed."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output = kvobs("topology", *PAIR, "--model", str(tmp_path))
    assert (code, output) == kvobs("topology", *PAIR, *same_as)
    assert code == 0
    assert ("latent" in output) is ("--mla" in same_as)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--prefill-tp 3 --decode-tp 4 --kv-heads 8",
            "--prefill-tp and --kv-heads: TP size 3 with 8 KV heads: allowed",
        ),
        ("--prefill-tp 4 --decode-tp 3 --kv-heads 8", "--decode-tp and --kv-heads: TP size 3 with 8 KV heads: allowed"),
        ("--prefill-tp 4 --decode-tp 3 --kv-heads 12", "--prefill-tp and --decode-tp: TP size 3 .* 4 .*: allowed"),
        ("--prefill-tp 4 --decode-tp 3 --mla", "--prefill-tp and --decode-tp: TP size 3 .* 4 .*: allowed"),
        (
            "--prefill-tp 4 --decode-tp 4 --kv-heads 8 --prefill-block-size 32",
            "--prefill-block-size and --decode-block-size: block size 16 .* 32 .*: allowed",
        ),
        ("--prefill-tp 4 --decode-tp 4 --model /nowhere", "--model: /nowhere/config.json: No such file.*: allowed"),
    ],
)
def test_topology_says_which_options_do_not_fit(arguments: str, says: str) -> None:
    """In one line on stderr, with exit code 1, nothing on stdout and no traceback."""
    result = CliRunner().invoke(cli.app, ["topology", *arguments.split(), "--json"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(f"{says}.*\n", result.stderr)


def test_topology_names_the_model_where_its_heads_do_not_fit(tmp_path: Path) -> None:
    """Rather than an option that nobody gave."""
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 3}')
    code, output = kvobs("topology", *PAIR, "--model", str(tmp_path))
    assert code == 1
    assert output.startswith("--prefill-tp and --model: TP size 4 with 3 KV heads: allowed")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PAIR], "--kv-heads, --mla, --model"),
        ([*PAIR, "--model", ".", "--mla"], "--kv-heads, --mla, --model"),
        ([*PAIR, "--model", ".", "--kv-heads", "8"], "--kv-heads, --mla, --model"),
        ([*PAIR, "--kv-heads", "0"], "--kv-heads"),
        (["--prefill-tp", "4", "--decode-tp", "0", "--mla"], "--decode-tp"),
        (["--prefill-tp", "1025", "--decode-tp", "1", "--mla"], "--prefill-tp"),
        (["--prefill-tp", "4", "--mla"], "--decode-tp"),
    ],
)
def test_topology_refuses_options_that_make_no_pair(arguments: list[str], says: str) -> None:
    """With exit code 2 and the options' names."""
    code, output = kvobs("topology", *arguments)
    assert code == 2
    assert says in re.sub(r"\x1b\[[0-9;]*m", "", output)


def test_topology_needs_no_vllm() -> None:
    """It runs wherever kvobs is installed; piped, without colours."""
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"
    command = [sys.executable, "-c", code, "topology", *PAIR, "--kv-heads", "8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert out.stdout.startswith("8 KV heads, no copies; ")
    assert "\x1b" not in out.stdout


@pytest.mark.engine
def test_the_demo_shows_both_children_loading() -> None:
    """From nothing to the report in one command; nothing is left of it afterwards, the folder included."""
    with demo("--requests", "32") as run:
        code, output = run.finish(300)
        assert code == 0, output
        assert run.left_behind() == []
    # child, asked, hits, misses, ..., offered, loaded, loads, forgone
    rows = {cells[0]: [int(cell.replace(",", "")) for cell in cells[1:]]
            for line in output.splitlines() if (cells := line.split()) and cells[0] in ("cpu", "disk")
            and all(cell.replace(",", "").isdigit() for cell in cells[1:])}  # fmt: skip
    assert set(rows) == {"cpu", "disk"}, output
    for asked, hits, *_, offered, loaded, loads, _forgone in rows.values():
        assert asked >= 32
        assert hits >= loads >= 4  # each round that is a child's begins with a miss of vLLM's own cache per document
        assert offered >= loaded > 0
    assert rows["disk"][-1] > 0, "the last round offers more on disk than in host memory"
    assert "the same answers, token for token" in output
    said = " ".join(output.split())
    assert re.search(r"Time: cpu \d+ ms a load, \d+ ms waited for by steps; disk \d+ ms a load, \d+ ms waited", said)
    assert "--kv-transfer-config '{" in output
    shown = output.split("The slowest load, as its trace tells it", 1)[1]
    assert re.search(r"llm_request .*kv\.lookup (cpu|disk) .*kv\.load \1 .*kv\.load\.rank 0 ", shown, re.DOTALL), shown


@pytest.mark.engine
def test_a_kept_server_serves_until_ctrl_c() -> None:
    """With --keep its /metrics answer, and Ctrl-C is its regular end."""
    with demo("--keep", "--requests", "16") as run:
        output = run.wait_for("The server stays up.", 300)
        url = re.search(r"curl -s (\S+/metrics)", output)
        assert url
        with urllib.request.urlopen(url[1], timeout=10) as answer:
            metrics = answer.read().decode()
        assert 'kvobs_load_tokens_total{connector="disk"' in metrics
        run.process.send_signal(signal.SIGINT)
        code, _ = run.finish(40)
        assert code == 0
        assert run.processes() == []
        [folder] = run.tmp.iterdir()
        assert (folder / "server.log").stat().st_size > 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("when", "patience", "number"),
    [("server ", 60, signal.SIGINT), ("is up on", 240, signal.SIGINT), ("server ", 60, signal.SIGTERM)],
    ids=["ctrl-c while it starts", "ctrl-c during the load", "kill while it starts"],
)
def test_nothing_is_left_running_after_an_interruption(when: str, patience: float, number: signal.Signals) -> None:
    """Exit code 130, no process of any of its sessions, no file, and one plain sentence."""
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


@pytest.mark.engine
def test_a_server_that_dies_shows_the_end_of_its_log() -> None:
    """Exit code 1, the exception, and a log that is still there to read."""
    with demo(VLLM_LOGGING_LEVEL="NOPE") as run:
        code, output = run.finish(120)
        assert run.processes() == []
        log = re.search(r"The end of its log, (\S+):", output)
        assert log, output
        assert "NOPE" in Path(log[1]).read_text()
    assert code == 1
    assert "The server ended by itself before it was up (exit status 1)." in output
    assert re.search(r"The error in its log: \w+Error: .*NOPE", output)
    assert "Traceback (most recent call last)" not in output.split("The end of its log")[0]


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
            command = [str(Path(sys.executable).parent / "kvobs"), "demo", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
        try:
            yield Run(process, out, tmp, tag)
        finally:
            process.kill()
            process.wait()
    finally:
        out.unlink()
        shutil.rmtree(tmp, ignore_errors=True)
