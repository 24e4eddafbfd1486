"""A server whose kvobs metrics come from an exporter, in the form in which tests read those of an API server."""

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.samples import Sample

from kvobs.export.starter import AUTO_AFTER_S
from kvobs.schema.options import ExporterOptions
from kvobs.testing.server import HOST, Server, claim_port, parse_metrics
from tests.engine.serving import eventually
from tests.support.affinity import set_affinity

PORT = ExporterOptions().port or 0
UP_S = AUTO_AFTER_S + 60
SHOWN_BY_NONE = "no vLLM API server exposes them"
"""Why an exporter starts without being asked to, as it is logged."""
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def with_exporter(config: dict[str, Any], **options: Any) -> tuple[dict[str, Any], int]:
    """Switch the exporter on in a configuration; return it, and the port."""
    port = claim_port(0)
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = {"port": port, **options}
    return config, port


def by_itself(server: Server) -> Any:
    """Return a server whose exporter starts without being asked to; wait until it answers."""
    exported = Exported(server, PORT)
    exported.until_up()
    return exported


class Exported:
    """Reads like a `Server`: kvobs's numbers come from the exporters at these ports, all else from the server.

    There is one on each host.
    """

    def __init__(self, server: Server, *at: int) -> None:
        self.server, self.ports = server, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def get(self, path: str, port: int | None = None, accept: str = "text/plain") -> str:
        """Return a page of an exporter; that of the first one by default."""
        url = f"http://{HOST}:{port or self.ports[0]}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
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

    def health(self, engine: int = 0) -> dict[str, Any]:
        """Return what /healthz of the first exporter says about an engine, also where that is gone."""
        try:
            found = json.loads(self.get("/healthz"))
        except urllib.error.HTTPError as error:
            found = json.loads(error.read())
        (health,) = (one for one in found["engines"] if one["engine"] == engine)
        return dict(health)

    def pid(self, port: int | None = None) -> int:
        """Return the process of an exporter; of the first one by default."""
        at = port or self.ports[0]
        listeners = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == at]
        (pid,) = (c.pid for c in listeners if "kvobs.export" in psutil.Process(c.pid).cmdline())
        return int(pid)

    def resident(self) -> int:
        """Return the memory of the first exporter, in bytes."""
        return int(Path(f"/proc/{self.pid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def until_up(self) -> None:
        """Wait until all exporters answer, and let them run on all cores: see ``tests.support.affinity``."""

        def answers() -> bool:
            with suppress(OSError):
                return all(self.get("/healthz", port) for port in self.ports)
            return False

        assert eventually(answers, UP_S)
        for port in self.ports:
            set_affinity(self.pid(port), set(range(os.cpu_count() or 1)))
