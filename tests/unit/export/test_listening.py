"""Where the exporter listens, who holds a port, and what `check` finds about an address."""

import errno
import os
import socket
from pathlib import Path

import pytest

from kvobs.export.listening import findings, holder, is_reached_from_elsewhere, listen
from kvobs.schema.options import ExporterOptions
from kvobs.testing.server import claim_port


@pytest.mark.parametrize(("host", "port"), [("a..b", 0), ("no-such-host.invalid", 0), ("192.0.2.1", 0), ("::1", 65536)])
def test_where_it_cannot_listen_is_an_os_error_with_a_reason(host: str, port: int) -> None:
    with pytest.raises(OSError) as error:  # noqa: PT011 - the system's texts
        listen(host, port)
    assert error.value.strerror


def test_without_ipv6_its_addresses_are_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(family: int, *_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, f"no family {family}")

    monkeypatch.setattr(socket, "socket", unsupported)
    with pytest.raises(OSError, match="no family"):
        listen("::1", 0)


def test_an_address_is_loopback_or_open() -> None:
    hosts = ("127.0.0.1", "127.1.2.3", "localhost", "::1", "0.0.0.0", "::", "192.0.2.1")
    assert [is_reached_from_elsewhere(host) for host in hosts] == [False] * 4 + [True] * 3


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listening_process_is_named(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError:
            assert family == socket.AF_INET6, "this machine has no IPv6"
            return
        port = listening.getsockname()[1]
        assert holder(port) == "another process", "it does not listen yet"
        listening.listen()
        named = holder(port)
    assert named.startswith(f"pid {os.getpid()} (")
    assert named == f"pid {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})", "not its command line"


def test_who_does_not_listen_on_the_port_does_not_hold_it() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            client, (accepted, _) = socket.create_connection(address), server.accept()
        with client, accepted:
            assert [holder(port) for port in (address[1], claim_port(0))] == ["another process"] * 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with listen("::", 0) as server, socket.create_connection(("127.0.0.1", server.getsockname()[1]), 10):
        pass


def test_each_finding_has_its_kind_and_place(tmp_path: Path) -> None:
    def found(port: int, **options: object) -> list[tuple[str, str]]:
        exporter = ExporterOptions.model_validate({"port": port, **options})
        return [(each.kind.name, each.path) for each in findings(exporter, "here")]

    free = claim_port(0)
    assert found(free) == []
    assert found(free, host="0.0.0.0") == [("open", "here")]
    assert found(free, host="no-such-host.invalid") == [("no-listening", "here")]
    assert found(free, web_config=str(tmp_path / "missing.yml")) == [("web-config", "here.web_config")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert found(server.getsockname()[1]) == [("port-in-use", "here")]


def test_of_another_machine_only_an_open_address_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {"port": server.getsockname()[1], "web_config": str(tmp_path / "missing.yml")}
        exporter = ExporterOptions.model_validate(options)
        assert [each.kind.name for each in findings(exporter, "here")] == ["web-config", "port-in-use"]
        assert list(findings(exporter, "here", is_here=False)) == []
        hosts = ("no-such-host.invalid", "0.0.0.0")
        others = [ExporterOptions.model_validate({"port": options["port"], "host": host}) for host in hosts]
        assert [[each.kind.name for each in findings(other, "x", is_here=False)] for other in others] == [[], ["open"]]
