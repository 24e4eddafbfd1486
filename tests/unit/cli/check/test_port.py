"""The exporter's port is tried on this machine: what holds it is named, and nothing is said where it is free."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvobs.cli.check import port
from kvobs.cli.check.check import check
from kvobs.schema.config import EXPORTER_VARIABLE, PATH
from kvobs.schema.options import ExporterOptions
from tests.support.configurations import config_of


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_without_a_port_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_try_to_listen", lambda *_: pytest.fail("tried"))
    assert port.findings(None, {}) == []
    assert port.findings(ExporterOptions(port=None, otlp_metrics=True), {}) == []


def test_a_free_port_is_left_free() -> None:
    exporter = ExporterOptions(port=free())
    for _ in range(2):
        assert port.findings(exporter, {}) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_what_holds_the_port_is_named_in_a_warning(host: str, taken: int) -> None:
    exporter = {"host": host, "port": taken}
    checked = check(config_of(kvobs={"exporter": exporter}))
    assert checked.mistakes == []
    (warning,) = checked.warnings
    assert warning.path == f"{PATH}.kvobs.exporter"
    assert f"found port {taken}, which is in use on this machine: held by pid {os.getpid()} (" in warning.found
    assert "unless it is the exporter of this engine" in warning.fix


def test_the_variable_is_named_where_it_set_the_port(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORTER_VARIABLE, f"127.0.0.1:{taken}")
    checked = check(config_of())
    assert [warning.path for warning in checked.warnings] == [f"environment variable {EXPORTER_VARIABLE}"]
    assert checked.metrics_go_to == f"http://127.0.0.1:{taken}/metrics, from kvobs's exporter"
    monkeypatch.setenv(EXPORTER_VARIABLE, "127.0.0.1:1")
    checked = check(config_of(kvobs={"exporter": {"port": taken}}))
    assert [warning.path for warning in checked.warnings] == [f"{PATH}.kvobs.exporter"]


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 80, "a\0b"])
def test_an_address_of_another_machine_is_a_warning_too(host: str) -> None:
    """The check may run elsewhere."""
    (finding,) = port.findings(ExporterOptions(host=host), {})
    assert "where this machine can't listen: " in finding.found
    assert str(finding).isprintable()


BAD: list[tuple[Any, str, str]] = [
    ({"prot": 9464}, "kvobs.exporter.prot", "use 'port'"),
    ({"port": 0}, "kvobs.exporter.port", "use an allowed value, or remove the option"),
    ({"port": None}, "kvobs.exporter", "use an allowed value, or remove the option"),
    ({"host": ""}, "kvobs.exporter.host", "use an allowed value, or remove the option"),
    (True, "kvobs.exporter", "use an allowed value, or remove the option"),
]


@pytest.mark.parametrize(("exporter", "path", "fix"), BAD)
def test_mistakes_in_the_options_have_their_path(exporter: Any, path: str, fix: str) -> None:
    (mistake,) = check(config_of(kvobs={"exporter": exporter})).mistakes
    assert (mistake.path, mistake.fix) == (f"{PATH}.{path}", fix)
    assert mistake.allowed or mistake.found.startswith("found '', ")


def test_a_mistake_in_the_variable_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORTER_VARIABLE, "9464")
    (mistake,) = check(config_of()).mistakes
    assert mistake.path == f"environment variable {EXPORTER_VARIABLE}"
    assert mistake.allowed == "HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:9464"
    assert mistake.fix == "use an allowed value, or unset the variable"
