"""The options of `kvobs demo`; what it does is in tests/engine/test_demo.py."""

import re
import time
import urllib.request
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Self
from unittest import mock
from urllib.error import URLError

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.cli.check.source import parse
from kvobs.demo import load, run
from kvobs.schema.config import read
from kvobs.testing import server


class FakeServer:
    """Stands for a server, and ends the wait for Ctrl-C after two rounds."""

    url = "http://127.0.0.1:8000"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named, self.looks = arguments, named, 0
        self.kv_transfer_config = arguments[2] if arguments else None
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


@pytest.fixture
def demo_without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Server", FakeServer)
    monkeypatch.setattr(run, "make_model", lambda _folder: None)
    for step in ("measure", "show_slowest_load", "look_further"):
        monkeypatch.setattr(run.Demo, step, lambda *_arguments: None)


@pytest.mark.usefixtures("demo_without_engine")
@pytest.mark.parametrize("endpoint", [None, "http://otel-collector:4317"])
def test_spans_go_to_the_collector_of_the_environment(endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run.ENDPOINT, raising=False)
    if endpoint:
        monkeypatch.setenv(run.ENDPOINT, endpoint)
    run.Demo(Console(quiet=True), host="0.0.0.0").run()
    *_, (option, sent_to), env = FakeServer.last.arguments
    assert option == "--otlp-traces-endpoint"
    assert FakeServer.last.named["host"] == "0.0.0.0"
    assert (sent_to == endpoint) if endpoint else sent_to.startswith("http://127.0.0.1:")
    assert ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" in env) is (endpoint is None)


@pytest.mark.usefixtures("demo_without_engine")
@pytest.mark.parametrize(("port", "claimed", "used"), [(0, 0, 40000), (8000, 9464, 9464)])
def test_exporters_listen_beside_servers(port: int, claimed: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "claim_port", {claimed: used}.__getitem__)
    ended: list[str] = []
    monkeypatch.setattr(run, "see_exporter_end", ended.append)
    out = StringIO()
    run.Demo(Console(file=out), port=port, host="0.0.0.0", exporter=True, fault=run.FAULTS["failing-connector"]).run()
    config = FakeServer.last.arguments[2]
    options = config["kv_connector_extra_config"]["kvobs"]
    assert options["exporter"] == {"host": "0.0.0.0", "port": used}
    assert (options["names"], options["best_effort"]) == (list(run.NAMES), ["cpu"])
    assert config["kv_load_failure_policy"] == "recompute"
    assert f"kvobs's metrics are at http://127.0.0.1:{used}/metrics" in out.getvalue()
    assert f"its status page is at http://127.0.0.1:{used}/\n" in out.getvalue()
    assert ended == [f"http://127.0.0.1:{used}/metrics"]


def test_the_exporter_is_asked_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a last scrape it need not serve the last numbers any longer."""
    ask = mock.Mock(side_effect=[BytesIO(), BytesIO(), URLError("refused")])
    monkeypatch.setattr(urllib.request, "urlopen", ask)
    run.see_exporter_end("http://127.0.0.1:9464/metrics")
    assert ask.call_args_list == [mock.call("http://127.0.0.1:9464/metrics", timeout=1)] * 3


def test_an_exporter_that_gives_no_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "ARRIVE_S", 0.3)
    config = run.multi_connector(run.host_memory())
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = {"port": server.claim_port(0)}
    made = server.Server(tmp_path, tmp_path / "log", config)
    with pytest.raises(
        server.ServerError, match=r"kvobs's metrics, http://127.0.0.1:\d+/metrics, can't be read: no answer"
    ):
        run.reading(made)


def test_the_last_command_turns_nothing_off(tmp_path: Path) -> None:
    out = StringIO()
    run.Demo(Console(file=out)).look_further(FakeServer(), tmp_path)  # type: ignore[arg-type]
    (line,) = [line for line in out.getvalue().splitlines() if "vllm serve" in line]
    (command,) = parse(line.strip())
    assert not [flag for flag in command.flags if flag.startswith("no-")]
    assert command.config is not None
    connectors = command.config["kv_connector_extra_config"]["connectors"]
    assert [connector["kv_connector"] for connector in connectors] == ["OffloadingConnector"]


@pytest.mark.parametrize(("exporter", "shown"), [(True, ["http://127.0.0.1:9464/"]), (False, [])])
def test_the_status_page_is_a_next_step_where_there_is_one(exporter: bool, shown: list[str], tmp_path: Path) -> None:
    out = StringIO()
    run.Demo(Console(file=out), exporter=exporter).look_further(FakeServer(), tmp_path)  # type: ignore[arg-type]
    assert [line.split()[0] for line in out.getvalue().splitlines() if "status page" in line] == shown


@pytest.mark.parametrize("repeat", [False, True])
def test_the_load_is_repeated_if_wanted(repeat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_rounds = mock.Mock(return_value=[])
    monkeypatch.setattr(load, "run_rounds", run_rounds)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    run.Demo(Console(quiet=True), repeat=repeat, requests=20).wait_for_ctrl_c(FakeServer())  # type: ignore[arg-type]
    assert [call.args[1] for call in run_rounds.call_args_list] == ([20, 20] if repeat else [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--port 70000", "--port"), ("--requests 3", "--requests"), ("--prot 1", "--prot"),
     ("--repeat", "requires --keep"), ("--host ::1", "127.0.0.1 or 0.0.0.0")],
)  # fmt: skip
def test_options_of_the_demo_that_make_no_sense_are_refused(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments.split()])
    assert result.exit_code == 2
    assert says in " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def test_without_vllm_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda _name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr == "kvobs demo needs vLLM: pip install 'kvobs[engine]' (for CPUs)\n"


@pytest.mark.parametrize("fault", [None, *run.FAULTS])
def test_the_demos_configuration_is_valid_with_any_fault(fault: str | None, tmp_path: Path) -> None:
    config = (
        run.with_fault(run.FAULTS[fault], tmp_path)
        if fault
        else run.multi_connector(run.host_memory(), run.files(tmp_path))
    )
    extra = config["kv_connector_extra_config"]
    assert read(extra).names == ("cpu", "disk")
    assert extra["connectors"][0]["kv_connector_extra_config"].get("fault") == fault
