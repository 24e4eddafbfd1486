"""The options of `kvobs demo` that a stack of containers needs."""

import time
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.demo import load, run, server


class FakeServer:
    """Stands for a server, and ends the wait for Ctrl-C after two rounds."""

    url = "http://127.0.0.1:8000"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named, self.looks = arguments, named, 0
        FakeServer.last = self

    last: "FakeServer"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def check_alive(self) -> None:
        self.looks += 1
        if self.looks > 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("endpoint", [None, "http://otel-collector:4317"])
def test_spans_go_to_the_collector_of_the_environment_if_there_is_one(
    endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(run.ENDPOINT, raising=False)
    if endpoint:
        monkeypatch.setenv(run.ENDPOINT, endpoint)
    monkeypatch.setattr(run, "Server", FakeServer)
    monkeypatch.setattr(run, "make_model", lambda _folder: None)
    for step in ("measure", "show_slowest_load", "look_further"):
        monkeypatch.setattr(run.Demo, step, lambda *_arguments: None)
    run.Demo(Console(quiet=True), host="0.0.0.0").run()
    *_, (option, sent_to), env = FakeServer.last.arguments
    assert option == "--otlp-traces-endpoint"
    assert FakeServer.last.named["host"] == "0.0.0.0"
    assert (sent_to == endpoint) if endpoint else sent_to.startswith("http://127.0.0.1:")
    assert ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" in env) is (endpoint is None)


@pytest.mark.parametrize("repeat", [False, True])
def test_the_load_is_repeated_if_wanted(repeat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def run_rounds(_server: object, requests: int) -> list[object]:
        rounds.append(requests)
        return []

    monkeypatch.setattr(load, "run_rounds", run_rounds)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    run.Demo(Console(quiet=True), repeat=repeat, requests=20).wait_for_ctrl_c(FakeServer())  # type: ignore[arg-type]
    assert rounds == ([20, 20] if repeat else [])


def test_a_server_listens_where_it_is_told_to(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        line = server.Server(tmp_path, tmp_path / "log", host=host).command()
        assert line[line.index("--host") + 1] == host


@pytest.mark.parametrize("arguments", [["--host", "::1"], ["--repeat"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert "allowed" in result.output
