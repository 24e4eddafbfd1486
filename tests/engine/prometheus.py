"""A real Prometheus or VictoriaMetrics for a test: it scrapes what its configuration says, and answers queries."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboards.alerts import ALERTS
from dashboards.site import Site, fill
from kvobs.testing.server import HOST, claim_port
from tests.engine.serving import eventually
from tests.support.promtool import found


def major() -> int:
    """Return the major version of the Prometheus that runs in tests, whose word is "prometheus, version 3.5.3"."""
    said = subprocess.run([found("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return int((said.stdout or said.stderr).split()[2].partition(".")[0])


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


def expression(name: str) -> str:
    """Return the expression of an alert."""
    (found,) = (fill(alert.as_dict(), Site())["expr"] for alert in ALERTS if alert.name == name)
    return str(found)


@contextmanager
def scraping(folder: Path, configuration: str, *arguments: str) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration, a scrape each second."""
    config, prometheus = folder / "prometheus.yml", Prometheus(claim_port(0))
    config.write_text(f"global:\n  scrape_interval: 1s\n{configuration}")
    flags = (
        f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{prometheus.port}", "--log.level=warn", *arguments,
    )  # fmt: skip
    with _running(folder, "prometheus", *flags) as log:
        assert eventually(prometheus.is_ready), log.read_text()
        yield prometheus


@contextmanager
def victoria(folder: Path, jobs: str, rules: Path) -> Iterator[Prometheus]:
    """Run VictoriaMetrics with these scrape jobs, and vmalert with the rules in a folder; a scrape each second."""
    config, metrics = folder / "victoria.yml", Prometheus(claim_port(0))
    config.write_text(f"global:\n  scrape_interval: 1s\n{jobs}")
    url = f"http://{HOST}:{metrics.port}"
    flags = (
        f"-promscrape.config={config}", f"-storageDataPath={folder / 'victoria'}",
        f"-httpListenAddr={HOST}:{metrics.port}", "-search.latencyOffset=1s", "-search.disableCache",
    )  # fmt: skip
    with _running(folder, "victoria-metrics", *flags) as log:
        assert eventually(metrics.is_ready), log.read_text()
        alerting = (
            f"-rule={rules}/*.yml", f"-datasource.url={url}", f"-remoteWrite.url={url}", "-notifier.url=http://127.0.0.1:9",
            f"-httpListenAddr={HOST}:{claim_port(0)}", "-evaluationInterval=1s", "-loggerLevel=ERROR",
        )  # fmt: skip
        with _running(folder, "vmalert", *alerting):
            yield metrics


@contextmanager
def _running(folder: Path, program: str, *flags: str) -> Iterator[Path]:
    """Run a program, and return its log."""
    log = folder / f"{program}.log"
    with log.open("wb") as output:
        process = subprocess.Popen([found(program), *flags], stdout=output, stderr=output)
        try:
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(20)
