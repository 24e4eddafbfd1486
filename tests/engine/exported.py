"""A server whose kvobs metrics come from its exporters, in the form in which tests read those of an API server."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvobs.demo.server import HOST, Server, claim_port, parse_metrics
from kvobs.export import http_server
from kvobs.schema.options import ExporterOptions
from tests.engine.serving import eventually

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

PORT = ExporterOptions().port or 0
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def with_exporter(config: dict[str, Any], **options: Any) -> tuple[dict[str, Any], int]:
    """Switch the exporter on in a configuration; return it, and the port."""
    port = claim_port(0)
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = {"port": port, **options}
    return config, port


def by_itself(server: Server, engines: int = 1) -> Any:
    """Return a server whose engines' exporters started without being asked to; wait until they answer."""
    exported = Exported(server, *(PORT + engine for engine in range(engines)))
    exported.until_up()
    return exported


class Exported:
    """Reads like a `Server`: kvobs's numbers come from the exporters at these ports, all else from the server."""

    def __init__(self, server: Server, *at: int) -> None:
        self.server, self.ports = server, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def get(self, path: str, port: int | None = None, accept: str = "text/plain") -> str:
        """Return a page of an exporter; that of the first one by default."""
        url = f"http://{HOST}:{port or self.ports[0]}{path}"
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def request(self, path: str, *more: Any) -> bytes:
        """Return a page: /metrics of the exporters, any other of the server."""
        if path != "/metrics":
            return self.server.request(path, *more)
        return "".join(self.get("/metrics", port) for port in self.ports).encode()

    def metrics(self) -> list[Sample]:
        """Return kvobs's samples and vLLM's; the server itself must have none of kvobs's."""
        vllms = self.server.metrics()
        assert not [s for s in vllms if s.name.startswith("kvobs_")]
        return [*vllms, *(s for port in self.ports for s in parse_metrics(self.get("/metrics", port)))]

    def health(self) -> dict[str, Any]:
        """Return /healthz of the first exporter, also where its engine is gone."""
        try:
            found: dict[str, Any] = json.loads(self.get("/healthz"))
        except urllib.error.HTTPError as error:
            found = json.loads(error.read())
        return found

    def pid(self) -> int:
        """Return the process of the first exporter."""
        listening = http_server._listening(self.ports[0])
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    is_one = b"kvobs.export" in (entry / "cmdline").read_bytes().split(b"\0")
                    if is_one and listening & {os.readlink(link) for link in (entry / "fd").iterdir()}:
                        return int(entry.name)
        raise AssertionError(f"no exporter has port {self.ports[0]}")

    def resident(self) -> int:
        """Return the memory of the first exporter, in bytes."""
        return int(Path(f"/proc/{self.pid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def until_up(self) -> None:
        """Wait until all exporters answer."""

        def answers() -> bool:
            with suppress(OSError):
                return all(self.get("/healthz", port) for port in self.ports)
            return False

        assert eventually(answers, 60)
