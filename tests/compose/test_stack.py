"""docker-compose.yml as it is, on a real Docker engine: built, up, watched by Prometheus, down, and up again."""

from __future__ import annotations

import os
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from kvobs.testing.server import HOST, claim_port
from tests.compose.engine import Docker, NoEngineError, engine, make, make_base, wheels
from tests.engine.prometheus import Prometheus
from tests.engine.serving import ROOT, eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES = yaml.safe_load(TEXT)["services"]
VLLM = "vllm-cpu"
HOME = "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
ONCE = 96
"""Requests of the demo's load."""
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "mutants", "node_modules", "__pycache__", "*.so")


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """Yield an engine that has built all images, in a copy of the checkout; nothing of it is up at the end."""
    copy = tmp_path_factory.mktemp("compose") / "kvobs"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    try:
        with engine(copy) as client, wheels() as option:
            make_base(client)
            make(client, "prometheus", SERVICES["prometheus"]["image"])
            make(client, "answering", SERVICES["grafana"]["image"])
            make(client, "otelcol", SERVICES["otel-collector"]["image"])
            make(client, "vllm", "vllm/vllm-openai:v0.32.0")
            build = {"build": {"network": "host", "args": {"WHEELS": option}}}
            (copy / "bytecode").mkdir()
            (copy / "bytecode").chmod(0o777)
            kept = {"healthcheck": {"start_period": "900s"}, "volumes": ["./bytecode:/home/kvobs/.cache/bytecode"]}
            services = {"services": {VLLM: build | kept, "vllm-gpu": build}}
            (copy / "docker-compose.override.yml").write_text(yaml.safe_dump(services))
            client.run("compose", "--profile=cpu", "--profile=gpu", "build")
            make(client, "tempo", SERVICES["tempo"]["image"])
            yield client
            client.run("compose", "--profile=cpu", "down", "--volumes", "--timeout=1")
    except NoEngineError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"No Docker engine can be started here: {error}")


class Stack:
    """A running stack, with ports that nothing else uses."""

    def __init__(self, docker: Docker, **env: str) -> None:
        self.docker = docker
        self.ports = {name: claim_port(0) for name in re.findall(r"\{(\w+)_PORT:-", TEXT)}
        self.env = {f"{name}_PORT": str(port) for name, port in self.ports.items()} | env
        self.prometheus = Prometheus(self.ports["PROMETHEUS"])
        up = ("compose", "--profile=cpu", "up", "--build", "--wait", "--wait-timeout=900")
        assert docker.attempt(*up, env=self.env).returncode == 0, self.compose("logs", "--tail=40")

    def compose(self, *arguments: str) -> str:
        return self.docker.run("compose", "--profile=cpu", *arguments, env=self.env)

    def asked(self, query: str, **more: object) -> dict[str, float]:
        """Return what an instant query finds, by connector."""
        found = self.prometheus.api("query", query=query, **more)["result"]
        return {series["metric"].get("connector", ""): float(series["value"][1]) for series in found}

    def spans(self) -> set[str]:
        """Return the names of the spans that the collector has passed on to Tempo."""
        with urllib.request.urlopen(f"http://{HOST}:{self.ports['TEMPO']}/metrics", timeout=10) as answer:
            return set(re.findall(r'spans_total\{name="(.*?)"\}', answer.read().decode()))


def left(docker: Docker) -> list[str]:
    """Return what there is of containers, networks and volumes."""
    lists = ("ps --all --format={{.Names}}", "network ls --filter=type=custom --format={{.Name}}", "volume ls --quiet")
    return [line for each in lists for line in docker.run(*each.split()).split()]


def test_the_demos_image_runs_as_a_user_and_has_a_health_check(docker: Docker) -> None:
    compose = ("compose", "--profile=cpu", "run", "--rm", "--no-deps")
    assert docker.run(*compose, "--entrypoint=whoami", VLLM).split() == ["kvobs"]
    program, *arguments = SERVICES[VLLM]["healthcheck"]["test"][1:]
    checked = docker.attempt(*compose, f"--entrypoint={program}", VLLM, *arguments)
    assert checked.returncode == 1
    assert "Connection refused" in checked.stderr + checked.stdout


def test_up_serves_scrapes_and_records_and_down_leaves_nothing(docker: Docker) -> None:
    stack = Stack(docker)
    prometheus = stack.prometheus
    for name in ("VLLM", "EXPORTER", "TEMPO", "GRAFANA", "COLLECTOR_HEALTH"):
        urllib.request.urlopen(f"http://{HOST}:{stack.ports[name]}/metrics", timeout=10).close()

    def health() -> dict[str, str]:
        return {each["labels"]["job"]: each["health"] for each in prometheus.api("targets")["activeTargets"]}

    assert eventually(lambda: set(health().values()) == {"up"}), health()
    assert health().keys() == {"vllm", "kvobs", "otel-collector"}

    def rules() -> list[str]:
        return [rule["health"] for group in prometheus.api("rules")["groups"] for rule in group["rules"]]

    assert eventually(lambda: set(rules()) == {"ok"}, 90), rules()
    loads = 'connector_outcome:kvobs_loads:rate5m{outcome="ok"} > 0'
    assert eventually(lambda: stack.asked(loads).keys() == {"cpu", "disk"}, 90), "recorded"
    assert stack.asked("sum(otelcol_receiver_accepted_spans)")[""] > 0
    assert eventually(lambda: {"kv.load cpu", "kv.load disk"} <= stack.spans(), 60), stack.compose(
        "logs", "otel-collector"
    )
    lookups = "sum by (connector) (kvobs_lookups_total)"
    assert eventually(lambda: stack.asked(lookups)["cpu"] > 2 * ONCE, 300), "the load is repeated"
    stack.compose("exec", "grafana", "test", "-r", SERVICES["grafana"]["environment"][HOME])
    now = time.time()
    assert prometheus.api("query_exemplars", query="kvobs_load_duration_seconds_bucket", start=now - 600, end=now)
    stack.compose("stop", VLLM)
    (container,) = stack.compose("ps", "--all", "--quiet", VLLM).split()
    assert docker.run("inspect", "--format={{.State.ExitCode}}", container).strip() == "0", "it was not killed"
    stack.compose("down")
    assert left(docker) == ["kvobs_metrics", "kvobs_traces"]

    faulty = Stack(docker, DEMO="--fault failing-connector")
    assert faulty.ports["PROMETHEUS"] != stack.ports["PROMETHEUS"]
    assert faulty.asked("kvobs_loads_total", time=now), "what was recorded before is still there"

    failing = 'ALERTS{alertname="KvobsConnectorErrors", alertstate="firing"}'
    assert eventually(lambda: faulty.asked(failing).keys() == {"cpu"}, 300), faulty.prometheus.api("alerts")
    faulty.compose("down", "--volumes")
    assert left(docker) == []
