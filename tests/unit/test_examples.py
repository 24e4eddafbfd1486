"""The examples for other people's clusters: charts take them, their configurations are right, and all ports meet.

What the charts and guides make of them is written here as facts (tests/support/charts.py): they are not downloaded.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # vLLM brings it, without types
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from kvobs.cli import app, dashboards
from kvobs.cli.commands import load
from kvobs.export.listening import LESS_OPEN
from tests.support import charts

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
NAMES = ("production-stack", "llm-d", "llm-d-modelservice")
CHARTS = {"production-stack": charts.VLLM_STACK, "llm-d-modelservice": charts.MODELSERVICE}
JOBS = ["vllm", "kvobs"]
EXPORTER = 9464
VLLM_PORTS = {"prefill": 8000, "decode": 8200}
"""Of the guide: in decode pods the routing sidecar has 8000."""


def values(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name / "values.yaml").read_text())


def problems(found: dict[str, Any]) -> list[Any]:
    """Return the findings but one: an exporter in a pod listens for Prometheus, and a network policy guards it."""
    return [finding for finding in (*found["errors"], *found["warnings"]) if finding["fix"] != LESS_OPEN]


def assert_right(args: list[str], connectors: list[str]) -> None:
    """Assert that ``kvobs check`` has nothing against a line with these arguments, and that it has these connectors."""
    result = CliRunner().invoke(app, ["check", shlex.join(["vllm", "serve", *args]), "--json"])
    assert problems(json.loads(result.stdout)) == []
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert config["kv_connector_module_path"] == "kvobs"
    assert [each["kv_connector"] for each in config["kv_connector_extra_config"]["connectors"]] == connectors
    options = config["kv_connector_extra_config"]["kvobs"]
    assert options["exporter"] == {"host": "0.0.0.0"}, "Prometheus is not in the pod"
    assert len(options["names"]) == len(connectors)


@pytest.mark.parametrize(
    "file", ["production-stack/values.yaml", "llm-d-modelservice/values.yaml", "llm-d/kustomization.yaml"]
)
def test_the_check_reads_the_file_itself_and_finds_its_engines(file: str) -> None:
    result = CliRunner().invoke(app, ["check", str(EXAMPLES / file), "--json"])
    engines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [problems(engine) for engine in engines] == [[]] * (1 if "stack" in file else 2)


@pytest.mark.parametrize("name", CHARTS)
def test_the_chart_takes_the_values(name: str) -> None:
    jsonschema.validate(values(name), charts.schema(CHARTS[name]))


def test_a_slip_in_values_is_found() -> None:
    wrong = values("production-stack")
    wrong["servingEngineSpec"]["modelSpec"][0]["vllmConfig"].update(extraArg=["--x"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, charts.schema(charts.VLLM_STACK))


def test_the_production_stack_starts_a_right_configuration() -> None:
    (model,) = values("production-stack")["servingEngineSpec"]["modelSpec"]
    assert_right([model["modelURL"], *model["vllmConfig"]["extraArgs"]], ["OffloadingConnector", "NixlConnector"])
    assert "lmcacheConfig" not in model, "its --kv-transfer-config would come after ours, and count"
    assert "tensorParallelSize" in model["vllmConfig"], "without it the chart mounts no /dev/shm"


def test_the_modelservice_starts_right_configurations() -> None:
    content = values("llm-d-modelservice")
    ports = {"prefill": content["routing"]["servicePort"], "decode": content["routing"]["proxy"]["targetPort"]}
    connectors = {"prefill": ["NixlConnector", "OffloadingConnector"], "decode": ["NixlConnector"]}
    for role, port in ports.items():
        (container,) = content[role]["containers"]
        assert_right(container["args"], connectors[role])
        named = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert named == {"metrics": port, "kvobs": EXPORTER}
        assert content["modelArtifacts"]["labels"].items() >= SELECTED["llm-d-modelservice"].items()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in content[role]["volumes"]}


def test_the_page_names_each_example_and_has_its_image() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(NAMES)
    page = (ROOT / "docs/deployment.md").read_text()
    for name in NAMES:
        assert f"](examples/{name}/" in page
        text = "\n".join(path.read_text() for path in (EXAMPLES / name).glob("*.yaml"))
        (repository,) = set(re.findall(r"registry\.example\.com/[\w-]+", text))
        (tag,) = set(re.findall(r"\bv\d+\.\d+\.\d+\b", text))
        assert f"FROM vllm/vllm-openai:{tag}\n" in page
        assert f"docker build --tag {repository}:{tag}" in page


KUBERNETES = "1.37"


def manifests() -> dict[str, Any]:
    """Return the objects of Kubernetes itself on the pages, by kind; of a LeaderWorkerSet its pods."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/deployment.md").read_text(), re.MULTILINE | re.DOTALL)
    found = [each for block in blocks for each in yaml.safe_load_all(block) if "kind" in each]
    objects = {each["kind"]: each for each in found if each["apiVersion"] in ("v1", "apps/v1")}
    (group,) = (each["spec"]["leaderWorkerTemplate"] for each in found if each["kind"] == "LeaderWorkerSet")
    for name in ("leaderTemplate", "workerTemplate"):
        metadata = {"name": "pod", **group[name]["metadata"]}
        objects[name] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group[name]["spec"]}
    return objects


@pytest.mark.parametrize("name", ["Deployment", "leaderTemplate", "workerTemplate"])
def test_manifests_have_only_fields_of_kubernetes(name: str) -> None:
    manifest = manifests()[name]
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    manifest["spec"]["shmSize"] = "1Gi"
    with pytest.raises(kubernetes_validate.ValidationError, match="shmSize"):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_all_pods_of_one_engine_are_scraped_and_configured_alike(role: str) -> None:
    pod, deployed = manifests()[f"{role}Template"], manifests()["Deployment"]["spec"]["template"]
    (engine,) = pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == deployed["metadata"]["labels"], "which the PodMonitor selects"
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert ports == {"kvobs": EXPORTER} | ({"http": 8000} if role == "leader" else {})
    assert {"name": "KVOBS_EXPORTER", "value": f"0.0.0.0:{EXPORTER}"} in engine["env"]


def test_the_sidecar_shares_memory_and_its_engine_exports_none() -> None:
    page = (ROOT / "docs/exporter.md").read_text()
    (pod,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL))
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    (sidecar,), (engine,) = (pod["spec"][kind] for kind in ("initContainers", "containers"))
    assert sidecar["restartPolicy"] == "Always", "else the engine would wait for its end"
    assert sidecar["volumeMounts"] == engine["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert sidecar["ports"] == [{"name": "kvobs", "containerPort": EXPORTER}]
    assert sidecar["image"] == engine["image"], "one version reads what the other has written, as the same user"
    name, command, *options = sidecar["command"]
    known = {name for parameter in load(command).params for name in parameter.opts}
    assert name == "kvobs"
    assert {option for option in options if option.startswith("-")} <= known
    config = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["kvobs"]["exporter"] is None


def built(folder: Path) -> list[Any]:
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def _deployment(name: str, args: list[str]) -> dict[str, Any]:
    container = {
        "name": charts.GUIDE_CONTAINER,
        "image": f"{charts.GUIDE_IMAGE}:v0.27.1",
        "args": args,
        "ports": [{"name": "modelserver", "containerPort": VLLM_PORTS[name]}],
    }
    pod = {"containers": [container], "initContainers": [{"name": "routing-proxy", "image": "proxy:1"}]}
    spec = {"template": {"spec": pod}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def guide(folder: Path, arguments: dict[str, list[str]] = charts.GUIDE) -> Path:
    """Write what our overlay stands on, in the guide's form: a base with a prefix, a variant, and the overlay."""
    objects = [_deployment(name, args) for name, args in arguments.items()]
    header = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    for place, content in {
        "base/kustomization.yaml": header | {"resources": ["all.yaml"], "namePrefix": charts.GUIDE_PREFIX},
        "base/all.yaml": None,
        "multi-tier/kustomization.yaml": header | {"resources": ["../base"]},
    }.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(yaml.safe_dump_all(objects) if content is None else yaml.safe_dump(content))
    overlay = folder / "multi-tier-kvobs"
    overlay.mkdir()
    shutil.copy(EXAMPLES / "llm-d/kustomization.yaml", overlay)
    return overlay


@pytest.mark.tools
def test_the_overlay_changes_only_the_guide_s_engines(tmp_path: Path) -> None:
    found = {each["metadata"]["name"].removeprefix(charts.GUIDE_PREFIX): each for each in built(guide(tmp_path))}
    assert found.keys() == charts.GUIDE.keys()
    connectors = {"prefill": ["NixlConnector", "OffloadingConnector"], "decode": ["NixlConnector"]}
    for name, deployment in found.items():
        pod = deployment["spec"]["template"]["spec"]
        (engine,) = pod["containers"]
        assert engine["image"] == "registry.example.com/vllm-kvobs:v0.32.0"
        assert pod["initContainers"] == [{"name": "routing-proxy", "image": "proxy:1"}]
        place = charts.GUIDE[name].index("--kv-transfer-config") + 1
        assert [*engine["args"][:place], *engine["args"][place + 1 :]] == [
            argument for number, argument in enumerate(charts.GUIDE[name]) if number != place
        ]
        assert_right(engine["args"], connectors[name])
        assert {port["name"]: port["containerPort"] for port in engine["ports"]} == {
            "modelserver": VLLM_PORTS[name],
            "kvobs": EXPORTER,
        }


@pytest.mark.tools
def test_arguments_that_moved_are_an_error_and_not_overwritten(tmp_path: Path) -> None:
    moved = {name: ["--new", *args] for name, args in charts.GUIDE.items()}
    with pytest.raises(AssertionError, match="test"):
        built(guide(tmp_path, moved))


@pytest.mark.tools
@pytest.mark.parametrize("name", NAMES)
def test_monitoring_has_all_of_an_export_with_the_example_s_pods(name: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / name / "monitoring", tmp_path, dirs_exist_ok=True)
    files = dashboards.contents(dashboards.SiteSettings(labels=["release=mon"], namespaces=["llm"]))
    dashboards.export(tmp_path / "export", files)
    objects = {(each["kind"], each["metadata"]["name"]): each for each in built(tmp_path)}
    boards = {f"kvobs-{board}" for board in ("overview", "connector", "prefill-decode", "slow-loads", "itself")}
    assert set(objects) == {("PodMonitor", "kvobs"), ("PrometheusRule", "kvobs"), *(("ConfigMap", b) for b in boards)}
    for board in boards:
        assert objects["ConfigMap", board]["metadata"]["labels"]["grafana_dashboard"] == "1"
    for kind in ("PodMonitor", "PrometheusRule"):
        assert objects[kind, "kvobs"]["metadata"]["labels"]["release"] == "mon"
    spec = objects["PodMonitor", "kvobs"]["spec"]
    assert spec["namespaceSelector"] == {"matchNames": ["llm"]}
    assert spec["selector"] == {"matchLabels": SELECTED[name]}
    ports, jobs = [], []
    for endpoint in spec["podMetricsEndpoints"]:
        assert endpoint["path"] == "/metrics"
        job, *address = endpoint["relabelings"]
        assert (job["action"], job["targetLabel"]) == ("replace", "job")
        jobs.append(job["replacement"])
        ports.append((endpoint["port"], *(each["replacement"] for each in address)))
    assert jobs == JOBS, "what rules and boards ask for"
    assert ports == SCRAPED[name]


SELECTED = {
    "production-stack": {"helm-release-name": "vllm"},
    "llm-d": {"llm-d.ai/guide": "pd-disaggregation"},
    "llm-d-modelservice": {"llm-d.ai/model": "qwen3"},
}
"""Labels that the chart or guide gives its engines' pods."""
SCRAPED = {
    "production-stack": [("container-port",), ("container-port", f"$1:{EXPORTER}")],
    "llm-d": [("modelserver",), ("kvobs",)],
    "llm-d-modelservice": [("metrics",), ("kvobs",)],
}
"""By job, the name of the container's port; and the address, where that is another one's."""
