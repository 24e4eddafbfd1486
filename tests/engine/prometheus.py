"""A real Prometheus for a test: it scrapes what its configuration says, and answers queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvobs.demo.server import HOST, claim_port
from tests.engine.serving import eventually


class Prometheus:
    """One that listens on a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def api(self, path: str, **parameters: Any) -> Any:
        """Return the data of an answer of its HTTP API, such as of "query"."""
        url = f"http://{HOST}:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """Return the one value of an instant query, None without any."""
        result = self.api("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def scraping(folder: Path, configuration: str, *arguments: str) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration, a scrape each second."""
    binary = shutil.which("prometheus")
    assert binary, "prometheus is missing: install it (Debian's package of that name), or run `make promtool`"
    config, prometheus = folder / "prometheus.yml", Prometheus(claim_port(0))
    config.write_text(f"global:\n  scrape_interval: 1s\n{configuration}")
    command = [
        binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{prometheus.port}", "--log.level=warn", *arguments,
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            assert eventually(prometheus.is_ready), (folder / "prometheus.log").read_text()
            yield prometheus
        finally:
            process.terminate()
            process.wait(20)
